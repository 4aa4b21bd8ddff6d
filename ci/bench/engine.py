#!/usr/bin/env python3
"""
Step time and memory of the reference engine next to torch's FSDP2, FSDP1 and DDP on the same work.

All engines train a transformer in the same processes, on the CPU over gloo. Their steps alternate, so other load on the
machine affects them equally. Prints a table for each size, number of ranks and setting: the median milliseconds per
step and the bytes a rank holds between steps. The settings are float32, bfloat16 (reduced in float32), four
micro-batches per step of which only the last is reduced, and offloaded parameters.

Peaks come from the simulated accelerator's allocator, in the third step on two ranks: with a batch of one token, which
leaves only parameters, gradients and gather buffers, and with the timed batch. For comparison the table shows a rank's
shards of parameters and gradients plus the two largest units. The last line is the engine's step time divided by
FSDP2's, as the geometric mean over the tables.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from fsdp_conformance.engine.fully_sharded.wrap_policy import ClassPolicy
from fsdp_conformance.engine.fully_sharded.wrapper import FullyShardedDataParallel
from fsdp_conformance.engine.sharding_strategy import CPUOffload, MixedPrecision

VOCABULARY = 256
TOKENS = (4, 32)

#: Name to width and number of blocks; a block has 12 x width^2 elements.
SIZES = {"10M": (320, 8), "60M": (704, 10)}

Build = Callable[[nn.Module], nn.Module]
Figures = dict[str, dict[str, float]]


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


@dataclass(frozen=True, slots=True)
class Setting:
    """How a step is run."""

    name: str
    precision: torch.dtype | None = None
    """The compute dtype; None: float32."""
    micro_batches: int = 1
    offload: bool = False


SETTINGS = {
    each.name: each
    for each in (
        Setting("float32"),
        Setting("bfloat16", precision=torch.bfloat16),
        Setting("accumulation", micro_batches=4),
        Setting("offload", offload=True),
    )
}


def engines(setting: Setting) -> dict[str, Build]:
    """Engine to the function that wraps a model. DDP has no mixed precision or offload; FSDP1's offload needs a GPU."""
    low = setting.precision
    reduced = None if low is None else torch.float32

    def reference(model: nn.Module) -> nn.Module:
        policy = None if low is None else MixedPrecision(param_dtype=low, reduce_dtype=reduced)
        offload = CPUOffload(offload_params=True) if setting.offload else None
        return FullyShardedDataParallel(
            model, auto_wrap_policy=ClassPolicy({Block}), mixed_precision=policy, cpu_offload=offload
        )

    def fsdp2(model: nn.Module) -> nn.Module:
        options: dict[str, Any] = {"mp_policy": torch_fsdp.MixedPrecisionPolicy(param_dtype=low, reduce_dtype=reduced)}
        if setting.offload:
            options["offload_policy"] = torch_fsdp.CPUOffloadPolicy(pin_memory=False)
        for block in (child for child in model.modules() if isinstance(child, Block)):
            torch_fsdp.fully_shard(block, **options)
        torch_fsdp.fully_shard(model, **options)
        return model

    def fsdp1(model: nn.Module) -> nn.Module:
        device = next(model.parameters()).device
        return torch_fsdp.FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=True,
            device_id=device,
            mixed_precision=None if low is None else torch_fsdp.MixedPrecision(param_dtype=low, reduce_dtype=reduced),
        )

    if setting.offload:
        return {"engine": reference, "fsdp2": fsdp2}
    if low is not None:
        return {"engine": reference, "fsdp2": fsdp2, "fsdp1": fsdp1}
    return {"engine": reference, "fsdp2": fsdp2, "fsdp1": fsdp1, "ddp": DistributedDataParallel}


def unreduced(model: nn.Module) -> AbstractContextManager[Any]:
    """Gradients of backwards inside the context are not reduced."""
    if isinstance(model, torch_fsdp.FSDPModule):
        return deferred(model)
    context: AbstractContextManager[Any] = model.no_sync()  # type: ignore[operator]
    return context


@contextmanager
def deferred(model: torch_fsdp.FSDPModule) -> Iterator[None]:
    """The same for FSDP2."""
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, micro_batches: int = 1) -> None:
    """One step of `micro_batches` copies of a batch."""
    for micro in range(micro_batches):
        with unreduced(model) if micro < micro_batches - 1 else nullcontext():
            logits = model(tokens)
            torch.autograd.backward(nn.functional.cross_entropy(logits.float().view(-1, VOCABULARY), tokens.view(-1)))
    optimizer.step()
    optimizer.zero_grad()


