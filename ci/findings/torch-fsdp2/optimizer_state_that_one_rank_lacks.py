"""
get_optimizer_state_dict of a fully_shard model does not check that all ranks have state for the same parameters.

Expected: an error on every rank that says whose state is missing. Seen with torch 2.13.0 (gloo, CPU): ranks gather
different tensors at once, which ends the process by SIGABRT, or mixes them up if their shapes fit.
Run: python ci/findings/torch-fsdp2/optimizer_state_that_one_rank_lacks.py
Upstream: no report found (searched November 2026). https://github.com/ByteDance-Seed/VeOmni/pull/797 works around it.
"""

import multiprocessing
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def rank_main(rank, store):
    """Exit with 0 if an error is about the state, with 7 if there is none or another one."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=10)
    )
    model = nn.Linear(4, 6)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if rank == 1:
        del optimizer.state[model.weight]
    try:
        options = StateDictOptions(full_state_dict=True)
        state = get_optimizer_state_dict(model, optimizer, options=options)["state"]
        got = f"none, and state of {sorted(state)}"
    except Exception as error:  # noqa: BLE001 - of any type
        got = f"{type(error).__name__}: {str(error)[:160]}"
    print(f"rank {rank}: expected an error about missing state, got {got}", flush=True)
    raise SystemExit(0 if "state" in got and "none" not in got else 7)


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
