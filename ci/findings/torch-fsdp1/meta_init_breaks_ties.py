"""
FullyShardedDataParallel on a model that was built on meta: modules that share a weight have one each afterwards.

Expected: one parameter, as for a model that was built for real. Seen with torch 2.13.0 (gloo, CPU): two, because each
module is materialised by itself, and nothing warns.
Run: torchrun --nproc-per-node 2 ci/findings/torch-fsdp1/meta_init_breaks_ties.py
Upstream: no exact report found (searched November 2026). https://github.com/pytorch/pytorch/issues/90465 (closed) is on
initialising on meta; users re-tie, as in https://github.com/huggingface/accelerate/pull/3154.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=30))


def tied():
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
    model[1].weight = model[0].weight
    return model


with torch.device("meta"):
    on_meta = tied()
got = []
for model in (tied(), on_meta):
    wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    got.append(len(list(wrapped.parameters())))
if dist.get_rank() == 0:
    print(f"parameters of the model from meta: expected {got[0]}, as of one that was built for real, got {got[1]}")
wrong = torch.tensor([float(got[0] != got[1])])
dist.all_reduce(wrong)
if dist.get_rank() == 0:
    print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong.item() > 0))
