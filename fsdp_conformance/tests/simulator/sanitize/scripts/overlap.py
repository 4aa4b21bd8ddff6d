"""
Data parallelism by hand: gradients are all-reduced while backward goes on, batches go through a pinned staging buffer.
Each of the two waits can be left out.

    torchrun --nproc-per-node 2 overlap.py --without work_wait
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    """Train for a few steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--without", choices=("nothing", "work_wait", "staging_wait"), default="nothing")
    args = parser.parse_args()

    dist.init_process_group("nccl")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).to(device)
    works: list[dist.Work | None] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda held: works.append(dist.all_reduce(held.grad, op=dist.ReduceOp.AVG, async_op=True))
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    staging = torch.empty(4, 8).pin_memory()
    staged = torch.cuda.Event()
    for step in range(3):
        if step and args.without != "staging_wait":
            staged.synchronize()
        staging.fill_(dist.get_rank() + step)
        inputs = staging.to(device, non_blocking=True)
        staged.record()
        model(inputs).square().mean().backward()
        if args.without != "work_wait":
            for work in works:
                if work is not None:
                    work.wait()
        works.clear()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
