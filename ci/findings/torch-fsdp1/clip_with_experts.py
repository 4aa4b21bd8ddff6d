"""
FSDP1: clip_grad_norm_ with a unit on a group of one rank returns another norm on each rank, and scales by it.

Expected: one norm, of all gradients. Seen with torch 2.13 on the CPU: every rank counts its own expert only, so
the shards of the shared layer are scaled by different factors. Run: torchrun --nproc-per-node 2 clip_with_experts.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


def main() -> None:
    """Print the norm, and the factor by which this rank's shard of the shared layer was scaled."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    own, _ = dist.new_subgroups(group_size=1)
    device = torch.device("cpu")
    torch.manual_seed(0)
    shared = nn.Linear(4, 4, bias=False)
    torch.manual_seed(rank + 1)
    expert = FullyShardedDataParallel(
        nn.Linear(4, 4, bias=False), process_group=own, device_id=device, use_orig_params=True
    )
    model = FullyShardedDataParallel(nn.Sequential(shared, expert), device_id=device, use_orig_params=True)
    (model(torch.ones(2, 4)) * (rank + 1) * 10).sum().backward()
    before = shared.weight.grad.clone()
    norm = model.clip_grad_norm_(1.0)
    factor = (shared.weight.grad / before)[before != 0].mean()
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, (norm.item(), factor.item()))
    if rank == 0:
        print("norm and factor by rank:", *(f"{norm:.6f} {factor:.6f}" for norm, factor in found), sep="\n  ")
        print("WRONG: ranks disagree" if len({norm for norm, _ in found}) > 1 else "right")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
