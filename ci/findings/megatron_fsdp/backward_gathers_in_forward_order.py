"""
Megatron-FSDP's ZeRO-3: in backward, units are gathered in the order of the forward.

Expected: the last unit first, as its gradients are computed first; then the others can be gathered while it computes.
Seen with megatron-fsdp 0.6.1 (torch 2.13.0, simulated accelerator): what is gathered together is sorted by number, and
a model of less than 500 million elements is gathered together. The last unit comes last, and backward waits for all.
Needs: an accelerator
Run: torchrun --nproc-per-node 2 ci/findings/megatron_fsdp/backward_gathers_in_forward_order.py
Upstream: https://github.com/NVIDIA/Megatron-LM/pull/7134 (merged September 2026) fixes the limit, which was a floor. No
report of the order found (searched November 2026).
"""

import os
from itertools import pairwise

import torch
import torch.distributed as dist
from megatron_fsdp import fully_shard_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
mesh = init_device_mesh("cuda", (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))
options = {"device_mesh": mesh, "dp_shard_dim": "dp", "tp_dim": "tp", "zero_dp_strategy": 3}
widths = [32, 64, 96, 128, 160]
layers = (nn.Linear(inputs, outputs, bias=False) for inputs, outputs in pairwise(widths))
model = fully_shard_model(module=nn.Sequential(*layers).cuda(), fsdp_unit_modules=[nn.Linear], **options)
numels = [inputs * outputs for inputs, outputs in pairwise(widths)]
gathered, gather = [], dist.all_gather_into_tensor


def note(*args: object, output_tensor: torch.Tensor, **options: object) -> object:
    gathered.append(output_tensor.numel())
    return gather(*args, output_tensor=output_tensor, **options)


loss = model(torch.ones(2, widths[0], device="cuda")).sum()
dist.all_gather_into_tensor = note
loss.backward()
order = [numels.index(numel) for numel in gathered if numel in numels]
if dist.get_rank() == 0:
    print(f"order in which units are gathered in backward: expected [3, 2, 1, 0], got {order}")
    print("right" if order[:1] == [3] else "WRONG")
dist.destroy_process_group()
raise SystemExit(int(order[:1] != [3]))
