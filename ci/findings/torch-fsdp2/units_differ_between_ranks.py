"""
fully_shard: ranks that run units in different orders, or different units, compute with each other's parameters.

Expected: an error that reports it, or the right output. Layer i multiplies by i + 1, and one is added.
Seen with torch 2.13.0 (gloo, CPU): no error. Each all-gather joins shards of different units, in backward, too.
Run: torchrun --nproc-per-node 2 ci/findings/torch-fsdp2/units_differ_between_ranks.py
Upstream: https://github.com/pytorch/pytorch/issues/75373 (open) is the same defect of FullyShardedDataParallel; no
report for fully_shard found (searched November 2026).
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
        for index, layer in enumerate(self.layers):
            nn.init.eye_(layer.weight).data.mul_(index + 1)

    def forward(self, x, order):
        for index in order:
            x = self.layers[index](x) + 1
        return x


dist.init_process_group("gloo", timeout=timedelta(seconds=30))
rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
wrong = torch.zeros(1)
for name, orders in (("in different orders", ((0, 1), (1, 0))), ("that the rank chooses", ((0, 2), (1, 2)))):
    plain, model = Layers(), Layers()
    for unit in (*model.layers, model):
        fully_shard(unit, mesh=mesh)
    expected = plain(torch.ones(1, 4), orders[rank]).tolist()
    try:
        output = model(torch.ones(1, 4), orders[rank])
        output.sum().backward()
        got = output.tolist()
    except RuntimeError as error:
        got = f"{type(error).__name__}: {error}"
    wrong += isinstance(got, list) and got != expected
    print(f"rank {rank}, units {name}: expected {expected} or an error, got {got}", flush=True)
dist.all_reduce(wrong)
if rank == 0:
    print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong.item() > 0))
