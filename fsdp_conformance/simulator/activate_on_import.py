"""
Importing this module activates the simulated accelerator in the process.

For warm processes, which import modules by name before ranks are forked from them. Other code calls
`activation.activate()`.
"""

from fsdp_conformance.simulator.activation import activate

activate()
