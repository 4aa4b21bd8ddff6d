"""
The simulated device under CUDA's names, for scripts and tests that say "cuda".

    translation       installs all of this in a process
    names             CUDA's names, and the callers that see them
    torch_cuda        torch.cuda as the program sees it
    tools             profilers, the memory's history and limit, CUDA's runtime
    distributed       torch.distributed: process groups, meshes, DDP
    process_groups    process groups that a program makes itself
    attention         attention on DTensors, flex attention
    dtensor_rng       random operations on DTensors
    dlpack            exchange of tensors with other libraries
    error_messages    CUDA's names in messages of torch's C++
"""
