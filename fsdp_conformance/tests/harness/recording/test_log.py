"""The log of collectives: labels, call sites, and the file that a controller reads when a rank is stuck or dead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import typing_extensions
from torch.distributed import ProcessGroup

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.harness.context import log
from fsdp_conformance.harness.recording.call_site import call_site
from fsdp_conformance.harness.recording.collective_log import CollectiveLog, CollectiveObserver, Traffic
from fsdp_conformance.harness.recording.collective_trace import KEPT_LINES, LINE_BYTES, CollectiveTrace, read_trace
from fsdp_conformance.harness.recording.process_group import BACKEND, register_recording_backend
from fsdp_conformance.harness.testcase import ShardedTrainingTestCase
from fsdp_conformance.history.collective import CollectiveRecord, Op
from fsdp_conformance.outcome.records import RankExit, RankReport

#: For waits that end by themselves; nothing is judged by it.
PATIENCE_S = 240.0


def _traffic(op: Op = Op.ALL_GATHER) -> Traffic:
    return Traffic(op=op, inputs=(), outputs=(), nbytes=24, dtype="float32", device="cpu", reduce_op="", num_tensors=1)


def _record(seq: int, group: tuple[int, ...] = (0, 1)) -> CollectiveRecord:
    return CollectiveRecord(
        seq=seq,
        op=Op.ALL_GATHER,
        name="allgather",
        group=group,
        nbytes=24,
        dtype="float32",
        site="unit.py:7 in unshard",
    )


class _Work:
    """Something that can be referred to weakly."""


def test_phases_nest() -> None:
    """The innermost phase labels; a phase without step has the outer one's; an exception, too, restores the outer."""
    notes = CollectiveLog()
    with notes.phase("step", 3):
        with notes.phase("observe"):
            notes.note("allgather", (0,), _traffic())
        with suppress(KeyError), notes.phase("backward", 4):
            notes.note("allgather", (0,), _traffic())
            raise KeyError
        notes.note("allgather", (0,), _traffic())
    notes.note("allgather", (0,), _traffic())

    assert [(r.phase, r.step) for r in notes.records] == [("observe", 3), ("backward", 4), ("step", 3), ("", None)]


def test_clear_forgets_records_alone() -> None:
    """After clear() the numbers go on: a number names one collective of the rank."""
    notes = CollectiveLog()
    notes.observers.append(CollectiveObserver())
    notes.note("allgather", (0, 1), _traffic())
    notes.clear()
    notes.note("allgather", (0, 1), _traffic())

    assert [record.seq for record in notes.records] == [1]
    assert notes.schedule() == ["all_gather 24B float32 [0,1]"]
    assert len(notes.observers) == 1


def test_call_site_is_the_callers_line() -> None:
    """The site is the innermost frame outside torch and the harness, seen through both."""
    line = sys._getframe().f_lineno + 2
    notes = CollectiveLog()
    record = torch.no_grad()(lambda: notes.note("allgather", (0,), _traffic()))()

    assert f"test_log.py:{line} in <lambda>" == record.site
    assert "test_call_site_is_the_callers_line" in call_site()


def test_call_site_behind_a_deprecation() -> None:
    """A line in the wrapper of a deprecated function is never reported."""
    namespace = {"call_site": call_site}
    code = compile(  # as if it were a line of that file
        "found = call_site()", typing_extensions.__file__, "exec"
    )
    exec(code, namespace)

    assert "typing_extensions" not in str(namespace["found"])


def test_trace_tells_issued_from_closed(tmp_path: Path) -> None:
    """A collective is in the file before it can block; its state changes when the caller lets go of the Work."""
    trace = CollectiveTrace(tmp_path / "trace")
    first, second, third = (_Work() for _ in range(3))
    for seq, work in enumerate((first, second, third)):
        trace.issued(_record(seq))
        trace.follow(_record(seq), work)
    trace.issued(_record(3))
    trace.follow(_record(3), None)
    trace.issued(_record(4))
    del second

    assert read_trace(tmp_path / "trace") == [
        "#0 issued all_gather 24B float32 [0,1] at unit.py:7 in unshard",
        "#1 closed all_gather 24B float32 [0,1] at unit.py:7 in unshard",
        "#2 issued all_gather 24B float32 [0,1] at unit.py:7 in unshard",
        "#3 closed all_gather 24B float32 [0,1] at unit.py:7 in unshard",
        "#4 issued all_gather 24B float32 [0,1] at unit.py:7 in unshard",
    ]
    trace.close()
    del first, third
    trace.issued(_record(5))

    assert len(read_trace(tmp_path / "trace")) == 5


class _Mark:
    """An event that the device passes when the test tells it to."""

    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed


