"""
megatron_fsdp.fully_shard_model cuts a weight inside a row, and raises, if the rows of a unit's weights do not fit.

Ranks get whole rows, so a unit is laid out in chunks of a common multiple of its row sizes; but weights smaller than a
chunk are put one after another, across the boundary between two ranks. Expected: any layer sizes train, or are refused
with a reason. Got with megatron-fsdp 0.6.1: a weight of 3 x 2 is cut after 5 elements, "shape '[-1, 2]' is invalid".
CUDA's streams are replaced, so that it runs on the CPU.
Run: torchrun --nproc-per-node 2 ci/findings/megatron_fsdp/small_weight_cut_inside_a_row.py
Upstream: no report found (searched November 2026)
"""

import sys
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

for name in ("Stream", "Event", "current_stream", "stream", "synchronize", "empty_cache", "device"):
    setattr(torch.cuda, name, MagicMock())
torch.cuda.current_device = lambda: 0
torch.Tensor.cuda = lambda tensor: tensor
torch.Tensor.record_stream = lambda tensor, stream: None
from megatron_fsdp import fully_shard_model  # noqa: E402

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
layers = [torch.nn.Linear(2, 3, bias=False), torch.nn.Linear(3, 5, bias=False), torch.nn.Linear(5, 2, bias=False)]
model = torch.nn.ModuleList([torch.nn.Sequential(*layers)])
options = {"dp_shard_dim": "dp", "tp_dim": "tp", "device": torch.device("cpu")}
problem = ""
try:
    fully_shard_model(model, mesh, fsdp_unit_modules=[torch.nn.Sequential], **options)
except RuntimeError as error:
    problem = str(error)
problems = [None, None]
dist.all_gather_object(problems, problem)
print(f"expected no error, got {problems}")
dist.destroy_process_group()
print("WRONG" if any(problems) else "right")
sys.exit(any(problems))
