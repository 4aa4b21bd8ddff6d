#!/usr/bin/env python3
"""
How often the planner ranks two ways of sharding in the same order as measured step times.

For each size and number of ranks, on the CPU over gloo, the benchmark fits the links and times each unit's forward and
backward and one optimizer step. From these the planner predicts the step time of every way to shard. Then the engine
trains in each of them, with alternating steps; the predictions never use these measurements. Prints both side by side.
Pairs that the planner cannot tell apart are counted by themselves. The last line is the fraction of the others that are
ordered as measured. The model was tuned on the default sizes; --held-back takes others.

--runs N does all of it N times and ends with a table in Markdown, a row for each run. Timings need a quiet machine:
each run says how busy the machine was before it, and --max-load ends the benchmark with status 3 where it is busier.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing
from engine import TOKENS, VOCABULARY, Block, Model, step
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_conformance.engine.fully_sharded.wrap_policy import ClassPolicy
from fsdp_conformance.engine.fully_sharded.wrapper import FullyShardedDataParallel
from fsdp_conformance.engine.sharding_strategy import ShardingStrategy
from fsdp_conformance.planner.device_spec import GIB, DeviceSpec
from fsdp_conformance.planner.link_fit import CollectiveFit, LinkFit
from fsdp_conformance.planner.link_fit import measure as measure_links
from fsdp_conformance.planner.link_spec import Cluster
from fsdp_conformance.planner.plan_model import blocks_of_lists, plan_units
from fsdp_conformance.planner.plan_step import Candidate, PlanOptions
from fsdp_conformance.planner.plan_text import candidate_name
from fsdp_conformance.planner.planner import Decision, decide

#: Name to width and number of blocks; a block has 12 x width^2 elements.
TUNED = {"1M": (128, 5), "10M": (320, 8)}
HELD_BACK = {"2M": (192, 5), "5M": (256, 6), "16M": (384, 9)}
SIZES = TUNED | HELD_BACK

#: Pairs whose measured times differ by less than this are counted but reported separately.
CLEAR = 1.1

#: Adam reads the parameter, the gradient and two moments (4 bytes each) and writes all but the gradient.
ADAM_BYTES_PER_ELEMENT = 28


def ways(ranks: int) -> list[Candidate]:
    """The ways of sharding to compare."""
    candidates = [
        Candidate(ShardingStrategy.FULL_SHARD, ranks, 1),
        Candidate(ShardingStrategy.SHARD_GRAD_OP, ranks, 1),
        Candidate(ShardingStrategy.NO_SHARD, 1, ranks),
    ]
    return [*candidates, Candidate(ShardingStrategy.HYBRID_SHARD, 2, 2)] if ranks == 4 else candidates


def median_us(function: Callable[[], object], repetitions: int) -> float:
    """Median microseconds of a call that all ranks make at the same time."""
    times = []
    for _ in range(repetitions):
        dist.barrier()
        began = time.perf_counter()
        function()
        times.append((time.perf_counter() - began) * 1e6)
    return statistics.median(times[repetitions // 4 :])


def computed_us(module: nn.Module, value: Tensor, repetitions: int) -> tuple[float, float]:
    """Microseconds of a module's forward and backward on `value`."""
    inputs = value.requires_grad_(value.is_floating_point())
    forward = median_us(lambda: module(inputs), repetitions)

    def both() -> None:
        output = module(inputs)
        torch.autograd.backward(output, torch.ones_like(output))

    return forward, max(0.0, median_us(both, repetitions) - forward)


def adam_us(model: nn.Module, repetitions: int) -> float:
    """Microseconds of an Adam step on all parameters."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return median_us(torch.optim.Adam(model.parameters(), lr=1e-6).step, repetitions)


def predicted(
    model: Model, fit: CollectiveFit, ranks: int, width: int, depth: int, repetitions: int
) -> tuple[Decision, float]:
    """The planner's decision over all ways, from measured parts, and the memory bandwidth it assumes, in GB/s."""
    with torch.device("meta"):
        shape = Model(width, depth)
        units = plan_units(
            shape, [torch.zeros(TOKENS, dtype=torch.long)], blocks_of_lists(shape), compute_dtype=torch.float32
        )
    block = computed_us(model.blocks[0], torch.randn(*TOKENS, width), repetitions)
    edges = computed_us(nn.Sequential(model.embedding, model.head), torch.randint(VOCABULARY, TOKENS), repetitions)
    numel = sum(unit.numel for unit in units)
    memory_gb_per_s = numel * ADAM_BYTES_PER_ELEMENT / adam_us(model, repetitions) / 1000
    links = fit.links
    decision = decide(
        units,
        Cluster(world_size=ranks, ranks_per_host=ranks, inner=links, outer=links),
        # The cores that compute also move the bytes.
        DeviceSpec(
            tflops_16_bit=1.0, tflops_32_bit=1.0, memory_gib=1.0, memory_gb_per_s=memory_gb_per_s,
            host_link=links.all_gather, host_memory_gb_per_s=memory_gb_per_s, overlaps=False,
        ),
        PlanOptions(compute_dtype=torch.float32),
        memory_bytes=GIB,
        computed_us=[edges, *[block] * depth],
        among=ways(ranks),
        communication_error=fit.relative_error,
    )  # fmt: skip
    return decision, memory_gb_per_s


