"""
The suite's own work never runs against the deadline of the engine, and has its own deadline.

The controller's clock leaps as soon as the ranks say where they are, so nothing here depends on how fast a machine is.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fsdp_conformance.adapters.vendors.torch_fsdp2 import TorchFSDP2
from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.contract.case import case_of
from fsdp_conformance.diagnosis import causes
from fsdp_conformance.fixtures import probes, transformer
from fsdp_conformance.harness import context
from fsdp_conformance.harness.accounting import Clock, Part, owner_of_time
from fsdp_conformance.harness.processes import supervisor
from fsdp_conformance.mutants import MUTANTS
from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.selftest import BoundCase, run_case
from fsdp_conformance.verdict import Verdict

ENGINE, SUITE, MEETING = Part

#: Names the directory in which ranks and the controller leave word for each other.
_DIRECTORY = "DEADLINE_PARTS_DIRECTORY"
#: The case's timeout, so that no test waits for a deadline: the clock leaps beyond it.
_TIMEOUT_S = 600.0


def reach(place: str) -> None:
    """In a rank: tell the controller that this rank is here, and wait until its clock has leapt; for ever, if never."""
    directory = Path(os.environ[_DIRECTORY])
    running = context.running()
    here = directory / f"{place}.{running.order.rank}"
    if here.exists():
        return
    os.mkfifo(here)
    running.pipe.send_bytes(b'{"reached": true}')  # wakes the controller
    with here.open("rb") as gate:
        gate.read(1)


class LeapingTime:
    """The supervisor's `time`: its clock leaps once, when all of some ranks have reached a place."""

    def __init__(self, directory: Path, place: str, *, ranks: range, seconds: float, let_go: bool) -> None:
        self._waiting = [directory / f"{place}.{rank}" for rank in ranks]
        self._seconds = seconds
        self._let_go = let_go
        self.offset = 0.0

    def monotonic(self) -> float:
        if not self.offset and all(path.exists() for path in self._waiting):
            self.offset = self._seconds
            # Opened for both, so that it does not wait for the reader, and kept, so that the byte is.
            self._gates = [os.open(path, os.O_RDWR) for path in self._waiting]
            for gate in self._gates if self._let_go else ():
                os.write(gate, b"x")
        return time.monotonic() + self.offset


class HangsInForward(TorchFSDP2):
    """Never returns from the second step's forward on the last rank: by then no rank builds a model any more."""

    name = "hangs-in-forward"

    calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if context.running().order.rank == 1 and self.calls == 2:
            reach("engine")
            threading.Event().wait()
        return super().forward(*args, **kwargs)


#: Why the ranks of these cases judge by themselves.
_LIVE = "the suite's own work in a rank is what is tested"


class Slow(ConformanceTestCase):
    """Cases whose own work is slow. Not collected: the tests below run them one by one."""

    __test__ = False

    @conformance_case("R003", chapter="A", world_size=2, timeout_s=_TIMEOUT_S, live=_LIVE)
    def test_slow_analysis(self) -> None:
        """Explaining the first difference takes longer than the engine's deadline."""
        workload = transformer.transformer()
        run = self.train(workload)
        with mock.patch.object(causes, "likely", _after(causes.likely)):
            self.check_parity(run, workload)

    @conformance_case("R003", chapter="A", world_size=2, timeout_s=_TIMEOUT_S, live=_LIVE)
    def test_one_slow_rank(self) -> None:
        """Rank 0 is slow between two trainings, and rank 1 waits for it in the engine's collectives."""
        workload = probes.exact_mlp()
        self.train(workload)
        if self.rank == 0:
            reach("suite")
        else:
            with self.blaming("implementation"):
                context.running().pipe.send_bytes(b'{"reached": true}')
        run = self.train(workload)
        self.check_parity(run, workload)

    @conformance_case("R003", chapter="A", world_size=2, timeout_s=_TIMEOUT_S, live=_LIVE)
    def test_plain(self) -> None:
        """Nothing is slow."""
        workload = probes.exact_mlp()
        self.check_parity(self.train(workload), workload)

    @conformance_case("R003", chapter="A", world_size=2, timeout_s=_TIMEOUT_S, live=_LIVE)
    def test_check_hangs(self) -> None:
        """A check never ends on rank 1; rank 0 has finished."""
        workload = probes.exact_mlp()
        self.check_parity(self.train(workload), workload)
        if self.rank == 1:
            reach("suite")
            threading.Event().wait()


def _after(function: Callable[..., str | None]) -> Callable[..., str | None]:
    """The function, after the clock has leapt."""

    def slow(*args: Any) -> str | None:
        reach("suite")
        return function(*args)

    return slow


def judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, *, implementation: str = "torch-fsdp2",
    place: str = "suite", ranks: range = range(2), times: float, let_go: bool = True, base: RunSettings | None = None,
) -> CaseRecord:  # fmt: skip
    """The record of a case during which the controller's clock leaps by some multiple of the case's timeout."""
    monkeypatch.setenv(_DIRECTORY, str(tmp_path))
    clock = LeapingTime(tmp_path, place, ranks=ranks, seconds=times * _TIMEOUT_S, let_go=let_go)
    monkeypatch.setattr(supervisor, "time", clock)
    monkeypatch.setattr(supervisor, "MOST_TIMES", 1)  # no more time for ranks that have got on
    case = case_of(getattr(Slow, method))
    assert case is not None
    record = run_case(BoundCase(case, Slow, method), implementation, base=base)
    assert clock.offset, "the clock did not leap: the ranks did not get there"
    return record


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["processes", "simulated"])
def test_slow_analysis_of_a_wrong_engine_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """66 wrong gradients are a FAIL, although explaining them takes longer than the whole case may."""
    # Simulated ranks take turns: only the first one gets there before the clock leaps.
    ranks = range(2) if kind == "processes" else range(1)

    record = judged(
        tmp_path, monkeypatch, "test_slow_analysis", implementation=MUTANTS["sum-instead-of-mean"].spec, ranks=ranks,
        times=1.5, base=RunSettings(ranks=kind),
    )  # fmt: skip

    assert record.verdict is Verdict.FAIL, record.reason
    assert record.findings[0].requirement == "R003"
    assert "summed over ranks" in str(record.findings[0].likely)


@pytest.mark.nightly
@pytest.mark.slow
def test_peers_of_a_slow_rank_do_not_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that waits in the engine for one that does the suite's work is not late."""
    record = judged(tmp_path, monkeypatch, "test_one_slow_rank", ranks=range(1), times=1.5)

    assert record.verdict is Verdict.PASS, record.reason


@pytest.mark.nightly
@pytest.mark.slow
def test_hanging_engine_is_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's own deadline still counts, with the stack of the rank that hangs."""
    hanging = f"{__name__}:{HangsInForward.__name__}"

    record = judged(
        tmp_path, monkeypatch, "test_plain", implementation=hanging, place="engine", ranks=range(1, 2), times=1.5
    )

    assert record.verdict is Verdict.HANG, record.reason
    assert "in forward" in str(record.exits[1].stack)


@pytest.mark.slow
def test_hanging_check_is_an_error_of_the_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline of the suite's own work ends the case, and the suite is to blame."""
    record = judged(tmp_path, monkeypatch, "test_check_hangs", ranks=range(1, 2), times=2.5, let_go=False)

    assert record.verdict is Verdict.ERROR_SUITE
    # Rank 0 may not have reported yet when the clock leaps, and then it is the first one that is late.
    late, _, words = record.reason.partition(" did not ")
    assert late in ("rank 0", "rank 1")
    assert words == "finish the suite's own work (not the implementation's) in time"
    assert not record.findings
    assert "in test_check_hangs" in str(record.exits[1].stack)


@pytest.mark.parametrize(
    ("parts", "owner"),
    [
        ([ENGINE, ENGINE], ENGINE),
        ([ENGINE, SUITE], SUITE),
        ([MEETING, SUITE], SUITE),
        ([MEETING, ENGINE], ENGINE),
        ([MEETING, MEETING], SUITE),
        ([SUITE], SUITE),
        ([], ENGINE),
    ],
)
def test_whose_time_passes(parts: list[Part], owner: Part) -> None:
    """A rank that works for the suite holds up all; one that meets its peers waits for one that is in the engine."""
    for order in itertools.permutations(parts):
        assert owner_of_time(order) is owner


def test_the_clock_of_a_case() -> None:
    """Every second counts for one of the two."""
    clock = Clock(100.0)
    for now, parts in ((101.0, [SUITE, SUITE]), (104.0, [SUITE, ENGINE]), (114.0, [ENGINE, ENGINE]), (134.0, [ENGINE])):
        clock.advance(now, parts)

    assert (clock.suite_s, clock.engine_s) == (4.0, 30.0)


def test_time_does_not_go_back() -> None:
    """Messages of several ranks may be read in another order than they were sent."""
    clock = Clock(100.0)
    clock.advance(110.0, [ENGINE])
    clock.advance(105.0, [SUITE])
    clock.advance(112.0, [SUITE])

    assert (clock.suite_s, clock.engine_s) == (2.0, 10.0)
