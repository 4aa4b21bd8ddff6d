"""
Importing this module makes the simulated accelerator active in the process.

For warm processes, which import modules by name before ranks are forked from them; everybody else calls
`device.activate()`.
"""

from fsdp_conformance.simulator.device import activate

activate()
