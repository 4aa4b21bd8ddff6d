"""
A simulated accelerator: a device `sim` in host memory, with streams, pinned memory and collectives, under a checker.

Operations run at once, in program order, with the CPU's kernels, so that numbers are the CPU's to the last bit. What an
accelerator would run concurrently is kept as clocks: an access that nothing orders after the one it depends on is a
hazard, found whatever the timing. `device.activate()` makes the device known to torch; it needs a C++ compiler once.

What it has not got: sparse, nested and quantized tensors, graphs, memory shared between processes, a limit of memory.
An operation that torch composes of others, with a choice by type of device inside, may choose otherwise than on the
CPU; convolution, attention, dropout and recurrent networks are seen to. torch has one place for a device from outside,
so the device cannot stand beside another such backend.
"""
