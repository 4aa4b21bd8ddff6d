"""
A simulated accelerator: a device `sim` in host memory, with streams, pinned memory and collectives, under a checker.

Operations run immediately, in program order, with the CPU's kernels, so results equal the CPU's bit for bit. What an
accelerator would run concurrently is tracked with vector clocks: an access that is not ordered after the one it depends
on is a hazard, whatever the timing. `activation.activate()` registers the device with torch; the first use needs a C++
compiler.

Not supported: compressed sparse, nested and quantized tensors, CUDA graphs, memory shared between processes. Some of
torch's composite operations choose by the type of the device and may choose differently than on the CPU; convolution,
attention, dropout and recurrent networks are handled. torch has one slot for an external device, so the simulated one
cannot be used beside another such backend.

The device:

    activation        registers the device with torch
    activated         importing it activates the device: for warm processes
    device            the current device, and devices by index
    streams           streams and events, as in torch.cuda
    memory            memory statistics, as in torch.cuda
    rng               random numbers: the CPU's
    torch_sim         the module torch.sim
    batch_norm        the operations that synchronized batch normalisation is made of
    process_group     the backend "simccl"
    threads           ranks that are threads, with one device each
    place             whether the device is available on this machine, before a run
    build             compiles and loads the C++ extension (csrc/)

The checker:

    checker           its modes, its findings, and how to leave accesses or waits out
    hazard            a finding, and its explanation
    variables         what the program calls a stream
    ordering          leaves out kernels that only compute numbers
    sync_sites        the places in a program that make a stream or the host wait

Under CUDA's names, for scripts and tests that say "cuda":

    as_cuda           translates "cuda" for the program
    cuda_module       torch.cuda as the program sees it
    cuda_tools        profilers, the memory's history and limit, CUDA's runtime
    cuda_names        CUDA's names, who asks for them, and attributes that are replaced
    made_groups       process groups that a program makes itself
    attention         attention on DTensors, flex attention
    dtensor_rng       random operations on DTensors
    dlpack            exchange of tensors with other libraries
    messages          CUDA's names in messages of torch's C++
    labels            names of modules and parameters in findings
    on_import         does something once a module has been imported

`fsdp-conformance sanitize`:

    launch            a training script on N ranks
    script            a rank that runs the script
    observe           what a rank observes while the script runs
    options           what a rank and the processes that it starts have in common
    forked            a process that a script forks from its rank
    outbox            where a process that is no rank saves what it has observed
    agreement         compares the collectives of the ranks
    compared_groups   the same for processes that meet in `init_process_group`, under pytest too
    calls             the collectives that each rank has called, in files
    disagreement      a finding about the collectives of several ranks
"""
