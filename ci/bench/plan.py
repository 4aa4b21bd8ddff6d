#!/usr/bin/env python3
"""
How often the cost model ranks two ways of sharding in the same order as measured step times.

For each size and number of ranks, on the CPU over gloo, the benchmark fits the link and times each unit's forward and
backward and one optimizer step. From these the planner predicts the step time of every way to shard. Then the engine
trains in each of them, with alternating steps; the predictions never use these measurements. Prints both side by side.
The last line is the fraction of pairs ordered as measured. Two more columns are informational: a model with two lanes,
and one in which a reduce-scatter costs as much as an all-reduce, as it does on gloo.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from engine import TOKENS, VOCABULARY, Block, Model, step
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_conformance.engine.fully_sharded.wrap_policy import ClassPolicy
from fsdp_conformance.engine.fully_sharded.wrapper import FullyShardedDataParallel
from fsdp_conformance.engine.sharding_strategy import ShardingStrategy
from fsdp_conformance.planner.device_spec import GIB, DeviceSpec
from fsdp_conformance.planner.link_spec import Cluster, LinkFit, LinkSpec
from fsdp_conformance.planner.plan_model import PlanUnit, blocks_of_lists, plan_units
from fsdp_conformance.planner.plan_step import Candidate, PlanOptions
from fsdp_conformance.planner.plan_text import candidate_name
from fsdp_conformance.planner.planner import decide

#: Name to width and number of blocks; a block has 12 x width^2 elements.
SIZES = {"1M": (128, 5), "10M": (320, 8)}

#: Pairs whose measured times differ by less than this are counted but reported separately.
CLEAR = 1.1

#: Adam reads the parameter, the gradient and two moments (4 bytes each) and writes all but the gradient.
ADAM_BYTES_PER_ELEMENT = 28


def ways(ranks: int) -> list[Candidate]:
    """The ways of sharding to compare."""
    found = [
        Candidate(ShardingStrategy.FULL_SHARD, ranks, 1),
        Candidate(ShardingStrategy.SHARD_GRAD_OP, ranks, 1),
        Candidate(ShardingStrategy.NO_SHARD, 1, ranks),
    ]
    return [*found, Candidate(ShardingStrategy.HYBRID_SHARD, 2, 2)] if ranks == 4 else found


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


def scattered_by_all_reduce_us(way: Candidate, units: Sequence[PlanUnit], cluster: Cluster) -> float:
    """The extra microseconds of a step if every reduce-scatter costs as much as an all-reduce."""
    axis = cluster.axis(way.num_shards)
    return sum(axis.all_reduce_us(4 * unit.numel) - axis.reduce_scatter_us(4 * unit.numel) for unit in units)


def predictions(model: Model, fit: LinkFit, ranks: int, width: int, depth: int, repetitions: int) -> dict[str, Any]:
    """Predicted milliseconds of every way, by the CPU cost model and by two variants."""
    with torch.device("meta"):
        shape = Model(width, depth)
        units = plan_units(
            shape, [torch.zeros(TOKENS, dtype=torch.long)], blocks_of_lists(shape), compute_dtype=torch.float32
        )
    block = computed_us(model.blocks[0], torch.randn(*TOKENS, width), repetitions)
    edges = computed_us(nn.Sequential(model.embedding, model.head), torch.randint(VOCABULARY, TOKENS), repetitions)
    numel = sum(unit.numel for unit in units)
    memory_gb_per_s = numel * ADAM_BYTES_PER_ELEMENT / adam_us(model, repetitions) / 1000
    options = PlanOptions(compute_dtype=torch.float32)
    cluster = Cluster(world_size=ranks, ranks_per_host=ranks, inner=fit.link, outer=fit.link)
    found = {}
    for overlaps in (False, True):
        device = DeviceSpec(
            tflops_16_bit=1.0, tflops_32_bit=1.0, memory_gib=1.0, memory_gb_per_s=memory_gb_per_s,
            host_link=fit.link, host_memory_gb_per_s=memory_gb_per_s, overlaps=overlaps,
        )  # fmt: skip
        decision = decide(
            units, cluster, device, options, memory_bytes=GIB, computed_us=[edges, *[block] * depth], among=ways(ranks)
        )
        found[overlaps] = {candidate_name(each.candidate): each.time.step / 1000 for each in decision.estimates}
    as_gloo = {
        candidate_name(way): found[False][candidate_name(way)] + scattered_by_all_reduce_us(way, units, cluster) / 1000
        for way in ways(ranks)
    }
    return {"added": found[False], "overlapped": found[True], "as gloo": as_gloo, "memory_gb_per_s": memory_gb_per_s}


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
    fit = LinkSpec.measure(init_device_mesh("cpu", (ranks,)))
    torch.manual_seed(0)
    predicted = predictions(Model(width, depth), fit, ranks, width, depth, args.steps)
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
        link = {
            "launch_us": fit.link.launch_us, "latency_us": fit.link.latency_us,
            "gb_per_s": fit.link.bandwidth_gb_per_s, "relative_error": fit.relative_error,
        }  # fmt: skip
        measured = {name: statistics.median(took) for name, took in times.items()}
        Path(args.result).write_text(json.dumps({"link": link, "measured": measured, **predicted}))
    dist.destroy_process_group()


def measure(args: argparse.Namespace, size: str, ranks: int) -> dict[str, Any]:
    """Run in `ranks` processes. Returns rank 0's result."""
    with tempfile.TemporaryDirectory() as directory:
        args.result = str(Path(directory) / "result.json")
        rendezvous = str(Path(directory) / "rendezvous")
        processes: Any = torch.multiprocessing
        processes.spawn(rank_main, (ranks, rendezvous, args, size), nprocs=ranks)
        found: dict[str, Any] = json.loads(Path(args.result).read_text())
        return found


