"""Where processes are when the time of their command is over."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fsdp_conformance.recordings import stacks

#: The process may be asked before it reads: that is one line with what it says before.
_PROGRAM = """
import sys
import threading
from pathlib import Path
from fsdp_conformance.recordings.stacks import announce

def train():
    announce(Path(sys.argv[1]), sys.argv[2])
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    print("ready", flush=True); sys.stdin.read()

train()
"""

Start = Callable[[str], int]


@pytest.fixture(name="start")
def _start(tmp_path: Path) -> Iterator[Start]:
    """Start a process that waits, with a number of a rank; returns its pid."""
    program = tmp_path / "wait.py"
    program.write_text(_PROGRAM, encoding="utf-8")
    processes: list[subprocess.Popen[str]] = []

    def start(rank: str) -> int:
        command = [sys.executable, str(program), str(tmp_path / "out"), rank]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process.pid

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_each_rank_says_where_it_is(start: Start, tmp_path: Path) -> None:
    """The innermost frame and those of the program, not of other threads; a launcher is left out."""
    second, launcher, first = start("1"), start(""), start("0")

    lines = stacks.collect(tmp_path / "out", {first, launcher, second})

    place = f"  {tmp_path / 'wait.py'}"
    where = [f"{place}:10 in train", f"{place}:12 in <module>"]
    assert lines == [
        f"rank 0 (process {first}) is at, innermost first:",
        *where,
        f"rank 1 (process {second}) is at, innermost first:",
        *where,
    ]


def test_a_single_process_needs_no_rank(start: Start, tmp_path: Path) -> None:
    pid = start("")

    assert stacks.collect(tmp_path / "out", {pid})[0] == f"process {pid} is at, innermost first:"


def test_only_the_processes_of_the_command_are_asked(start: Start, tmp_path: Path) -> None:
    """A file that names another process sends that no signal, and one that has ended is no error."""
    start("0")
    (tmp_path / "out/stack.1.1").touch()

    assert stacks.collect(tmp_path / "out", {1 << 22}) == []


def test_nothing_is_left_in_the_recording(start: Start, tmp_path: Path) -> None:
    start("0")
    (tmp_path / "out/stack.notes").touch()

    stacks.remove(tmp_path / "out")

    assert [path.name for path in (tmp_path / "out").iterdir()] == ["stack.notes"]
