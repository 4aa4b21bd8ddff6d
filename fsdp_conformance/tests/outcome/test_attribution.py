"""Which rank is named, and what is folded, from reports and exits alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fsdp_conformance.outcome.endings import (
    STOPPED,
    Attribution,
    Ending,
    RankEnding,
    attribute,
    ending_of,
    first_line,
    kind_of_error,
    shutdown_note,
)
from fsdp_conformance.outcome.records import Finding, RankError, RankExit, RankReport
from fsdp_conformance.tests.report.evidence import a_finding

CLOSED = "[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:8585"
TIMED_OUT = "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1000ms for recv operation"


def error(message: str = "boom", *, kind: str = "builtins.RuntimeError", time: float = 1.0) -> RankError:
    """An exception in a rank."""
    return RankError(kind=kind, message=message, traceback="", blame="implementation", time=time)


def report(rank: int, failure: RankError | None = None, **fields: object) -> RankReport:
    """The report of a rank."""
    return RankReport(rank=rank, error=failure, **fields)  # type: ignore[arg-type]


def end(rank: int, exitcode: int | None = 0, *, time: float = 9.0, **fields: object) -> RankExit:
    """How a rank's process ended."""
    fields.setdefault("reported", True)
    return RankExit(rank=rank, pid=100 + rank, exitcode=exitcode, time=time, **fields)  # type: ignore[arg-type]


def judged(*ranks: tuple[RankReport | None, RankExit]) -> Attribution:
    """The attribution for these ranks."""
    return attribute([item[0] for item in ranks], [item[1] for item in ranks])


def test_no_rank_failed() -> None:
    """Two reports without an error have no first failure, and nothing to note."""
    outcome = judged((report(0), end(0)), (report(1), end(1)))

    assert (outcome.first, outcome.is_hang, outcome.consequences, outcome.notes, outcome.headline) == (
        None,
        False,
        (),
        (),
        "",
    )


def test_each_rank_has_a_report_and_an_exit() -> None:
    """The two lists are read side by side, so one that is shorter is a mistake of the caller."""
    with pytest.raises(ValueError, match="shorter"):
        attribute([report(0), report(1)], [end(0)])


@pytest.mark.parametrize(
    ("reported", "exit_of_rank", "ending", "sentence"),
    [
        (report(1), end(1), Ending.FINISHED, "rank 1 finished"),
        (None, end(1, -9, reported=False), Ending.DIED, "rank 1 was killed by SIGKILL before it reported"),
        (None, end(1, 0, reported=False), Ending.EXITED, "rank 1 exited with code 0 before it reported"),
        (None, end(1, 3, reported=False), Ending.EXITED, "rank 1 exited with code 3 before it reported"),
    ],
)
def test_how_a_rank_without_an_exception_ended(
    reported: RankReport | None, exit_of_rank: RankExit, ending: Ending, sentence: str
) -> None:
    """Its ending has the time of its exit."""
    assert ending_of(reported, exit_of_rank) == RankEnding(rank=1, ending=ending, time=9.0, sentence=sentence)


@pytest.mark.parametrize(
    ("failure", "findings", "ending", "sentence"),
    [
        (error(""), [], Ending.RAISED, "rank 1 raised RuntimeError"),
        (error("first\nsecond"), [a_finding()], Ending.RAISED, "rank 1 raised RuntimeError: first"),
        (
            error("1 finding", kind="fsdp_conformance.errors.RequirementFailed"),
            [a_finding()],
            Ending.FOUND,
            "rank 1 raised RequirementFailed: 1 finding",
        ),
    ],
)
def test_how_a_rank_with_an_exception_ended(
    failure: RankError, findings: list[Finding], ending: Ending, sentence: str
) -> None:
    """Its ending has the time of the exception. With findings it differs; without a message it quotes the class."""
    outcome = ending_of(report(1, failure, findings=findings), end(1, 10))

    assert outcome == RankEnding(rank=1, ending=ending, time=1.0, sentence=sentence, error=failure)


@pytest.mark.parametrize(
    ("reported", "exit_of_rank", "ending"),
    [
        (report(1), end(1), Ending.SUITE_LATE),
        (report(1, error(CLOSED)), end(1, 10), Ending.SUITE_LATE),
        (report(1, error()), end(1, 10), Ending.RAISED),
        (None, end(1, None, reported=False), Ending.SUITE_LATE),
        (None, end(1, -9, reported=False, ended_by_controller=True), Ending.SUITE_LATE),
        (None, end(1, -9, reported=False), Ending.DIED),
    ],
)
def test_a_rank_that_the_suite_delayed(reported: RankReport | None, exit_of_rank: RankExit, ending: Ending) -> None:
    """The delay explains everything except an exception of the rank's own code and a death."""
    assert ending_of(reported, replace(exit_of_rank, suite_was_late=True)).ending is ending


def test_only_the_first_line_is_quoted() -> None:
    """The quote is the first of several lines, without what surrounds it."""
    assert first_line("\n first\nsecond\nthird\n") == "first"


def test_cause_comes_before_consequence_whatever_the_clock_says() -> None:
    """A peer notices a dead rank before the controller does: its earlier time does not make it the first."""
    outcome = judged((report(0, error(CLOSED, time=1.0)), end(0, 10)), (None, end(1, -9, time=2.0, reported=False)))

    assert outcome.headline == "rank 1 was killed by SIGKILL before it reported"
    assert [item.ending for item in outcome.endings] == [Ending.LOST_PEER, Ending.DIED]
    assert len(outcome.consequences) == 1
    assert not outcome.is_hang


