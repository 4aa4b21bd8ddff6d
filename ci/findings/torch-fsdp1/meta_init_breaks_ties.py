"""
FSDP1 on a model that was built on meta: modules that share a weight have one each afterwards.

    torchrun --nproc-per-node 2 ci/findings/torch-fsdp1/meta_init_breaks_ties.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo")


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
    print(f"parameters of a model that was built for real: {got[0]}; of the same model from meta: {got[1]}")
dist.destroy_process_group()
