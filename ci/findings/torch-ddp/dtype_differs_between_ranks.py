"""
DistributedDataParallel compares the shapes of parameters over ranks, but not their dtypes.

Expected: an error that names the dtype. Seen with torch 2.13.0 (gloo, CPU), with float32 on rank 0 and float64 on
rank 1: no error from DistributedDataParallel. Rank 1 takes the bits of rank 0's parameters, or gloo ends its process by
SIGABRT, depending on the sizes.
Run: python ci/findings/torch-ddp/dtype_differs_between_ranks.py
Upstream: no report found (searched November 2026). Nearest: https://github.com/pytorch/pytorch/issues/76449 (open), on
the check of shapes.
"""

import multiprocessing
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def rank_main(rank, store):
    """Exit with 0 if the error names the dtype, with 7 if there is none or another one."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=10)
    )
    model = nn.Linear(16, 16).to(torch.float64 if rank else torch.float32)
    nn.init.ones_(model.weight)
    try:
        DistributedDataParallel(model)
    except Exception as error:  # noqa: BLE001 - of any type
        print(f"rank {rank}: expected an error that names the dtype, got {type(error).__name__}: {error}", flush=True)
        raise SystemExit(0 if "dtype" in str(error) or "type" in str(error) else 7) from None
    print(
        f"rank {rank}: expected an error that names the dtype, got none; first weight: {model.weight[0, 0]}", flush=True
    )
    raise SystemExit(7)


if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as directory:
        ranks = [context.Process(target=rank_main, args=(rank, f"{directory}/store")) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(25)
            process.kill()
            process.join()
    got = [process.exitcode for process in ranks]
    print(f"exit statuses of the ranks: expected [0, 0], got {got}")
    print("WRONG" if any(got) else "right")
    raise SystemExit(int(any(got)))
