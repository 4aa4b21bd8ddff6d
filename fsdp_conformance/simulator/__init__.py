"""
A simulated accelerator: a device `sim` in host memory, with streams, pinned memory and collectives, under a checker.

Operations run at once, in program order, with the CPU's kernels, so that numbers are the CPU's. What an accelerator
would run concurrently is kept as clocks: an access that nothing orders after the one it depends on is a hazard, found
whatever the timing. `device.activate()` makes the device known to torch; it needs a C++ compiler once.
"""
