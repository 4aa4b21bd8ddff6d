"""
A simulated accelerator: a device `sim` in host memory, with streams, pinned memory and collectives, under a checker.

Operations run immediately, in program order, with the CPU's kernels, so results equal the CPU's bit for bit. What an
accelerator would run concurrently is tracked with vector clocks: an access that is not ordered after the one it depends
on is a hazard, whatever the timing. `activation.activate()` registers the device with torch; the first use needs a C++
compiler.

Not supported: compressed sparse, nested and quantized tensors, memory shared between processes. Some of
torch's composite operations choose by the type of the device and may choose differently than on the CPU; convolution,
attention, dropout and recurrent networks are handled. torch has one slot for an external device, so the simulated one
cannot be used together with another such backend.

The package imports nothing of the rest of fsdp_conformance but `errors`. Its rooms, from the bottom up:

    device            the device in torch: memory, streams, collectives, and the C++ code (csrc/)
    checker           races: the checks, and the text of a finding
    traced            programs on a real device, under the same checks
    collectives       collectives that differ between ranks
    as_cuda           the device under CUDA's names, for programs that say "cuda"
    simulated_cuda    simulated GPUs for a block of code, for pytest, and for child processes
    sanitize          training scripts under the checker

Next to them:

    activation            registers the device with torch
    activate_on_import    activates it when imported, for warm processes
    frames                stack frames, and whose code they run
    import_hook           runs a function once a module has been imported
    replacements          attributes of torch that are replaced for a while
    suppressions          findings that a project does not want to see
"""
