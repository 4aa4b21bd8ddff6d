"""
Automatic mixed precision: autocast, GradScaler, gradient accumulation under no_sync, clipping of unscaled gradients.

    torchrun --nproc-per-node 2 mixed_precision.py --dtype float16
"""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ACCUMULATE = 2


def main() -> None:
    """Train for a few steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--old-names", action="store_true", help="torch.cuda.amp, as before 2.4")
    args = parser.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group(backend="nccl")
    device = torch.device("cuda", torch.cuda.current_device())
    dtype = getattr(torch, args.dtype)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4)).cuda()
    ddp = DistributedDataParallel(model, device_ids=[local_rank], output_device=local_rank)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    enabled = device.type == "cuda" and dtype == torch.float16
    make = torch.cuda.amp.GradScaler if args.old_names else torch.amp.GradScaler
    scaler = make(enabled=enabled)
    for step in range(3):
        for micro in range(ACCUMULATE):
            batch = torch.randn(4, 8, device=device)
            target = torch.randint(0, 4, (4,), device="cuda")
            last = micro == ACCUMULATE - 1
            autocast = torch.cuda.amp.autocast(dtype=dtype) if args.old_names else torch.autocast("cuda", dtype=dtype)
            with contextlib.nullcontext() if last else ddp.no_sync():
                with autocast:
                    output = ddp(batch)
                    assert output.dtype == dtype, output.dtype
                    loss = nn.functional.cross_entropy(output, target) / ACCUMULATE
                scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        print(f"step {step} loss {loss.item():.4f} scale {scaler.get_scale():.0f}")
    assert torch.cuda.memory_allocated() > 0
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