def test_earliest_of_two_causes_is_first() -> None:
    """Both ranks raised independently; time decides."""
    outcome = judged(
        (report(0, error("late", time=5.0)), end(0, 10)), (report(1, error("early", time=3.0)), end(1, 10))
    )

    assert outcome.headline == "rank 1 raised RuntimeError: early"


def test_a_cause_comes_before_a_rank_that_the_suite_delayed() -> None:
    """Even if it is later: a delay does not make a rank raise."""
    late = (report(0), end(0, time=1.0, suite_was_late=True))

    assert judged(late, (report(1, error(time=2.0)), end(1, 10))).headline == "rank 1 raised RuntimeError: boom"


def test_absent_rank_explains_those_that_waited() -> None:
    """Of a rank that is stuck and one that timed out waiting, the stuck one is first, though it was noticed later."""
    stuck = end(1, -15, reported=False, ended_by_controller=True)
    outcome = judged((report(0, error(TIMED_OUT)), end(0, 10)), (None, stuck))

    assert outcome.headline == "rank 1 did not report in time and was terminated"
    assert outcome.is_hang


def test_stopped_rank_comes_before_a_stuck_one() -> None:
    """A rank in state T is the better explanation, whatever its number."""
    stuck = end(0, -15, reported=False, ended_by_controller=True)
    stopped = end(1, -15, reported=False, ended_by_controller=True, stack=f"{STOPPED}; continued, it wrote:\n")
    outcome = judged((None, stuck), (None, stopped))

    assert outcome.headline == "rank 1 was stopped by a signal and never reported"


def test_only_waiting_ranks_are_a_hang() -> None:
    """A rank left a collective out and finished: the one that timed out is first, the one that lost it is not."""
    outcome = judged(
        (report(0, error(CLOSED, time=1.0)), end(0, 10)),
        (report(1), end(1)),
        (report(2, error(TIMED_OUT, time=2.0)), end(2, 10)),
    )

    assert outcome.is_hang
    assert outcome.headline.startswith("rank 2 timed out in a collective")


def test_left_out_rank_keeps_its_reason() -> None:
    """A skip is not a failure; where another rank fails, it is still reported as a skip."""
    skipped = (report(0, not_run="no gloo"), end(0, 86))

    assert judged(skipped, (report(1, not_run="no gloo"), end(1, 86))).first is None
    assert judged(skipped, (report(1, error()), end(1, 10))).consequences == ("rank 0 stopped early: no gloo",)


@pytest.mark.parametrize(
    "message",
    [
        CLOSED,
        "Connection reset by peer",
        "[/gloo/transport/tcp/pair.cc] writev [127.0.0.1]:1: Broken pipe",
        "NCCL error: remote process exited or there was a network error, NCCL version 2.27.3",
        "NCCL communicator was aborted on rank 1.",
        "recvValue failed on SocketImpl(fd=12): Connection was likely closed. Did the remote server shutdown or crash?",
    ],
)
def test_messages_of_a_lost_peer(message: str) -> None:
    """The errors of gloo, NCCL and the stores about a lost peer are consequences."""
    assert kind_of_error(error(message, kind="torch.distributed.DistBackendError")) == Ending.LOST_PEER


@pytest.mark.parametrize(
    "message",
    [
        TIMED_OUT,
        "Application timeout caused pair closure",
        "wait timeout after 1000ms, keys: /default_pg/0//cpu//0/rank_1",
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3) ran for 1042 milliseconds",
    ],
)
def test_messages_of_a_timeout(message: str) -> None:
    """Their errors about a peer that does not arrive are a hang."""
    assert kind_of_error(error(message)) == Ending.TIMED_OUT


def test_same_words_in_an_exception_of_its_own() -> None:
    """Only a backend's classes are read that way."""
    assert kind_of_error(error("broken pipe in my data loader", kind="builtins.ValueError")) == Ending.RAISED
    assert kind_of_error(error("size mismatch")) == Ending.RAISED


@pytest.mark.parametrize(
    ("exit_of_rank", "note"),
    [
        (end(2, 0), None),
        (end(2, None), None),
        (end(2, -6), "rank 2 was killed by SIGABRT at shutdown, after it had reported"),
        (end(2, 3), "rank 2 exited with code 3 at shutdown, after it had reported"),
        (end(2, -9, ended_by_controller=True), "rank 2 did not shut down after it had reported and was terminated"),
    ],
)
def test_ends_after_the_report(exit_of_rank: RankExit, note: str | None) -> None:
    """A death after the report is in is a note, and no failure."""
    assert note == shutdown_note(report(2), exit_of_rank)
    assert judged((report(0), end(0)), (report(1), end(1)), (report(2), exit_of_rank)).first is None


def test_exit_after_an_error_is_no_note() -> None:
    """The exit code of a rank that raised is its error's."""
    assert shutdown_note(report(0, error()), end(0, 10)) is None
    assert shutdown_note(None, end(0, -9, reported=False)) is None


@pytest.mark.parametrize("left_out", [{"not_run": "no gloo"}, {"inconclusive": "references disagree"}])
def test_exit_of_a_rank_that_was_left_out(left_out: dict[str, Any]) -> None:
    """Any exit code is its way to leave; a signal is not."""
    reported = report(0, **left_out)

    assert [shutdown_note(reported, end(0, code)) for code in (0, 1, 86)] == [None] * 3
    assert shutdown_note(reported, end(0, -6)) == "rank 0 was killed by SIGABRT at shutdown, after it had reported"
