"""A rank that was made to fail must be named, with the cause, and no rank may be left running."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdp_conformance.judge import drilled
from fsdp_conformance.outcome.endings import STOPPED
from fsdp_conformance.outcome.records import CaseRecord, RankError, RankExit, RankReport
from fsdp_conformance.stress import SWALLOWED, Failure
from fsdp_conformance.verdict import Verdict

_WHERE = "all_gather #3 of training"


def _error(kind: str, message: str, time: float) -> RankError:
    return RankError(kind=kind, message=message, traceback="", blame="implementation", time=time)


def _raised(rank: int, kind: str, message: str, time: float = 1.0) -> tuple[RankReport, RankExit]:
    report = RankReport(rank=rank, error=_error(kind, message, time))
    return report, RankExit(rank=rank, pid=1, exitcode=10, time=time, reported=True)


def _gone(rank: int, exitcode: int) -> tuple[None, RankExit]:
    return None, RankExit(rank=rank, pid=1, exitcode=exitcode, time=2.0, reported=False)


def _ended(rank: int, stack: str = "") -> tuple[None, RankExit]:
    end = RankExit(rank=rank, pid=1, exitcode=-15, time=3.0, reported=False, ended_by_controller=True, stack=stack)
    return None, end


#: Rank 1 as it should end.
_RIGHT: dict[Failure, tuple[RankReport | None, RankExit]] = {
    Failure.RAISE: _raised(1, "a.InjectedFailure", f"stress: told to raise before {_WHERE}"),
    Failure.COLLECTIVE: _raised(1, "torch.distributed.DistBackendError", "stress: the backend failed in all_gather"),
    Failure.EXIT: _gone(1, 7),
    Failure.KILL: _gone(1, -9),
    Failure.STOP: _ended(1, STOPPED),
}
_LOST = _raised(0, "builtins.RuntimeError", "Connection closed by peer", time=0.5)
_TIMED_OUT = _raised(0, "builtins.RuntimeError", "Timed out waiting 3000ms for recv operation", time=0.5)


def _drilled(
    failure: Failure,
    *ranks: tuple[RankReport | None, RankExit],
    where: str = _WHERE,
    alive: tuple[int, ...] = (),
) -> CaseRecord:
    record = CaseRecord(
        case="R001/exact-probe-ws2", requirements=["R001"], chapter="A", verdict=Verdict.CRASH, reason="usual"
    )
    reports, exits = zip(*ranks, strict=True)
    return drilled(record, failure, rank=1, where=where, reports=reports, exits=exits, alive=alive)


@pytest.mark.parametrize("failure", list(Failure))
@pytest.mark.parametrize("peer", [_LOST, _TIMED_OUT], ids=["lost", "timed-out"])
def test_as_it_should_be(failure: Failure, peer: tuple[RankReport, RankExit]) -> None:
    """The rank and the cause are named although the peer was quicker; four comparisons are counted."""
    record = _drilled(failure, peer, _RIGHT[failure])

    assert (record.verdict, record.reason, record.findings, record.comparisons) == (Verdict.PASS, "", [], 4)
    assert record.notes == [f"stress failure {failure} struck rank 1 before {_WHERE}"]


@pytest.mark.parametrize("planned", list(Failure))
@pytest.mark.parametrize("did", list(Failure))
def test_another_cause(planned: Failure, did: Failure) -> None:
    """Each way to end passes for itself alone."""
    record = _drilled(planned, _LOST, _RIGHT[did])

    assert (record.verdict is Verdict.PASS) == (planned is did)


def test_an_exception_that_was_replaced() -> None:
    """The engine's own message replaces that of the exception."""
    record = _drilled(Failure.RAISE, _LOST, _raised(1, "builtins.RuntimeError", "the forward failed"))

    assert record.verdict is Verdict.FAIL
    assert record.findings[0].requirement == "R160"
    assert "got rank 1 raised RuntimeError: the forward failed" in record.reason


def test_the_wrong_rank() -> None:
    """A peer raises independently, and earlier."""
    record = _drilled(Failure.RAISE, _raised(0, "builtins.KeyError", "weight", 0.1), _RIGHT[Failure.RAISE])

    assert "got rank 0 raised KeyError" in record.reason


def test_no_rank_failed() -> None:
    """The exception was lost: both ranks trained on."""
    fine = [(RankReport(rank=r), RankExit(rank=r, pid=1, exitcode=0, time=1.0, reported=True)) for r in (0, 1)]

    assert "expected rank 1 to fail, got no failure" in _drilled(Failure.RAISE, *fine).reason


def test_a_peer_that_hangs() -> None:
    """The suite had to end it."""
    record = _drilled(Failure.KILL, _ended(0), _RIGHT[Failure.KILL])

    assert (record.verdict, record.findings[0].rank) == (Verdict.FAIL, 0)
    assert "expected it to end by itself after rank 1 had failed, got rank 0 did not report in time" in record.reason


def test_a_process_that_lives_on() -> None:
    """After the case every process is gone."""
    assert "got rank 0 alive" in _drilled(Failure.KILL, _LOST, _RIGHT[Failure.KILL], alive=(0,)).reason


def test_a_failure_that_never_struck() -> None:
    """The verdict on the case stands, with a note."""
    record = _drilled(Failure.KILL, _LOST, _RIGHT[Failure.KILL], where="")

    assert (record.verdict, record.reason) == (Verdict.CRASH, "usual")
    assert record.notes == ["stress failure kill never struck: rank 1 issues too few collectives"]


def test_a_case_that_expects_exceptions() -> None:
    """The case took the injected exception for a refusal, so there is no conclusion."""
    report, end = _LOST
    record = _drilled(Failure.RAISE, (replace(report, measurements={SWALLOWED: True}), end), _RIGHT[Failure.RAISE])

    assert record.verdict is Verdict.DISABLED
