"""
megatron_fsdp.fully_shard_optimizer takes an optimizer that needs whole tensors, and ranks then gather unequal parts.

Expected: torch.optim.Adafactor trains as without sharding, or every rank raises. Got with megatron-fsdp 0.6.1: DTensors
whose parts are not those of their placement are gathered as if they were, and gloo ends a rank (SIGABRT).
CUDA's streams are replaced, so that it runs on the CPU.
Run: python ci/findings/megatron_fsdp/adafactor_on_uneven_shards.py
Upstream: no report found (searched November 2026)
"""

import sys
import tempfile
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def train(rank, path):
    for name in ("Stream", "Event", "current_stream", "stream", "synchronize", "empty_cache", "device"):
        setattr(torch.cuda, name, MagicMock())
    torch.cuda.current_device = lambda: 0
    torch.Tensor.cuda = lambda tensor: tensor
    torch.Tensor.record_stream = lambda tensor, stream: None
    from megatron_fsdp import fully_shard_model, fully_shard_optimizer

    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    options = {"dp_shard_dim": "dp", "tp_dim": "tp", "device": torch.device("cpu")}
    unit = torch.nn.Sequential(torch.nn.Linear(4, 8, bias=False), torch.nn.Linear(8, 4, bias=False))
    model = fully_shard_model(torch.nn.ModuleList([unit]), mesh, fsdp_unit_modules=[torch.nn.Sequential], **options)
    fully_shard_optimizer(torch.optim.Adafactor(model.parameters()))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        ranks = torch.multiprocessing.spawn(train, (f"{folder}/store",), nprocs=2, join=False)
        for process in ranks.processes:
            process.join()
    codes = [process.exitcode for process in ranks.processes]
    print(f"exit codes of the ranks: expected the same (0, or 1 for an exception), got {codes}")
    print("WRONG" if codes[0] != codes[1] else "right")
    sys.exit(codes[0] != codes[1])
