"""
The simulated device under CUDA's names, for scripts and tests that say "cuda".

    translation        installs all of this in a process
    names              CUDA's names, and the callers that see them
    surface            the table of torch's names, and what becomes of each
    refusals           the names that raise NotSimulated
    torch_cuda         torch.cuda as the program sees it
    device_properties  the properties of a GPU
    graphs             captures and replays of CUDA graphs
    tensor_types       the types of tensors and storages
    custom_operators   operators that a program defines
    backends           torch.backends: CUDA, cuDNN, kernels of attention
    sharing            tensors for other processes
    tools              profilers, the memory's history and limit, CUDA's runtime
    distributed        torch.distributed: process groups, meshes, DDP
    process_groups     process groups that a program makes itself
    attention          attention on DTensors, flex attention
    varlen             attention over packed sequences
    triton_kernels     Triton kernels, run by its interpreter
    dtensor_rng        random operations on DTensors
    dlpack             exchange of tensors with other libraries
    stream_handles     the numbers of streams, and streams made from one
    error_messages     CUDA's names in messages of torch's C++
"""
