"""
Simulated GPUs under CUDA's names, for tests, notebooks and functions on a machine without a GPU.

    pytest --simulate-cuda=4                # every test sees four GPUs

    with simulated_cuda(4):                 # or a block of code does
        model = nn.Linear(8, 8).to("cuda:3")

torch, in this process and in those that it starts, sees the GPUs (`as_cuda`), and the race checker watches. A hazard
fails the test that has it. Importing this package does not import torch.

    plugin            the pytest plugin
    context           simulated_cuda(), for a block of code
    session           this process, its children, and their findings
    simulation        simulated GPUs in this process; imports torch
    settings          the settings of child processes, and how they receive them
    child_process     a process that receives them
    startup           what Python runs at the start of a child process
    outbox            where a child process saves its observations
    findings          the observations of several processes, merged
"""
