"""
FSDP1 trained on the CPU: a full state dict for rank 0 only, offloaded to the CPU, reads freed memory (torch 2.13).

"Moving" a parameter to the CPU that is there already makes no copy, and its storage is freed right after. Reading the
state dict ends the process with SIGSEGV, or prints garbage.
"""

import tempfile

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel


def rank_main(rank: int, store: str) -> None:
    """One wrapped layer of ones."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    layer = torch.nn.Linear(64, 64, bias=False)
    torch.nn.init.ones_(layer.weight)
    model = FullyShardedDataParallel(layer, device_id=torch.device("cpu"), use_orig_params=True)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if rank == 0:
        weight = state["weight"]
        print("bytes of its storage:", weight.untyped_storage().nbytes(), "of", weight.nbytes, flush=True)
        print("sum, expected 4096:", float(weight.sum()), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(rank_main, (f"{directory}/store",), nprocs=2)
