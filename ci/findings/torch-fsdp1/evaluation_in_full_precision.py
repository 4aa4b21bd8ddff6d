"""
FullyShardedDataParallel: with FSDP_USE_FULL_PREC_IN_EVAL=1, the second evaluation has the root's old parameters.

Expected: evaluations, and summon_full_params after them, have the parameters that training has.
Seen with torch 2.13.0 (gloo, CPU): the losses of training in bfloat16 are right, but the root's full-precision copy
stays as the first evaluation gathered it, so later evaluations and summon_full_params have old values.
Run: torchrun --nproc-per-node 2 ci/findings/torch-fsdp1/evaluation_in_full_precision.py
Upstream: no report found (searched November 2026). Same area: https://github.com/pytorch/pytorch/issues/104504 and
https://github.com/pytorch/pytorch/issues/104770 (closed), both addressed by pull request 105346.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

os.environ["FSDP_USE_FULL_PREC_IN_EVAL"] = "1"  # read when a module is wrapped
dist.init_process_group("gloo", timeout=timedelta(seconds=30))
x = torch.linspace(-1, 1, 16).view(2, 8)


def wrap(module):
    return FullyShardedDataParallel(
        module,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )


def train(evaluate_every_step):
    torch.manual_seed(0)
    model = wrap(nn.Sequential(wrap(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        loss = model(x).float().square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(round(loss.item(), 4))
        if evaluate_every_step or step == 2:
            model.eval()
            with torch.no_grad():
                evaluated = model(x).square().sum().item()
            model.train()
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        root = model.module[2].weight.norm().item()
    return losses, round(evaluated, 4), round(root, 4)


expected, got = train(evaluate_every_step=False), train(evaluate_every_step=True)
if dist.get_rank() == 0:
    for name, wanted, found in zip(("losses", "last evaluation", "norm of the weight"), expected, got, strict=True):
        print(f"{name}: expected {wanted}, got {found}")
wrong = torch.tensor([float(got != expected)])
dist.all_reduce(wrong)
if dist.get_rank() == 0:
    print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong.item() > 0))