def fitted(ranks: int) -> CollectiveFit:
    """The links of all axes along which the ways to shard communicate."""
    axes: list[tuple[DeviceMesh, int | str]] = [(init_device_mesh("cpu", (ranks,)), 0)]
    if ranks == 4:
        pairs = init_device_mesh("cpu", (2, 2))
        axes += [(pairs, 0), (pairs, 1)]
    return measure_links(*axes)


def wrapped(way: Candidate, width: int, depth: int) -> nn.Module:
    """The engine around a new model, sharded that way."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (way.num_replicas, way.num_shards)) if way.strategy.is_hybrid else None
    return FullyShardedDataParallel(
        Model(width, depth), auto_wrap_policy=ClassPolicy({Block}), sharding_strategy=way.strategy, device_mesh=mesh
    )


def rank_main(rank: int, ranks: int, rendezvous: str, args: argparse.Namespace, size: str) -> None:
    """One rank: measure, predict, train, and write down predicted and measured times."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    width, depth = SIZES[size]
    fit = fitted(ranks)
    torch.manual_seed(0)
    decision, memory_gb_per_s = predicted(Model(width, depth), fit, ranks, width, depth, args.steps)
    trained = {}
    for way in ways(ranks):
        model = wrapped(way, width, depth)
        trained[candidate_name(way)] = (model, torch.optim.Adam(model.parameters(), lr=1e-4))
    torch.manual_seed(rank)
    tokens = torch.randint(VOCABULARY, TOKENS)
    times: dict[str, list[float]] = {name: [] for name in trained}
    for number in range(args.warmup + args.steps):
        for name, (model, optimizer) in trained.items():
            dist.barrier()
            began = time.perf_counter()
            step(model, optimizer, tokens)
            dist.barrier()
            if number >= args.warmup:
                times[name].append(1000 * (time.perf_counter() - began))
    if rank == 0:
        estimates = decision.estimates
        result = {
            "links": {name: _numbers(getattr(fit, name)) for name in ("all_gather", "reduce_scatter", "all_reduce")},
            "memory_gb_per_s": memory_gb_per_s,
            "measured": {name: statistics.median(took) for name, took in times.items()},
            "predicted": {candidate_name(each.candidate): each.time.step / 1000 for each in estimates},
            "apart": [
                sorted((candidate_name(one.candidate), candidate_name(other.candidate)))
                for one, other in itertools.combinations(estimates, 2)
                if decision.differ(one, other)
            ],
        }
        Path(args.result).write_text(json.dumps(result))
    dist.destroy_process_group()


def measure(args: argparse.Namespace, size: str, ranks: int) -> dict[str, Any]:
    """Run in `ranks` processes. Returns rank 0's result."""
    with tempfile.TemporaryDirectory() as directory:
        args.result = str(Path(directory) / "result.json")
        rendezvous = str(Path(directory) / "rendezvous")
        processes: Any = torch.multiprocessing
        processes.spawn(rank_main, (ranks, rendezvous, args, size), nprocs=ranks)
        figures: dict[str, Any] = json.loads(Path(args.result).read_text())
        return figures


def _numbers(fit: LinkFit) -> dict[str, float]:
    link = fit.link
    return {
        "launch_us": link.launch_us, "latency_us": link.latency_us, "gb_per_s": link.bandwidth_gb_per_s,
        "error": fit.relative_error,
    }  # fmt: skip


class Pair(NamedTuple):
    """Two ways to shard."""

    apart: bool
    """True if the planner tells them apart."""
    agrees: bool
    """True if it orders them as measured."""
    clear: bool
    """True if the measured times differ clearly."""


