"""AE. Simulated ranks: their collectives and their private state, compared with ranks that are processes."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_conformance.adapters.components import ReducerOptions
from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.checks.result import comparison

#: Why the cases below run on processes: they start simulated ranks themselves.
PROCESSES = "the case starts simulated ranks, which cannot be nested"

#: Reductions whose result is exact for whole numbers if the number of ranks is a power of two.
REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "average": dist.ReduceOp.AVG,
}


def coded(rank: int, *shape: int) -> Tensor:
    """Whole numbers that encode rank and position."""
    numel = int(torch.Size(shape).numel())
    return (torch.arange(numel, dtype=torch.float32) + 100 * (rank + 1)).reshape(shape)


def all_reduce(rank: int, size: int) -> list[Tensor]:
    """Every reduction."""
    results = []
    for op in REDUCTIONS.values():
        mine = coded(rank, 2, 3)
        dist.all_reduce(mine, op=op)
        results.append(mine)
    return results


def reduce_scatter(rank: int, size: int) -> list[Tensor]:
    """Every reduction of a list."""
    results = []
    for op in REDUCTIONS.values():
        output = torch.empty(3)
        dist.reduce_scatter(output, list(coded(rank, size, 3)), op=op)
        results.append(output)
    return results


def all_gather(rank: int, size: int) -> list[Tensor]:
    """All-gather of tensors and of objects."""
    parts = [torch.empty(3) for _ in range(size)]
    dist.all_gather(parts, coded(rank, 3))
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, rank * 7)
    return [*parts, torch.tensor(objects)]


def from_each_root(rank: int, size: int) -> list[Tensor]:
    """Broadcast, scatter, gather and reduce, from or to each rank."""
    results = []
    for root in range(size):
        mine = coded(rank, 3)
        dist.broadcast(mine, root)
        part = torch.empty(3)
        dist.scatter(part, list(coded(rank, size, 3)) if rank == root else None, root)
        whole = [torch.empty(3) for _ in range(size)] if rank == root else None
        dist.gather(coded(rank, 3), whole, root)
        total = coded(rank, 3)
        dist.reduce(total, root)
        results += [mine, part, *(whole or []), *([total] if rank == root else [])]
    return results


def all_to_all(rank: int, size: int) -> list[Tensor]:
    """All-to-all of equal parts, and of parts whose sizes differ between ranks."""
    output = torch.empty(size)
    dist.all_to_all_single(output, coded(rank, size))
    # Rank r sends r + 1 elements to each.
    received = torch.empty(sum(range(1, size + 1)))
    dist.all_to_all_single(
        received, coded(rank, size * (rank + 1)), [other + 1 for other in range(size)], [rank + 1] * size
    )
    return [output, received]


def sub_groups(rank: int, size: int) -> list[Tensor]:
    """Two interleaved groups, each with all-reduce, broadcast and all-gather."""
    groups = [dist.new_group(list(range(first, size, 2))) for first in range(2)]
    group = groups[rank % 2]
    mine = coded(rank, 3)
    dist.all_reduce(mine, group=group)
    average = coded(rank, 3)
    dist.all_reduce(average, op=dist.ReduceOp.AVG, group=group)
    first = coded(rank, 2)
    dist.broadcast(first, group_src=1, group=group)
    parts = [torch.empty(1) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, coded(rank, 1), group=group)
    return [mine, average, first, *parts]


def asynchronous(rank: int, size: int) -> list[Tensor]:
    """Works waited for in reverse order, and messages around the ring."""
    tensors = [coded(rank, 3) + step for step in range(3)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        if work is not None:
            work.wait()
    # Copy the values now, so that a result that arrives later counts as late.
    results = [tensor.clone() for tensor in tensors]
    received = torch.empty(3)
    sent = dist.isend(coded(rank, 3), (rank + 1) % size)
    dist.recv(received, (rank - 1) % size)
    if sent is not None:
        sent.wait()
    return [*results, received]


PROGRAMS: dict[str, Callable[[int, int], list[Tensor]]] = {
    "all-reduce": all_reduce,
    "reduce-scatter": reduce_scatter,
    "all-gather": all_gather,
    "from-each-root": from_each_root,
    "all-to-all": all_to_all,
    "sub-groups": sub_groups,
    "asynchronous": asynchronous,
}

#: The mutant that each program kills.
_WRONG = {
    "all-reduce": "averages-by-two",
    "reduce-scatter": "first-part-for-all",
    "all-gather": "last-part-first",
    "from-each-root": "first-rank-is-root",
    "all-to-all": "exchanges-nothing",
    "sub-groups": "averages-over-the-world",
    "asynchronous": "takes-what-is-there",
}


class Collectives(ConformanceTestCase):
    """Compared with processes that do the same."""

    def failure_of(self, world_size: int, body: Callable[[int], object]) -> str:
        """The error that simulated ranks raise when running `body`; empty if none."""
        adapter = self.subject()
        try:
            adapter.run_ranks(world_size, body)
        except Exception as error:  # noqa: BLE001 - any exception will do; only its text is judged
            return str(error)
        return ""

    @conformance_case(
        "R186",
        chapter="AE",
        axes={"program": tuple(PROGRAMS)},
        world_size=4,
        needs=("sim_ranks",),
        kills=lambda values: (_WRONG[values["program"]], "ranks-return-the-opposite-sign", "ranks-return-too-much"),
        processes=PROCESSES,
    )
    def test_as_between_processes(self, program: str) -> None:
        """Each collective gives each simulated rank bitwise the same result as the process with that rank."""
        run = PROGRAMS[program]
        expected = run(self.rank, self.world_size)
        adapter = self.subject()
        with self.blaming("implementation"):
            simulated = adapter.run_ranks(self.world_size, lambda rank: run(rank, self.world_size))
        got = simulated[self.rank]
        self.expect_equal("R186", "results", len(got), len(expected))
        for index, (mine, want) in enumerate(zip(got, expected, strict=False)):
            self.check_equal("R186", mine, want, check=program, fqn=f"result {index}")

    @conformance_case(
        "R186",
        chapter="AE",
        world_size=1,
        needs=("sim_ranks",),
        kills=(
            "common-random-numbers",
            "ranks-return-the-opposite-sign",
            "ranks-return-too-much",
        ),
        processes=PROCESSES,
    )
    def test_random_numbers(self) -> None:
        """Each rank has its own torch and Python random numbers, whatever other ranks draw in between."""

        def draw(rank: int) -> list[float]:
            torch.manual_seed(rank)
            random.seed(rank)
            drawn = []
            for _ in range(3):
                drawn += [torch.rand(1).item(), random.random()]
                dist.barrier()
            return drawn

        adapter = self.subject()
        with self.blaming("implementation"):
            drawn = adapter.run_ranks(4, draw)
        for rank, got in enumerate(drawn):
            generator, python = torch.Generator().manual_seed(rank), random.Random(rank)
            expected = [value for _ in range(3) for value in (torch.rand(1, generator=generator), python.random())]
            self.check_equal(
                "R186", torch.tensor(got), torch.tensor(expected), check="random numbers", fqn=f"rank {rank}"
            )

    @conformance_case(
        "R186",
        chapter="AE",
        world_size=1,
        needs=("sim_ranks",),
        kills=(
            "failed-ranks-return-nothing",
            "mismatch-unnoticed",
        ),
        processes=PROCESSES,
    )
    def test_different_calls(self) -> None:
        """Ranks that call different collectives raise an error that names both calls, instead of waiting forever."""

        def body(rank: int) -> None:
            if rank == 1:
                dist.all_gather([torch.empty(3), torch.empty(3)], torch.ones(3))
            else:
                dist.all_reduce(torch.ones(3))

        text = self.failure_of(2, body)
        message = comparison("error", expected="both calls, all_gather on rank 1 and all_reduce on rank 0", got=text)
        self.expect("all_gather" in text and "all_reduce" in text, "R186", message)

    @conformance_case(
        "R186", chapter="AE", world_size=1, needs=("sim_ranks",), kills=("failure-unnoticed",), processes=PROCESSES
    )
    def test_a_rank_that_fails(self) -> None:
        """An exception on one rank ends the ranks that wait for it, and is raised to the caller."""

        def body(rank: int) -> None:
            if rank == 2:
                raise ValueError("no more shards")
            dist.barrier()

        text = self.failure_of(4, body)
        message = comparison("error", expected="rank 2's: no more shards", got=text)
        self.expect("no more shards" in text, "R186", message)


class Bodies(ConformanceTestCase):
    """The same body on both kinds of ranks."""

    @conformance_case(
        "R187",
        chapter="AE",
        axes={"world_size": (2, 4)},
        needs=("sim_ranks", "reducer"),
        kills=("collectives-return-nothing", "trains-otherwise", "takes-what-is-there"),
        processes=PROCESSES,
    )
    def test_same_verdict(self, world_size: int) -> None:
        """A body that trains and compares finds the same on both kinds of ranks, whether training is right or wrong."""
        adapter = self.subject()

        def wrong_parameters(rank: int, faulty: bool) -> list[str]:
            model = nn.Linear(4, 4, bias=False)
            twin = nn.Linear(4, 4, bias=False)
            for each in (model, twin):
                nn.init.eye_(each.weight)
            optimizers = [torch.optim.SGD(each.parameters(), lr=0.125) for each in (model, twin)]
            reducer = adapter.reducer(model, ReducerOptions())
            for step in range(2):
                batches = [coded(other, 2, 4) / 128 + step for other in range(world_size)]
                mine = batches[0] if faulty else batches[rank]
                reducer(mine).sum().backward()
                torch.stack([twin(batch).sum() for batch in batches]).mean().backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            return [] if torch.equal(model.weight, twin.weight) else ["weight"]

        for faulty in (False, True):
            with self.blaming("implementation"):
                expected = wrong_parameters(self.rank, faulty)
                simulated = adapter.run_ranks(world_size, partial(wrong_parameters, faulty=faulty))
            what = f"wrong parameters found with faulty={faulty}"
            self.expect_equal("R187", f"{what} by processes", expected, ["weight"] if faulty else [])
            self.expect_equal("R187", f"{what} by simulated ranks", simulated[self.rank], expected)
