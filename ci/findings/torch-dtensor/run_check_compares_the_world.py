"""
DTensor.from_local(run_check=True) gathers metadata over all ranks, not over those of the mesh.

Expected on a mesh of ranks 0 and 1, whose tensors agree: no error, and nothing for ranks 2 and 3 to do. Seen with torch
2.13.0 (gloo, CPU): ranks 0 and 1 wait for ranks 2 and 3 in `check_tensor_meta` until the timeout of the process group.
If every row of a larger mesh runs the check, rows whose tensors agree raise for another row's difference.
Run: torchrun --nproc-per-node 4 ci/findings/torch-dtensor/run_check_compares_the_world.py
Upstream: no report found (searched November 2026). Nearest: https://github.com/pytorch/pytorch/pull/130289 (closed),
which made the check compare metadata.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
done = dist.new_group(timeout=timedelta(seconds=90))
rows = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
rank = dist.get_rank()
problem = "none"
if rank < 2:
    try:
        DTensor.from_local(torch.zeros(2, 3), rows["column"], [Shard(0)], run_check=True)
    except Exception as error:  # noqa: BLE001 - of any type
        problem = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    print(f"rank {rank}: expected no error, got {problem}", flush=True)
wrong = torch.tensor([float(problem != "none")])
dist.all_reduce(wrong, group=done)
if rank == 0:
    print("WRONG" if wrong else "right")
raise SystemExit(int(wrong.item() > 0))
