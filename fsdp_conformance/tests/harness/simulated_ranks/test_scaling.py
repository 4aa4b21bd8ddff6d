"""
Costs of simulated ranks as a function of their number: counted, so that no clock decides.

A case of N ranks should cost N times what one rank costs. What grows faster hides in work that each rank does for all,
so these tests count such work at two sizes.
"""

from __future__ import annotations

import gc
import json
import random
import unittest
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_conformance import codec
from fsdp_conformance.harness.accounting import Part
from fsdp_conformance.harness.simulated_ranks import meeting
from fsdp_conformance.harness.simulated_ranks import scheduler as rank_scheduler
from fsdp_conformance.harness.simulated_ranks.host import HostSeat
from fsdp_conformance.harness.simulated_ranks.meeting import Contribution, Meeting
from fsdp_conformance.harness.simulated_ranks.ranks import run_ranks, simulated_world, start_ranks
from fsdp_conformance.harness.simulated_ranks.scheduler import RankScheduler
from fsdp_conformance.harness.simulated_ranks.state import RankState
from fsdp_conformance.history.collective import Op
from fsdp_conformance.outcome.records import RankReport
from fsdp_conformance.tests.harness.started_ranks import StartedRanks

SIZES = (4, 32)

#: Generous: everything below takes a second on a free machine.
TIMEOUT_S = 600.0


@contextmanager
def counted(owner: Any, name: str) -> Iterator[list[int]]:
    """How often a function is called inside, in a list of one number."""
    before, calls = getattr(owner, name), [0]

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return before(*args, **kwargs)

    setattr(owner, name, counting)
    try:
        yield calls
    finally:
        setattr(owner, name, before)


