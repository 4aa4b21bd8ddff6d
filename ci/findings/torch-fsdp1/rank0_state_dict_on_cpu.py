"""
FullyShardedDataParallel trained on the CPU: a full state dict for rank 0 only, offloaded to the CPU, has freed memory.

Expected: the values. Seen with torch 2.13.0 (gloo, CPU): "moving" a parameter to the CPU that is there already makes no
copy, and its storage is freed right after. The process ends with SIGSEGV, or reads garbage. torch 2.14 makes a copy.
Torch: >=2.6,<2.14
Run: python ci/findings/torch-fsdp1/rank0_state_dict_on_cpu.py
Upstream: https://github.com/pytorch/pytorch/issues/188989 (closed, July 2026) has the same cause in
summon_full_params(offload_to_cpu=True).
"""

import multiprocessing
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel


def rank_main(rank, store):
    """Exit with 0 if the values are right, with 7 if they are not."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=10)
    )
    layer = nn.Linear(64, 64, bias=False)
    nn.init.ones_(layer.weight)
    model = FullyShardedDataParallel(layer, device_id=torch.device("cpu"), use_orig_params=True)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    dist.barrier()
    if rank == 0:
        weight = state["weight"]
        print(f"bytes of its storage: expected {weight.nbytes}, got {weight.untyped_storage().nbytes()}", flush=True)
        print(f"sum: expected 4096.0, got {weight.sum().item()}", flush=True)
        raise SystemExit(0 if weight.sum() == 4096 else 7)


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
    print("WRONG" if got[0] else "right")
    raise SystemExit(int(bool(got[0])))
