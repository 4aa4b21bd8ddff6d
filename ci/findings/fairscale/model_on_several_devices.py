"""
FairScale's FullyShardedDataParallel: a model that is partly on the CPU ends in an assertion without a message.

Expected: the parameters are moved to compute_device, or an error says which device they are on. Seen with fairscale
0.4.13 (torch 2.13.0, simulated accelerator): construction and forward succeed, and backward raises an AssertionError
without a message. What is wrong ("incorrect saved_grad_shard device") is printed instead.
Needs: an accelerator
Run: torchrun --nproc-per-node 2 ci/findings/fairscale/model_on_several_devices.py
Upstream: no report found (searched November 2026).
"""

import os

import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import FullyShardedDataParallel

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl")
inner = torch.nn.Sequential(torch.nn.Linear(4, 4).to(device), torch.nn.Linear(4, 4))
got = "no error"
try:
    units = [FullyShardedDataParallel(layer, compute_device=device) for layer in inner]
    model = FullyShardedDataParallel(torch.nn.Sequential(*units), compute_device=device)
    model(torch.ones(2, 4, device=device)).sum().backward()
except (AssertionError, RuntimeError, ValueError) as error:
    got = f"{type(error).__name__}: {str(error) or 'without a message'}"
wrong = got.endswith("without a message")
print(f"a model on two devices: expected no error, or one that names a device, got {got}")
dist.destroy_process_group()
print("WRONG" if wrong else "right")
raise SystemExit(int(wrong))
