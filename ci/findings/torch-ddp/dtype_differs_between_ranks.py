"""
DistributedDataParallel: it compares shapes and strides of parameters over ranks, but not their dtypes. If one rank has
float64, its parameters take the bits of rank 0's float32 ones; with other layers, its process ends by SIGABRT.

    torchrun --nproc-per-node 2 ci/findings/torch-ddp/dtype_differs_between_ranks.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.Linear(16, 16).to(torch.float64 if rank else torch.float32)
nn.init.ones_(model.weight)
try:
    DistributedDataParallel(model)
except Exception as error:  # noqa: BLE001 - of any type
    print(f"rank {rank}: expected an error that names the dtype, got {type(error).__name__}: {error}")
else:
    print(f"rank {rank}: expected an error that names the dtype, got none; the first weight is {model.weight[0, 0]}")
dist.destroy_process_group()
