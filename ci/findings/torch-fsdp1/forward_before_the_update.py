"""
FullyShardedDataParallel: after a forward between backward and the step, the next forward has the root's old parameters.

Expected: the update is visible in the next forward, as without sharding.
Seen with torch 2.13.0 (gloo, CPU, use_orig_params=True), with and without no_grad: the root stays gathered after the
forward, so the output is that of the parameters before the step. With SHARD_GRAD_OP all units stay gathered and the
whole update is lost; after a forward with a graph, every .grad is None until the next backward.
Run: torchrun --nproc-per-node 2 ci/findings/torch-fsdp1/forward_before_the_update.py
Upstream: no report found (searched November 2026). That the root stays gathered after forward is by design:
https://github.com/pytorch/pytorch/issues/131965 (closed) reports it for fully_shard.
"""

import contextlib
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
x = torch.ones(2, 4)


def wrap(module, strategy):
    cpu = torch.device("cpu")
    return FullyShardedDataParallel(module, use_orig_params=True, device_id=cpu, sharding_strategy=strategy)


def train(strategy, context):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if strategy:
        model = wrap(nn.Sequential(wrap(model[0], strategy), model[1]), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model(x).sum()
    before.backward()
    with context():
        model(x)
    optimizer.step()
    return before.item(), model(x).sum().item()


wrong = torch.zeros(1)
for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
    for name, context in (("with a graph", contextlib.nullcontext), ("under no_grad", torch.no_grad)):
        (_, expected), (before, got) = train(None, context), train(strategy, context)
        wrong += abs(expected - got) > 1e-4
        if dist.get_rank() == 0:
            what = f"output before the step: {before:.4f}, after it: expected {expected:.4f}, got {got:.4f}"
            print(f"{strategy.name}, forward {name}: {what}")
dist.all_reduce(wrong)
if dist.get_rank() == 0:
    print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong.item() > 0))
