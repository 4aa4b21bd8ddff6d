"""
LowLevelZeroOptimizer: torch.optim.Adafactor steps flat shards, and trains something else without an error.

Expected: parameters as without sharding, or an error. Seen with colossalai 0.5.0 (torch 2.13.0, gloo, CPU): Adafactor
takes means over rows and columns, but gets one-dimensional parts of parameters. An accelerator is pretended, because
the engine refuses the CPU.
Run: torchrun --nproc-per-node 2 ci/findings/colossalai/adafactor_on_flat_shards.py
Upstream: no report found (searched November 2026).
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
torch.manual_seed(0)
plain, sharded = torch.nn.Linear(6, 4, bias=False), torch.nn.Linear(6, 4, bias=False)
sharded.load_state_dict(plain.state_dict())
stock = torch.optim.Adafactor(plain.parameters(), lr=0.1)
engine = LowLevelZeroOptimizer(torch.optim.Adafactor(sharded.parameters(), lr=0.1))
x = torch.randn(5, 6)
plain(x).square().sum().backward()
engine.backward(sharded(x).square().sum())
stock.step()
engine.step()
apart = (plain.weight - sharded.weight).abs().max().item()
print(f"difference of the weights after a step: expected about 1e-7, got {apart:.2g}")
dist.destroy_process_group()
print("WRONG" if apart > 1e-5 else "right")
sys.exit(apart > 1e-5)
