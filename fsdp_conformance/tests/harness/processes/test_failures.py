"""Every way in which a rank can end badly: who is named, what is folded, and that the next case runs clean."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import unittest
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import distributed

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.harness.deadlines import Deadlines
from fsdp_conformance.harness.processes import supervisor
from fsdp_conformance.harness.recording import process_group
from fsdp_conformance.harness.testcase import ShardedTrainingTestCase
from fsdp_conformance.outcome.endings import Attribution, Ending, attribute
from fsdp_conformance.outcome.records import RankExit, RankReport
from fsdp_conformance.tests.harness.started_ranks import StartedRanks

pytestmark = pytest.mark.slow

#: Long enough for anything to happen that should, and far below the deadlines: nothing is judged by it.
FOREVER_S = 600.0


class Seen(NamedTuple):
    """The state that the controller had when it concluded."""

    reports: list[RankReport | None]
    exits: list[RankExit]
    attribution: Attribution
    errors: str
    skipped: list[str]

    @property
    def endings(self) -> list[Ending]:
        return [item.ending for item in self.attribution.endings]


class Faulty(StartedRanks):
    """Three ranks, one of which misbehaves. Not collected: the tests below run its methods one by one."""

    __test__ = False
    case_timeout_s = 40.0
    culprit = 1

    @property
    def world_size(self) -> int:
        return 3

    def test_what_set_up_says_counts(self) -> None:
        groups = [distributed.distributed_c10d._get_default_group(), distributed.new_group([0, 1, 2])]
        backends = [group._get_backend(torch.device("cpu")) for group in groups]
        self.report.measurements["timeouts"] = [each.options._timeout.total_seconds() for each in backends]
        self.report.measurements["device"] = self.device_type

    def all_reduce(self) -> torch.Tensor:
        tensor = torch.ones(3)
        distributed.all_reduce(tensor)
        return tensor

    def all_reduce_max(self, value: float) -> float:
        tensor = torch.tensor(value)
        distributed.all_reduce(tensor, distributed.ReduceOp.MAX)
        return tensor.item()

    def test_clean(self) -> None:
        self.assertEqual(self.all_reduce(), torch.full((3,), 3.0))

    def test_raises(self) -> None:
        if self.rank == self.culprit:
            raise ValueError("expected 4 elements in shard 1, got 3")
        self.all_reduce()

    def test_raises_everywhere(self) -> None:
        raise ValueError(f"rank {self.rank}")

    def test_sigkill(self) -> None:
        if self.rank == self.culprit:
            os.kill(os.getpid(), signal.SIGKILL)
        self.all_reduce()

    def test_segfault(self) -> None:
        if self.rank == self.culprit:
            ctypes.string_at(0)
        self.all_reduce()

    def test_exits_zero(self) -> None:
        if self.rank == self.culprit:
            sys.exit(0)
        self.all_reduce()

    def test_exits_at_once(self) -> None:
        if self.rank == self.culprit:
            os._exit(3)
        self.all_reduce()

    def test_last_rank_dies(self) -> None:
        """The others do not communicate, so only the exit code tells."""
        if self.rank == 2:
            os._exit(5)

    def test_dies_at_shutdown(self) -> None:
        self.all_reduce()

    def shutdown_rank(self) -> None:
        super().shutdown_rank()
        if self._testMethodName == "test_dies_at_shutdown" and self.rank == self.culprit:
            os.kill(os.getpid(), signal.SIGABRT)
        if self._testMethodName == "test_raises_at_shutdown" and self.rank == self.culprit:
            raise RuntimeError("could not shut down")

    def test_raises_at_shutdown(self) -> None:
        self.all_reduce()

    def test_skips_everywhere(self) -> None:
        raise unittest.SkipTest("no such device")

    def test_speaks(self) -> None:
        print("to stdout")
        print("to stderr", file=sys.stderr)
        raise ValueError("after speaking")


class Hanging(Faulty):
    """Short deadlines, for the cases in which one of them must pass."""

    case_timeout_s = 20.0
    rank_timeout_s = 5.0
    collective_timeout_s = 2.0

    def init_rank(self) -> None:
        """With collectives that are noted, as in a case."""
        ShardedTrainingTestCase.init_rank(self)
        process_group.register_recording_backend(self.device_type)
        self.start_process_group(process_group.BACKEND)

    @property
    def deadlines(self) -> Deadlines:
        return replace(super().deadlines, grace_s=1.0, shutdown_s=1.5)

    def test_leaves_a_collective_out(self) -> None:
        if self.rank != self.culprit:
            self.all_reduce()

    def test_sleeps(self) -> None:
        if self.rank == self.culprit:
            time.sleep(FOREVER_S)
        self.all_reduce()

    def test_is_slow(self) -> None:
        """Past the rank's deadline, and never long without a collective."""
        end = time.monotonic() + 1.4 * self.rank_timeout_s
        while self.all_reduce_max(float(time.monotonic() < end)):
            pass

    def test_goes_round_for_ever(self) -> None:
        while self.all_reduce_max(1.0):
            pass

    def test_all_sleep(self) -> None:
        time.sleep(FOREVER_S)

    def test_is_stopped(self) -> None:
        if self.rank == self.culprit:
            os.kill(os.getpid(), signal.SIGSTOP)
        self.all_reduce()

    def test_all_are_stopped(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def test_holds_the_interpreter(self) -> None:
        """A C function that never returns and keeps the interpreter's lock."""
        if self.rank == self.culprit:
            ctypes.PyDLL(None).sleep(int(FOREVER_S))
        self.all_reduce()

    def test_ignores_sigterm(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(FOREVER_S)

    def test_does_not_shut_down(self) -> None:
        self.all_reduce()

    def shutdown_rank(self) -> None:
        super().shutdown_rank()
        if self._testMethodName == "test_does_not_shut_down" and self.rank == self.culprit:
            time.sleep(FOREVER_S)


def run(cls: type[Faulty], method: str) -> Seen:
    """Run one method, and return what the controller saw."""
    case = cls(method)
    result = unittest.TestResult()
    case.run(result)
    reports, exits = case.seen
    texts = [text for _, text in [*result.errors, *result.failures]]
    return Seen(reports, exits, attribute(reports, exits), "\n".join(texts), [reason for _, reason in result.skipped])


def assert_next_case_is_clean() -> None:
    """A case right after a failed one passes on every rank."""
    seen = run(Faulty, "test_clean")

    assert seen.endings == [Ending.FINISHED] * 3
    assert not seen.errors


def test_clean_case_reports_every_rank() -> None:
    """Each rank reports, ends with exit code 0, and says what was set in it."""
    seen = run(Faulty, "test_clean")

    assert [report.rank for report in seen.reports if report is not None] == [0, 1, 2]
    assert [(end.exitcode, end.reported, end.ended_by_controller) for end in seen.exits] == [(0, True, False)] * 3
    assert (seen.attribution.first, seen.attribution.notes) == (None, ())
    report = seen.reports[2]
    assert report is not None
    assert {"RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "3"}.items() <= report.environment["variables"].items()
    assert tuple(report.environment[key] for key in ("start", "seed", "num_threads", "deterministic_algorithms")) == (
        "forkserver",
        20261121,
        1,
        "warn",
    )


def test_rank_that_raises_is_named_and_peers_are_consequences() -> None:
    """The rank that raised is the headline; "connection closed by peer" on the others is folded."""
    seen = run(Faulty, "test_raises")

    assert seen.endings == [Ending.LOST_PEER, Ending.RAISED, Ending.LOST_PEER]
    assert seen.attribution.headline == "rank 1 raised ValueError: expected 4 elements in shard 1, got 3"
    assert [end.exitcode for end in seen.exits] == [10, 10, 10]
    assert len(seen.attribution.consequences) == 2
    # the text begins with the headline, and keeps the line that tests of torch's harness look for
    assert "RuntimeError: rank 1 raised ValueError" in seen.errors
    assert "Process 1 exited with error code 10 and exception:" in seen.errors
    assert_next_case_is_clean()


def test_error_on_every_rank_is_collected_from_every_rank() -> None:
    """No rank's own exception is lost because another was first."""
    seen = run(Faulty, "test_raises_everywhere")

    assert seen.endings == [Ending.RAISED] * 3
    assert [report.error.message for report in seen.reports if report and report.error] == [
        "rank 0",
        "rank 1",
        "rank 2",
    ]


def test_killed_rank_is_named_by_its_signal() -> None:
    """A rank that dies of SIGKILL is the first failure, although its peers notice before the controller does."""
    seen = run(Faulty, "test_sigkill")

    assert seen.attribution.headline == "rank 1 was killed by SIGKILL before it reported"
    assert (seen.exits[1].exitcode, seen.exits[1].reported, seen.exits[1].ended_by_controller) == (-9, False, False)
    assert_next_case_is_clean()


def test_segfault_leaves_its_python_stack() -> None:
    """A rank that dies of a segmentation fault or the like reports where in Python it was."""
    seen = run(Faulty, "test_segfault")

    assert seen.attribution.headline == "rank 1 was killed by SIGSEGV before it reported"
    assert "in test_segfault" in (seen.exits[1].stack or "")
    assert_next_case_is_clean()


@pytest.mark.parametrize(("method", "code"), [("test_exits_zero", 0), ("test_exits_at_once", 3)])
def test_early_exit_is_a_failure(method: str, code: int) -> None:
    """A rank that leaves before its report has failed, with exit code 0 too."""
    seen = run(Faulty, method)

    assert (code, False) == (seen.exits[1].exitcode, seen.exits[1].reported)
    assert f"rank 1 exited with code {code} before it reported" == seen.attribution.headline
    assert seen.errors
    assert_next_case_is_clean()


def test_exit_of_the_last_rank_counts() -> None:
    """Torch's harness looks at rank 0 alone; here each rank counts."""
    seen = run(Faulty, "test_last_rank_dies")

    assert seen.endings[2] == Ending.EXITED
    # A peer that is still connecting when rank 2 dies loses it; one that is through does not notice.
    assert set(seen.endings[:2]) <= {Ending.FINISHED, Ending.LOST_PEER}
    assert seen.attribution.headline == "rank 2 exited with code 5 before it reported"


def test_rank_that_leaves_a_collective_out_is_a_hang() -> None:
    """Its peers time out in the collective; no rank is stuck, and no rank has another failure."""
    seen = run(Hanging, "test_leaves_a_collective_out")

    assert seen.endings[1] == Ending.FINISHED
    assert Ending.TIMED_OUT in (seen.endings[0], seen.endings[2])
    assert {seen.endings[0], seen.endings[2]} <= {Ending.TIMED_OUT, Ending.LOST_PEER}
    assert seen.attribution.is_hang
    assert "timed out in a collective" in seen.attribution.headline
    assert_next_case_is_clean()


@pytest.mark.nightly
def test_sleeping_rank_is_found_with_its_stack() -> None:
    """The rank that did not come is the headline, not those that waited for it; its stack says where it was."""
    seen = run(Hanging, "test_sleeps")

    assert seen.endings[1] == Ending.STUCK
    assert seen.attribution.is_hang
    assert seen.attribution.headline == "rank 1 did not report in time and was terminated"
    assert "in test_sleeps" in (seen.exits[1].stack or "")
    assert "_end_with" not in (seen.exits[1].stack or "")
    assert seen.exits[1].ended_by_controller
    assert_next_case_is_clean()


@pytest.mark.nightly
def test_ranks_that_are_slow_are_not_stuck() -> None:
    """A case may take longer on a busy machine without being reported as stuck."""
    seen = run(Hanging, "test_is_slow")

    assert seen.endings == [Ending.FINISHED] * 3


@pytest.mark.nightly
def test_collectives_for_ever_are_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that get on, and nowhere, are ended in the end."""
    monkeypatch.setattr(supervisor, "MOST_TIMES", 1.5)

    seen = run(Hanging, "test_goes_round_for_ever")

    assert Ending.STUCK in seen.endings
    assert seen.attribution.is_hang
    assert_next_case_is_clean()


def test_all_ranks_past_their_deadline_give_their_stacks() -> None:
    """On expiry every rank's stack is collected."""
    seen = run(Hanging, "test_all_sleep")

    assert seen.endings == [Ending.STUCK] * 3
    assert all("in test_all_sleep" in (end.stack or "") for end in seen.exits)
    assert_next_case_is_clean()


@pytest.mark.nightly
def test_stopped_rank_is_said_to_be_stopped() -> None:
    """A rank in state T cannot answer; it is named as stopped, continued for its stack, and ended."""
    seen = run(Hanging, "test_is_stopped")

    assert seen.endings[1] == Ending.STOPPED
    assert seen.attribution.headline == "rank 1 was stopped by a signal and never reported"
    assert "in test_is_stopped" in (seen.exits[1].stack or "")
    assert_next_case_is_clean()


@pytest.mark.nightly
def test_all_ranks_stopped() -> None:
    """The run goes on when no rank can answer."""
    seen = run(Hanging, "test_all_are_stopped")

    assert seen.endings == [Ending.STOPPED] * 3
    assert_next_case_is_clean()


@pytest.mark.nightly
def test_rank_that_holds_the_interpreter_gives_its_stack() -> None:
    """The stack is written by a signal handler in C, so the interpreter's lock is not needed."""
    seen = run(Hanging, "test_holds_the_interpreter")

    assert seen.endings[1] == Ending.STUCK
    assert "in test_holds_the_interpreter" in (seen.exits[1].stack or "")


@pytest.mark.nightly
def test_rank_that_ignores_sigterm_is_killed() -> None:
    """SIGKILL follows SIGTERM."""
    seen = run(Hanging, "test_ignores_sigterm")

    assert [end.exitcode for end in seen.exits] == [-signal.SIGKILL] * 3


def test_death_at_shutdown_is_said_and_is_no_failure() -> None:
    """After the report is in, a signal is a note: neither a silent pass nor a failure of the case."""
    with pytest.warns(UserWarning, match="rank 1 was killed by SIGABRT at shutdown, after it had reported"):
        seen = run(Faulty, "test_dies_at_shutdown")

    assert seen.endings == [Ending.FINISHED] * 3
    assert (seen.exits[1].exitcode, seen.exits[1].reported) == (-signal.SIGABRT, True)
    assert seen.attribution.notes == ("rank 1 was killed by SIGABRT at shutdown, after it had reported",)
    assert not seen.errors


def test_exception_at_shutdown_is_said() -> None:
    """An exception after the report is in is kept in the rank's output."""
    with pytest.warns(UserWarning, match="rank 1 exited with code 11 at shutdown"):
        seen = run(Faulty, "test_raises_at_shutdown")

    assert "could not shut down" in seen.exits[1].output
    assert not seen.errors


def test_rank_that_does_not_shut_down_is_ended() -> None:
    """A rank that hangs after its report is ended at the case's deadline, and said."""
    with pytest.warns(UserWarning, match="rank 1 did not shut down after it had reported and was terminated"):
        seen = run(Hanging, "test_does_not_shut_down")

    assert seen.endings == [Ending.FINISHED] * 3
    assert (seen.exits[1].reported, seen.exits[1].ended_by_controller) == (True, True)
    assert "in shutdown_rank" in (seen.exits[1].stack or "")
    assert_next_case_is_clean()


def test_skip_in_the_ranks_keeps_its_reason() -> None:
    """A SkipTest raised in the ranks is one in the controller, with its own words."""
    seen = run(Faulty, "test_skips_everywhere")

    assert seen.skipped == ["no such device"]
    assert [end.exitcode for end in seen.exits] == [86, 86, 86]


def test_output_of_the_ranks_is_in_the_failure() -> None:
    """The output of a rank is stored and shown with the failure of its case."""
    seen = run(Faulty, "test_speaks")

    assert all("to stdout\nto stderr\n" in end.output for end in seen.exits)
    assert "Output of rank 2 ends with" in seen.errors


def test_deadline_of_the_controller_is_the_groups() -> None:
    """It reaches the ranks' groups, including those without their own timeout, though only one instance knows it."""
    case = Faulty("test_what_set_up_says_counts")
    case.collective_timeout_s = 17.0
    case.run(unittest.TestResult())

    assert [report.measurements["timeouts"] for report in case.seen[0]] == [[17.0, 17.0]] * 3
    assert [report.measurements["device"] for report in case.seen[0]] == ["cpu"] * 3


def test_deadlines_that_do_not_nest_start_nothing() -> None:
    """A collective that may outlast its rank is refused before any rank is started."""
    case = Faulty("test_clean")
    case.collective_timeout_s = 100.0
    result = unittest.TestResult()
    case.run(result)

    assert "collective_s must be less than rank_s=34.0, got 100.0" in result.errors[0][1]
    assert ConfigError.__name__ in result.errors[0][1]
    assert case.processes == []
