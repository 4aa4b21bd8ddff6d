"""
FSDP2: clipping by the infinity norm raises on ranks whose shard of a gradient is empty, and the other ranks hang.

Expected: an empty shard counts as zero, as for other norms. Seen with torch 2.13 on the CPU: RuntimeError on rank 1,
"cannot compute the infinity norm on an empty tensor". Run: torchrun --nproc-per-node 2 clip_inf_empty_shard.py
"""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main() -> None:
    """One row on two ranks: the second has nothing of it."""
    dist.init_process_group("gloo")
    model = nn.Linear(3, 1, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    model(torch.ones(2, 3)).sum().backward()
    problem = ""
    try:
        # Only this rank's part: the lazily reduced norm is not materialised, so nobody waits here.
        torch.nn.utils.get_total_norm([model.weight.grad], math.inf)
    except RuntimeError as error:
        problem = str(error)
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, problem)
    if dist.get_rank() == 0:
        for rank, text in enumerate(found):
            print(f"rank {rank}: {text or 'no error'}")
        print("WRONG: some ranks raise" if any(found) else "right")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