def storage_bytes() -> int:
    """Bytes of all live tensor storages in this process, each counted once."""
    gc.collect()
    sizes = {}
    for thing in gc.get_objects():
        # By exact type: wrapper subclasses own no storage, and the tensors they wrap are found anyway.
        if type(thing) in (Tensor, nn.Parameter) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def time_steps(rank: int, ranks: int, rendezvous: str, args: argparse.Namespace, size: str, setting: str) -> None:
    """One rank: train with every engine in turn and write down the times."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    wrapped: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {}
    held: dict[str, int] = {}
    for name, build in engines(SETTINGS[setting]).items():
        if args.only and name not in args.only:
            continue
        torch.manual_seed(0)
        before = storage_bytes()
        model = build(Model(*SIZES[size]))
        wrapped[name] = (model, torch.optim.SGD(model.parameters(), lr=0.01))
        held[name] = storage_bytes() - before
    torch.manual_seed(rank)
    tokens = torch.randint(VOCABULARY, TOKENS)
    times: dict[str, list[float]] = {name: [] for name in wrapped}
    for number in range(args.warmup + args.steps):
        for name, (model, optimizer) in wrapped.items():
            dist.barrier()
            began = time.perf_counter()
            step(model, optimizer, tokens, SETTINGS[setting].micro_batches)
            dist.barrier()
            if number >= args.warmup:
                times[name].append(1000 * (time.perf_counter() - began))
    if rank == 0:
        figures = {name: {"ms": statistics.median(took), "bytes": held[name]} for name, took in times.items()}
        Path(args.result).write_text(json.dumps(figures))
    dist.destroy_process_group()


def weigh_steps(rank: int, ranks: int, rendezvous: str, args: argparse.Namespace, size: str, setting: str) -> None:
    """One rank: measure every engine's peak in its third step, with a batch of one token and with the timed batch."""
    from fsdp_conformance.simulator import checker
    from fsdp_conformance.simulator.activation import activate
    from fsdp_conformance.simulator.device import devices as device

    torch.set_num_threads(1)
    activate()
    checker.set_mode(checker.Mode.OFF)
    device.set_device(rank)
    dist.init_process_group("cpu:gloo,sim:simccl", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    module: Any = torch.get_device_module("sim")
    peaks: dict[str, dict[str, float]] = {}
    for name, build in engines(SETTINGS[setting]).items():
        peaks[name] = {}
        for batch, shape in (("parameters", (1, 1)), ("batch", TOKENS)):
            torch.manual_seed(0)
            gc.collect()
            before = module.memory_allocated()
            model = build(Model(*SIZES[size]).to(f"sim:{rank}"))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            tokens = torch.zeros(shape, dtype=torch.int64, device=f"sim:{rank}")
            for _ in range(2):
                step(model, optimizer, tokens, SETTINGS[setting].micro_batches)
            gc.collect()
            module.reset_peak_memory_stats()
            step(model, optimizer, tokens, SETTINGS[setting].micro_batches)
            peaks[name][batch] = module.max_memory_allocated() - before
            del model, optimizer
    if rank == 0:
        Path(args.result).write_text(json.dumps(peaks))
    dist.destroy_process_group()


def spawn(body: Callable[..., None], args: argparse.Namespace, size: str, ranks: int, setting: str) -> Figures:
    """Call `body` in `ranks` processes. Returns rank 0's result."""
    with tempfile.TemporaryDirectory() as directory:
        args.result = str(Path(directory) / "result.json")
        rendezvous = str(Path(directory) / "rendezvous")
        processes: Any = torch.multiprocessing
        processes.spawn(body, (ranks, rendezvous, args, size, setting), nprocs=ranks)
        figures: Figures = json.loads(Path(args.result).read_text())
        return figures


def ideal_bytes(size: str, ranks: int) -> float:
    """Bytes of a rank's parameter and gradient shards plus the two largest units, in float32."""
    model = Model(*SIZES[size])
    blocks = [sum(each.numel() for each in block.parameters()) for block in model.blocks]
    whole = sum(each.numel() for each in model.parameters())
    units = sorted([*blocks, whole - sum(blocks)])
    return 4 * (2 * whole / ranks + sum(units[-2:]))


def show_peaks(args: argparse.Namespace, size: str) -> None:
    """Print the table of peaks."""
    for setting in ("float32", "accumulation"):
        peaks = spawn(weigh_steps, args, size, 2, setting)
        print(
            f"{size}, 2 ranks, {setting}, peaks: {'parameters MB':>21}{'of fsdp2':>10}{'batch MB':>10}{'of fsdp2':>10}"
        )
        base = peaks["fsdp2"]
        for name, row in peaks.items():
            figures = [f"{row[part] / 1e6:{width}.1f}{row[part] / base[part]:10.2f}" for part, width in _PARTS]
            print(f"  {name:44}{''.join(figures)}")
        print(f"  {'shards and the two largest units':44}{ideal_bytes(size, 2) / 1e6:8.1f}", flush=True)


_PARTS = (("parameters", 8), ("batch", 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", nargs="+", default=["10M"], choices=sorted(SIZES))
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--no-peaks", action="store_true")
    args = parser.parse_args()
    ratios = []
    for size in args.sizes:
        for ranks in args.ranks:
            for setting in args.settings:
                figures = spawn(time_steps, args, size, ranks, setting)
                print(f"{size}, {ranks} ranks, {setting}: {'ms/step':>28}{'of fsdp2':>10}{'held MB':>10}")
                base = figures["fsdp2"]["ms"]
                for name, row in figures.items():
                    print(f"  {name:44}{row['ms']:8.1f}{row['ms'] / base:10.2f}{row['bytes'] / 1e6:10.1f}", flush=True)
                ratios.append(figures["engine"]["ms"] / base)
        if not args.no_peaks:
            show_peaks(args, size)
    print(f"engine: {math.exp(statistics.fmean(map(math.log, ratios))):.2f}")


if __name__ == "__main__":
    main()
