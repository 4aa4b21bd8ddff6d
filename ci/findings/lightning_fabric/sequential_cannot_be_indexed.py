"""
Fabric.setup: a Sequential can no longer be indexed, although the wrapper says that it has `__getitem__`.

Expected: `model[0]` is the first layer, as before and as with FullyShardedDataParallel and fully_shard. Seen with
lightning-fabric 2.6.6 (torch 2.13.0, CPU): the wrapper passes attributes on with `__getattr__`, which Python does not
ask for `__getitem__` or `__len__`.
Run: python ci/findings/lightning_fabric/sequential_cannot_be_indexed.py
Upstream: https://github.com/Lightning-AI/pytorch-lightning/issues/18427 (open) is exact.
"""

import torch
from lightning_fabric import Fabric

model = Fabric(accelerator="cpu", devices=1).setup_module(torch.nn.Sequential(torch.nn.Linear(2, 2)))
try:
    got = type(model[0]).__name__
except TypeError as error:
    got = f"TypeError: {error}"
print(f"model[0], where hasattr(model, '__getitem__') is {hasattr(model, '__getitem__')}: expected Linear, got {got}")
print("right" if got == "Linear" else "WRONG")
raise SystemExit(got != "Linear")
