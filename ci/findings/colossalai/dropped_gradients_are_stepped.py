"""
LowLevelZeroOptimizer: a parameter whose `.grad` is set to None before the step is stepped all the same, in silence.

Expected: as in torch, it does not change, or an error says how to drop a gradient. Seen with colossalai 0.5.0 (torch
2.13.0, gloo, CPU), in both stages: the engine stores the gradient elsewhere. An accelerator is pretended,
because the engine refuses the CPU.
Run: torchrun --nproc-per-node 2 ci/findings/colossalai/dropped_gradients_are_stepped.py
Upstream: no report of the silence found (searched November 2026); that `.grad` is None after backward, and how to read
gradients instead: https://github.com/hpcaitech/ColossalAI/issues/5792
"""

import sys
from contextlib import nullcontext
from datetime import timedelta
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from colossalai.accelerator import set_accelerator
from colossalai.accelerator.cpu_accelerator import CpuAccelerator
from colossalai.zero import LowLevelZeroOptimizer

CpuAccelerator.Stream = CpuAccelerator.current_stream = lambda *_: MagicMock()
CpuAccelerator.stream = lambda *_: nullcontext()
accelerator = CpuAccelerator()
accelerator._name = "cuda"
set_accelerator(accelerator)
dist.init_process_group("gloo", timeout=timedelta(seconds=30))
changed = {}
for stage in (1, 2):
    model = torch.nn.Linear(4, 4, bias=False)
    before = model.weight.detach().clone()
    engine = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), partition_grad=stage == 2)
    engine.backward(model(torch.ones(1, 4)).sum())
    model.weight.grad = None
    engine.step()
    changed[stage] = not torch.equal(before, model.weight)
print(f"whether the weight has changed, by stage: expected {dict.fromkeys(changed, False)}, got {changed}")
dist.destroy_process_group()
print("WRONG" if any(changed.values()) else "right")
sys.exit(any(changed.values()))