def agreement(predicted: dict[str, float], measured: dict[str, float]) -> list[tuple[bool, bool]]:
    """For each pair: whether it is ordered as measured, and whether the measured times differ clearly."""
    return [
        (
            (predicted[one] < predicted[other]) == (measured[one] < measured[other]),
            max(measured[one], measured[other]) > CLEAR * min(measured[one], measured[other]),
        )
        for one, other in itertools.combinations(measured, 2)
    ]


def part(pairs: list[tuple[bool, bool]]) -> str:
    """A count out of a total, as text."""
    return f"{sum(agrees for agrees, _ in pairs)} of {len(pairs)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=21)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], choices=[2, 4])
    parser.add_argument("--sizes", nargs="+", default=sorted(SIZES), choices=sorted(SIZES))
    args = parser.parse_args()
    pairs: dict[str, list[tuple[bool, bool]]] = {"added": [], "overlapped": [], "as gloo": []}
    for size, ranks in itertools.product(args.sizes, args.ranks):
        found = measure(args, size, ranks)
        link = ", ".join(f"{name} {value:.3g}" for name, value in found["link"].items())
        print(f"{size}, {ranks} ranks; link: {link}; Adam {found['memory_gb_per_s']:.3g} GB/s")
        print(f"  {'ms/step':24}{'measured':>10}{'predicted':>11}{'ratio':>8}{'overlapped':>12}{'as gloo':>10}")
        for name, ms in found["measured"].items():
            added, overlapped, as_gloo = (found[kind][name] for kind in pairs)
            print(f"  {name:24}{ms:10.1f}{added:11.1f}{added / ms:8.2f}{overlapped:12.1f}{as_gloo:10.1f}")
        for kind in pairs:
            pairs[kind] += agreement(found[kind], found["measured"])
    for kind, all_pairs in pairs.items():
        clear = [pair for pair in all_pairs if pair[1]]
        print(f"{kind}: {part(all_pairs)} pairs as measured; of those that differ by over 10 %: {part(clear)}")
    print(f"plan: {statistics.fmean(agrees for agrees, _ in pairs['added']):.2f}")


if __name__ == "__main__":
    main()
