"""
The simulated device in torch.

    build             compiles and loads the C++ extension (csrc/)
    devices           the current device, and devices by index
    streams           streams and events, as in torch.cuda
    memory            memory statistics, as in torch.cuda
    rng               random numbers: the CPU's
    torch_sim         the module torch.sim
    batch_norm        the operations that synchronized batch normalization is made of
    process_group     the backend "simccl"
    thread_ranks      ranks that are threads, with one device each
"""

from typing import Final

#: The type of the simulated device, and the name of its module in torch: `torch.sim`.
SIMULATED: Final = "sim"