def contributions(op: Op, size: int, root: int = 0) -> list[Contribution]:
    """The contributions of `size` ranks to a collective of single tensors, one element per rank where it is split."""
    whole, part = [torch.arange(size) + rank for rank in range(size)], [torch.full((1,), rank) for rank in range(size)]
    brought = []
    for rank in range(size):
        empty_whole, empty_part = torch.zeros(size, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        lists = [torch.zeros(1, dtype=torch.int64) for _ in range(size)] if rank == root else []
        inputs, outputs = {
            Op.ALL_REDUCE: ([part[rank]], [part[rank]]),
            Op.REDUCE: ([part[rank]], [part[rank]]),
            Op.BROADCAST: ([part[rank]], [part[rank]]),
            Op.ALL_GATHER: ([part[rank]], [empty_whole]),
            Op.REDUCE_SCATTER: ([whole[rank]], [empty_part]),
            Op.ALL_TO_ALL: ([whole[rank]], [empty_whole]),
            Op.GATHER: ([part[rank]], lists),
            Op.SCATTER: (lists, [empty_part]),
            Op.BARRIER: ([], []),
        }[op]
        brought.append(
            Contribution(
                op=op,
                call=f"{op} of rank {rank}",
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                reduce_op="SUM" if op in (Op.ALL_REDUCE, Op.REDUCE, Op.REDUCE_SCATTER) else "",
                root=root,
                sizes=() if op is Op.ALL_TO_ALL else None,
            )
        )
    return brought


def join_all(brought: list[Contribution]) -> None:
    """All ranks meet, the first one first."""
    one = Meeting(len(brought))
    for rank, contribution in enumerate(brought):
        assert "" == one.join(rank, contribution, range(len(brought)))
    assert all(contribution.is_there for contribution in brought)


@pytest.mark.parametrize("at", ["first", "last"])
@pytest.mark.parametrize("op", sorted(meeting.RESULTS))
def test_an_arrival_does_not_go_through_the_others(op: Op, at: str) -> None:
    """Each rank is looked at when it arrives and when it gets its result, wherever the root is."""
    for size in SIZES:
        with counted(Meeting, "_suffices") as looks, counted(meeting, "_write") as writes:
            join_all(contributions(op, size, root=0 if at == "first" else size - 1))
        assert looks[0] <= 3 * size
        assert writes[0] <= 2 * size


@pytest.mark.parametrize("size", SIZES)
def test_a_reduction_adds_each_contribution_once(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever gets which part of it."""
    added: list[int] = []

    def add(total: Tensor, tensor: Tensor) -> Tensor:
        added.append(tensor.numel())
        return torch.add(total, tensor)

    monkeypatch.setitem(meeting._PAIRWISE, "SUM", add)
    brought = contributions(Op.REDUCE_SCATTER, size)
    expected = torch.stack([contribution.inputs[0] for contribution in brought]).sum(0)

    join_all(brought)

    assert [size] * (size - 1) == added
    assert expected.tolist() == [int(contribution.outputs[0]) for contribution in brought]


@pytest.mark.parametrize("size", SIZES)
def test_an_exchange_cuts_each_input_once(size: int) -> None:
    """An input is not cut again for every rank that gets a part of it."""
    brought = contributions(Op.ALL_TO_ALL, size)

    with counted(meeting, "_rows_sent") as cuts:
        join_all(brought)

    assert size == cuts[0]
    assert [[rank + sender for sender in range(size)] for rank in range(size)] == [
        contribution.outputs[0].tolist() for contribution in brought
    ]


@pytest.mark.parametrize("reduce_op", ["SUM", "AVG", "PRODUCT", "MIN", "MAX"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_parts_of_a_reduction_are_reduced_parts(dtype: torch.dtype, reduce_op: str) -> None:
    """Each rank gets, to the last bit, the sum of its own part in rank order."""
    size, numel = 5, 37
    generator = torch.Generator().manual_seed(3)
    given = [torch.randn(size * numel, generator=generator, dtype=torch.float64).to(dtype) for _ in range(size)]
    outputs = [torch.zeros(numel, dtype=dtype) for _ in range(size)]

    join_all(
        [
            Contribution(
                op=Op.REDUCE_SCATTER, call="", inputs=(given[rank],), outputs=(outputs[rank],), reduce_op=reduce_op
            )
            for rank in range(size)
        ]
    )

    for rank, output in enumerate(outputs):
        parts = [tensor[rank * numel : (rank + 1) * numel] for tensor in given]
        assert torch.equal(meeting._reduced(parts, reduce_op), output)


def test_what_was_made_for_all_ranks_is_dropped() -> None:
    """A rank may keep its Work, and with it the meeting, for as long as it likes."""
    brought = contributions(Op.REDUCE_SCATTER, 4)
    one = Meeting(4)
    for rank, contribution in enumerate(brought):
        one.join(rank, contribution, range(4))

    assert {} == one.brought._made


def test_turns_are_handed_over_as_often_on_every_rank() -> None:
    """A rank hands over once per collective that it waits for, without asking all others if they can go on."""
    steps = 3

    def train(rank: int) -> None:
        for _ in range(steps):
            dist.all_reduce(torch.ones(1))
            dist.reduce_scatter_tensor(torch.empty(1), torch.ones(dist.get_world_size()))

    per_rank = {}
    for size in SIZES:
        with counted(RankState, "save") as turns, counted(rank_scheduler._Seat, "can_go_on") as questions:
            run_ranks(size, train, timeout_s=TIMEOUT_S)
        per_rank[size] = turns[0] / size, questions[0] / size
    (few_turns, few_questions), (many_turns, many_questions) = per_rank.values()

    assert 2 * steps * 0.5 < few_turns
    assert many_turns <= 1.5 * few_turns
    assert many_questions <= 2 * few_questions


# --- the end ---


def _ends(size: int, before: Callable[[RankScheduler, int], bool]) -> list[str]:
    """Each rank's ending when ranks end together, unless `before` makes a rank leave at once."""
    events: list[str] = []

    def body(rank: int) -> None:
        scheduler = rank_scheduler.running()
        scheduler.finish()
        if not before(scheduler, rank):
            return
        events.append("comes")
        scheduler.once_together(lambda: events.append("works"))
        events.append("goes")

    with simulated_world([RankState() for _ in range(size)]) as scheduler:
        for thread in start_ranks(scheduler, body):
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()
    return events


@pytest.mark.parametrize("missing", [(), (0,), (2,), (0, 3)])
def test_ranks_do_together_what_one_can_do_for_all(missing: tuple[int, ...]) -> None:
    """The work is done once, when all remaining ranks have come, and before any of them continues."""
    left = 4 - len(missing)

    assert ["comes"] * left + ["works"] + ["goes"] * left == _ends(4, lambda _, rank: rank not in missing)


class Collects(StartedRanks):
    """Ranks that note how often the garbage of their process is collected at their end. Not collected by pytest."""

    __test__ = False
    simulated_ranks = True
    world_size = 4
    case_timeout_s = 60.0

    def test_ends(self) -> None:
        gc.disable()
        dist.barrier()
        if self.rank == 0:
            gc.callbacks.append(self._note)
        dist.barrier()

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            with Path(self.launch_payload).open("a", encoding="utf-8") as file:
                file.write(f"{info['generation']}\n")


@pytest.mark.slow
def test_garbage_is_collected_once_for_all_ranks(tmp_path: Path) -> None:
    """Each collection goes through what all ranks have, so one for each rank costs the square of their number."""
    case, result = Collects("test_ends"), unittest.TestResult()
    case.launch_payload = str(tmp_path / "collections")
    case.run(result)

    assert result.wasSuccessful(), [*result.errors, *result.failures]
    assert ["2"] == (tmp_path / "collections").read_text(encoding="utf-8").split()


def _message(**data: Any) -> bytes:
    return json.dumps(data).encode()


def test_the_controller_counts_whose_code_ranks_run() -> None:
    """The counts are those of a scan over all ranks, in any order of messages."""
    choose = random.Random(5)
    size = 6
    seat = HostSeat(0, None, None, None, rank_files=(None,) * size, part=Part.SUITE)  # type: ignore[arg-type]
    parts, spoken = dict.fromkeys(range(size), Part.SUITE), set()
    seen: Counter[int] = Counter()
    for _ in range(200):
        rank = choose.randrange(size)
        if choose.random() < 0.1:
            seat.accept(_message(report=codec.plain(RankReport(rank=rank))))
            spoken.add(rank)
        else:
            parts[rank] = choose.choice(list(Part))
            seat.accept(_message(part=parts[rank], rank=rank))
        expected = {part for rank, part in parts.items() if rank not in spoken}
        assert expected == set(seat.parts)
        assert len(seat.parts) == len(expected)
        seen[len(expected)] += 1

    assert set(seen) >= {0, 1, 2}
