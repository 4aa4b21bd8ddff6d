#!/usr/bin/env python3
"""
Step time and memory of the reference engine beside torch's FSDP2, FSDP1 and DDP, on the same work, side by side.

A transformer is trained by each in turn, in the same processes, on the CPU over gloo; steps of all engines alternate,
so that what else the machine does falls on all alike. Prints a table for each size and number of ranks: medians of
milliseconds per step, and the bytes that a rank holds between steps. The last line is the engine's step
time over FSDP2's, the geometric mean over the tables.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from fsdp_conformance.engine.fully_sharded import FullyShardedDataParallel
from fsdp_conformance.engine.sharding_strategy import MixedPrecision
from fsdp_conformance.engine.wrap_policy import ClassPolicy

VOCABULARY = 256
TOKENS = (4, 32)

#: Name to width and number of blocks: 12 x width^2 elements a block.
SIZES = {"10M": (320, 8), "60M": (704, 10)}

Build = Callable[[nn.Module], nn.Module]


class Block(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.after = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, width // 64, 64).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        y: Tensor = x + self.down(nn.functional.gelu(self.up(self.after(x))))
        return y


class Model(nn.Module):
    """An embedding, blocks, and a head."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def engines(precision: str) -> dict[str, Build]:
    """Engine to how it wraps a model."""
    low = torch.bfloat16 if precision == "bfloat16" else None

    def reference(model: nn.Module) -> nn.Module:
        policy = None if low is None else MixedPrecision(param_dtype=low, reduce_dtype=torch.float32)
        return FullyShardedDataParallel(model, auto_wrap_policy=ClassPolicy({Block}), mixed_precision=policy)

    def fsdp2(model: nn.Module) -> nn.Module:
        policy = torch_fsdp.MixedPrecisionPolicy(param_dtype=low, reduce_dtype=None if low is None else torch.float32)
        for block in (child for child in model.modules() if isinstance(child, Block)):
            torch_fsdp.fully_shard(block, mp_policy=policy)
        torch_fsdp.fully_shard(model, mp_policy=policy)
        return model

    def fsdp1(model: nn.Module) -> nn.Module:
        policy = None if low is None else torch_fsdp.MixedPrecision(param_dtype=low, reduce_dtype=torch.float32)
        return torch_fsdp.FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=True,
            device_id=torch.device("cpu"),
            mixed_precision=policy,
        )

    return {"engine": reference, "fsdp2": fsdp2, "fsdp1": fsdp1, "ddp": DistributedDataParallel}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
    """One step on a batch."""
    logits = model(tokens)
    torch.autograd.backward(nn.functional.cross_entropy(logits.float().view(-1, VOCABULARY), tokens.view(-1)))
    optimizer.step()
    optimizer.zero_grad()


def storage_bytes() -> int:
    """Bytes of every tensor that is alive in this process and has a storage, each storage once."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        # By exact type: wrappers have no storage of their own, and what they wrap is found, too.
        if type(thing) in (Tensor, nn.Parameter) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def rank_main(rank: int, ranks: int, rendezvous: str, args: argparse.Namespace, size: str) -> None:
    """One rank: trains with every engine in turn, and writes down what it took."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    width, depth = SIZES[size]
    wrapped: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {}
    held: dict[str, int] = {}
    for name, build in engines(args.precision).items():
        if args.only and name not in args.only:
            continue
        torch.manual_seed(0)
        before = storage_bytes()
        model = build(Model(width, depth))
        wrapped[name] = (model, torch.optim.SGD(model.parameters(), lr=0.01))
        held[name] = storage_bytes() - before
    torch.manual_seed(rank)
    tokens = torch.randint(VOCABULARY, TOKENS)
    times: dict[str, list[float]] = {name: [] for name in wrapped}
    for number in range(args.warmup + args.steps):
        for name, (model, optimizer) in wrapped.items():
            dist.barrier()
            began = time.perf_counter()
            step(model, optimizer, tokens)
            dist.barrier()
            if number >= args.warmup:
                times[name].append(1000 * (time.perf_counter() - began))
    if rank == 0:
        found = {name: {"ms": statistics.median(took), "bytes": held[name]} for name, took in times.items()}
        Path(args.result).write_text(json.dumps(found))
    dist.destroy_process_group()


def measure(args: argparse.Namespace, size: str, ranks: int) -> dict[str, dict[str, float]]:
    """Train in `ranks` processes. Returns what rank 0 wrote down."""
    with tempfile.TemporaryDirectory() as directory:
        args.result = str(Path(directory) / "result.json")
        rendezvous = str(Path(directory) / "rendezvous")
        processes: Any = torch.multiprocessing
        processes.spawn(rank_main, (ranks, rendezvous, args, size), nprocs=ranks)
        found: dict[str, dict[str, float]] = json.loads(Path(args.result).read_text())
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", nargs="+", default=["10M"], choices=sorted(SIZES))
    parser.add_argument("--precision", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--only", nargs="+", default=[])
    args = parser.parse_args()
    ratios = []
    for size in args.sizes:
        for ranks in args.ranks:
            found = measure(args, size, ranks)
            print(f"{size}, {ranks} ranks, {args.precision}: {'ms/step':>24}{'of fsdp2':>10}{'held MB':>10}")
            base = found["fsdp2"]["ms"]
            for name, row in found.items():
                print(f"  {name:44}{row['ms']:8.1f}{row['ms'] / base:10.2f}{row['bytes'] / 1e6:10.1f}")
            ratios.append(found["engine"]["ms"] / base)
    print(f"engine: {math.exp(statistics.fmean(map(math.log, ratios))):.2f}")


if __name__ == "__main__":
    main()
