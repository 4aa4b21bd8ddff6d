"""
Metrics copied to the host without blocking, and read there; with --unsafe before the copies are done.

    torchrun --nproc-per-node 2 readback.py --unsafe
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    """Sum up losses of a few steps on the host."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--unsafe", action="store_true")
    args = parser.parse_args()

    dist.init_process_group("nccl")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    model = nn.Linear(4, 4, device=device)
    losses = []
    for _ in range(3):
        loss = model(torch.ones(2, 4, device=device)).square().mean().detach()
        dist.all_reduce(loss)
        losses.append(loss.to("cpu", non_blocking=True))
    if not args.unsafe:
        torch.cuda.synchronize()
    total = sum(float(loss) for loss in losses)
    print(f"total {total:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