def agreement(figures: dict[str, Any]) -> list[Pair]:
    """All pairs."""
    predicted, measured = figures["predicted"], figures["measured"]
    return [
        Pair(
            apart=sorted((one, other)) in figures["apart"],
            agrees=(predicted[one] < predicted[other]) == (measured[one] < measured[other]),
            clear=max(measured[one], measured[other]) > CLEAR * min(measured[one], measured[other]),
        )
        for one, other in itertools.combinations(measured, 2)
    ]


def part(pairs: Sequence[Pair]) -> str:
    """A count out of a total, as text."""
    return f"{sum(pair.agrees for pair in pairs)} of {len(pairs)}"


def run(args: argparse.Namespace) -> list[Pair]:
    """Every size and number of ranks once. Prints predicted and measured times side by side; returns all pairs."""
    pairs: list[Pair] = []
    for size, ranks in itertools.product(args.sizes or (HELD_BACK if args.held_back else TUNED), args.ranks):
        figures = measure(args, size, ranks)
        print(f"{size}, {ranks} ranks; Adam {figures['memory_gb_per_s']:.3g} GB/s")
        for name, numbers in figures["links"].items():
            print(f"  {name:16}" + ", ".join(f"{what} {value:.3g}" for what, value in numbers.items()))
        print(f"  {'ms/step':24}{'measured':>10}{'predicted':>11}{'ratio':>8}")
        for name, ms in figures["measured"].items():
            predicted = figures["predicted"][name]
            print(f"  {name:24}{ms:10.1f}{predicted:11.1f}{predicted / ms:8.2f}", flush=True)
        pairs += agreement(figures)
    return pairs


class Counted(NamedTuple):
    """The pairs of one run."""

    load: float
    """Of the machine, before the run."""
    apart: list[Pair]
    """Those that the planner tells apart."""
    together: list[Pair]

    @classmethod
    def of(cls, load: float, pairs: Sequence[Pair]) -> Counted:
        return cls(load, [pair for pair in pairs if pair.apart], [pair for pair in pairs if not pair.apart])

    @property
    def clear(self) -> list[Pair]:
        """Pairs that the planner tells apart and that differ clearly."""
        return [pair for pair in self.apart if pair.clear]

    def row(self, number: int) -> str:
        """A row of the table."""
        missed = sum(pair.clear for pair in self.together)
        cells = (str(number), f"{self.load:.1f}", part(self.apart), part(self.clear), f"{len(self.together)}, {missed}")
        return "| " + " | ".join(cells) + " |"


#: The table's head: what `Counted.row` has in each cell.
HEAD = (
    "| run | load before | told apart, as measured | those that differ by over 10 % | within the noise, over 10 % |\n"
    "|--:|--:|--:|--:|--:|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=21)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], choices=[2, 4])
    parser.add_argument("--sizes", nargs="+", default=[], choices=sorted(SIZES))
    parser.add_argument("--held-back", action="store_true", help="the sizes on which nothing was tuned")
    parser.add_argument("--runs", type=int, default=1, metavar="N", help="do everything N times (default: 1)")
    parser.add_argument("--max-load", type=float, metavar="X", help="end if the load of the last minute is above X")
    args = parser.parse_args()
    if args.runs < 1:
        parser.error(f"--runs must be a positive integer, got {args.runs}")
    runs: list[Counted] = []
    for number in range(1, args.runs + 1):
        load = os.getloadavg()[0]
        # Before the first run: later on, the load is our own.
        if not runs and args.max_load is not None and load > args.max_load:
            print(f"plan: the load is {load:.2f}, and timings need at most {args.max_load:g}", file=sys.stderr)
            sys.exit(3)
        if args.runs > 1:
            print(f"run {number} of {args.runs}, load {load:.2f}", flush=True)
        runs.append(Counted.of(load, run(args)))
        last = runs[-1]
        print(
            f"told apart: {part(last.apart)} pairs as measured; of those that differ by over 10 %: {part(last.clear)}"
        )
        missed = sum(pair.clear for pair in last.together)
        print(f"within the noise: {len(last.together)} pairs; {missed} of them differ by over 10 %", flush=True)
    if args.runs > 1:
        print(HEAD, *(counted.row(number) for number, counted in enumerate(runs, start=1)), sep="\n")
    apart = [pair for counted in runs for pair in counted.apart]
    print(f"plan: {statistics.fmean(pair.agrees for pair in apart) if apart else float('nan'):.2f}")


if __name__ == "__main__":
    main()
