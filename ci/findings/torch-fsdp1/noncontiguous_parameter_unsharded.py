"""
FullyShardedDataParallel permutes the gradient of a parameter that is not contiguous where nothing is sharded, silently.

Expected: the gradient of element i is i. Seen with torch 2.13.0 (gloo, CPU): with NO_SHARD, and so on a single rank
with any strategy, its elements are in the order of the parameter's memory.
Run: python ci/findings/torch-fsdp1/noncontiguous_parameter_unsharded.py
Upstream: no report found (searched November 2026). fully_shard rejects such parameters.
"""

import tempfile
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


class Coded(nn.Module):
    """The gradient of each element of a transposed weight is its number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 2).t())

    def forward(self) -> torch.Tensor:
        """The sum of the elements times their numbers."""
        return (self.weight * torch.arange(6.0).view(2, 3)).sum()


warnings.simplefilter("ignore")
with tempfile.TemporaryDirectory() as directory:
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=0, world_size=1)
    model = FullyShardedDataParallel(Coded(), use_orig_params=True, device_id=torch.device("cpu"))
    model().backward()
    got = model.module.weight.grad.tolist()
    expected = torch.arange(6.0).view(2, 3).tolist()
    print(f"gradient: expected {expected}, got {got}")
    print("WRONG" if got != expected else "right")
    dist.destroy_process_group()
raise SystemExit(int(got != expected))
