"""
DistributedDataParallel ignores the storage offset and the size of what a communication hook returns.

Expected for a result that is part of a larger tensor: the gradient has the result's values; for one of another size: an
error. Seen with torch 2.13.0 (gloo, CPU): the gradient is read from the start of the result's storage, so it has other
values, and a result that is too short or too long raises nothing if the storage is long enough.
Run: torchrun --nproc-per-node 2 ci/findings/torch-ddp/hook_result_read_at_the_wrong_place.py
Upstream: no report found (searched November 2026). Nearest: https://github.com/pytorch/pytorch/pull/43734 (closed), on
how the result is passed to buckets.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=30))


def part_of_a_larger_one(state, bucket):
    """The rank's own gradients, behind two elements of something else."""
    larger = torch.cat([torch.full((2,), 99.0), bucket.buffer()])
    future = torch.futures.Future()
    future.set_result(larger[2:])
    return future


def too_short(state, bucket):
    """All but the first of the rank's own gradients."""
    future = torch.futures.Future()
    future.set_result(bucket.buffer()[1:])
    return future


def gradient(hook):
    """The gradient of a layer whose own one is [1, 2, 3] on every rank, or the error."""
    layer = nn.Linear(3, 1, bias=False)
    wrapped = DistributedDataParallel(layer)
    wrapped.register_comm_hook(None, hook)
    try:
        wrapped(torch.tensor([[1.0, 2.0, 3.0]])).sum().backward()
    except RuntimeError as error:
        return f"RuntimeError: {error}"
    return layer.weight.grad[0].tolist()


shifted, short = gradient(part_of_a_larger_one), gradient(too_short)
wrong = torch.tensor([float(shifted != [1.0, 2.0, 3.0] or not isinstance(short, str))])
dist.all_reduce(wrong)
if dist.get_rank() == 0:
    print(f"result that is part of a larger tensor: expected [1.0, 2.0, 3.0], got {shifted}")
    print(f"result with two of three elements: expected an error, got {short}")
    print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong.item() > 0))