def test_trace_is_closed_by_the_device(tmp_path: Path) -> None:
    """Where a wait returns at once, a line is closed when the device has come so far, whichever came first."""
    marks: list[_Mark] = []

    def mark() -> _Mark:
        marks.append(_Mark())
        return marks[-1]

    trace = CollectiveTrace(tmp_path / "trace", mark)
    for seq in range(3):
        trace.issued(_record(seq))
        trace.follow(_record(seq), _Work())
    states = [line.split()[1] for line in read_trace(tmp_path / "trace")]
    # Released, like a Work of NCCL after its wait: the device is not there yet.
    assert (states, len(marks)) == (["issued"] * 3, 3)

    marks[1].passed = True
    until = time.monotonic() + PATIENCE_S
    while "closed" not in states and time.monotonic() < until:
        states = [line.split()[1] for line in read_trace(tmp_path / "trace")]
    trace.close()

    assert states == ["issued", "closed", "issued"]
    assert "collective trace" not in {thread.name for thread in _ended(until)}


def test_trace_of_a_device_that_failed(tmp_path: Path) -> None:
    """A collective that cannot be marked remains issued, and the caller gets the error."""

    def fail() -> _Mark:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    trace = CollectiveTrace(tmp_path / "trace", fail)
    trace.issued(_record(0))
    trace.follow(_record(0), None)
    trace.close()

    assert [line.split()[1] for line in read_trace(tmp_path / "trace")] == ["issued"]


def _ended(until: float) -> list[threading.Thread]:
    """The threads that live once those of traces have ended."""
    for thread in threading.enumerate():
        if thread.name == "collective trace":
            thread.join(max(0.0, until - time.monotonic()))
    return threading.enumerate()


def test_trace_stays_small_and_whole(tmp_path: Path) -> None:
    """However many collectives there were, the file ends with the newest, in order, each with its own state."""
    path = tmp_path / "trace"
    trace = CollectiveTrace(path)
    works = {}
    for seq in range(10 * KEPT_LINES + 7):
        trace.issued(_record(seq))
        works[seq] = _Work()
        trace.follow(_record(seq), works[seq])
        works.pop(seq - 3, None)
        lines = path.read_text().splitlines()
        assert [f"#{number}" for number in range(max(0, seq - 2), seq + 1)] == [line.split()[0] for line in lines][-3:]
        assert min(seq + 1, KEPT_LINES) <= len(lines) <= 2 * KEPT_LINES
    states = [line.split()[1] for line in read_trace(path)]
    trace.close()

    assert len(states) == KEPT_LINES
    assert states == ["closed"] * (KEPT_LINES - 3) + ["issued"] * 3
    assert path.stat().st_size <= 2 * KEPT_LINES * LINE_BYTES


def test_trace_line_of_a_large_group(tmp_path: Path) -> None:
    """A group of many ranks is cut short, so that the call site stays on the line."""
    trace = CollectiveTrace(tmp_path / "trace")
    trace.issued(_record(0, group=tuple(range(1024))))
    trace.close()

    assert read_trace(tmp_path / "trace") == [
        "#0 issued all_gather 24B float32 [0,1,..,1023: 1024 ranks] at unit.py:7 in unshard"
    ]


def test_trace_that_is_not_there(tmp_path: Path) -> None:
    """A rank that issued nothing has no lines; a trace that cannot be written is refused, with its name."""
    assert read_trace(tmp_path / "none") == []

    with pytest.raises(ConfigError, match=r"path must be a writable file, got '.*/none/trace'"):
        CollectiveTrace(tmp_path / "none" / "trace")


def test_reading_a_trace_takes_no_torch() -> None:
    """The controller's reader is standard library only."""
    code = "import sys, fsdp_conformance.harness.recording.collective_trace; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class KillsItself(CollectiveObserver):
    """Ends the process before its third collective."""

    def before(self, record: CollectiveRecord, group: ProcessGroup) -> None:
        """As a machine that fails would, with nothing flushed or unwound."""
        if record.seq == 2:
            os.kill(os.getpid(), signal.SIGKILL)


class TraceOfADeadRank(ShardedTrainingTestCase):
    """The controller's view of ranks that cannot speak any more."""

    world_size = 2

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def conclude(self, reports: Sequence[RankReport | None], exits: Sequence[RankExit]) -> None:
        """The killed rank's last line is the collective that it did not survive; its peer waits for the same one."""
        self.assertEqual(-signal.SIGKILL, exits[1].exitcode)
        for end, states in ((exits[0], {"issued", "closed"}), (exits[1], {"issued"})):
            last = end.last_collectives[-1].split()
            self.assertEqual(["#2", "all_reduce", "8B", "float32", "SUM", "[0,1]", "at"], [last[0], *last[2:8]])
            self.assertIn(last[1], states)
            self.assertTrue(end.last_collectives[-1].endswith("in test_killed_in_a_collective (forward, step 1)"))

    @pytest.mark.nightly
    def test_killed_in_a_collective(self) -> None:
        """Rank 1 dies at its third collective."""
        register_recording_backend()
        self.start_process_group(BACKEND)
        if self.rank == 1:
            log().observers.append(KillsItself())
        for step in (0, 0, 1):
            with log().phase("forward", step):
                dist.all_reduce(torch.ones(2))
