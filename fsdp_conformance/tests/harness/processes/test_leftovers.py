"""A case leaves nothing behind, however it ends: no process, no file, no shared memory."""

from __future__ import annotations

import itertools
import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_conformance.harness.processes import rank_process
from fsdp_conformance.harness.processes.forkserver import server_for, start_process
from fsdp_conformance.harness.processes.leftovers import remove_orphans, shared_memory
from fsdp_conformance.harness.testcase import ShardedTrainingTestCase

#: Controllers are ended and what they leave is waited for.
pytestmark = pytest.mark.slow

#: A variable by which a test knows the processes that it has caused: a forked rank shows its server's.
MARKER = "FSDP_CONFORMANCE_TEST_MARKER"

#: For waits that must end by themselves; nothing is judged by it.
PATIENCE_S = 240.0
POLL_S = 0.01
FOREVER_S = 600.0


class Messy(ShardedTrainingTestCase):
    """Two ranks that leave things lying about. Not collected."""

    __test__ = False
    case_timeout_s = 30.0

    @property
    def world_size(self) -> int:
        return 2

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def test_clean(self) -> None:
        Path(tempfile.gettempdir(), self.launch_payload or "unused").touch()

    def test_starts_a_child_and_dies(self) -> None:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(self.file_name).with_name(f"child{self.rank}").write_text(str(child.pid))
        os.kill(os.getpid(), signal.SIGKILL)

    def test_leaves_shared_memory(self) -> None:
        name = Path("/dev/shm", f"nccl-{self.launch_payload or uuid.uuid4().hex}{self.rank}")
        with name.open("wb+") as file:
            file.truncate(4096)
            mmap.mmap(file.fileno(), 4096)
        os.kill(os.getpid(), signal.SIGKILL)

    def test_waits(self) -> None:
        print("waiting", flush=True)
        time.sleep(FOREVER_S)

    def conclude(self, reports: object, exits: object) -> None:
        self.exits = exits


def processes_marked(marker: str) -> list[int]:
    """The processes that run with this marker in their environment."""
    pids = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and f"{MARKER}={marker}".encode() in (process / "environ").read_bytes():
                pids.append(int(process.name))
        except OSError:
            continue
    return pids


def wait_for(condition: object, what: str) -> None:
    """Wait until a condition holds; a deadline that passes is a failure of the test's own."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():  # type: ignore[operator]
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(POLL_S)


SCRIPT = """
import sys, unittest
from fsdp_conformance.tests.harness.processes.test_leftovers import Messy
for name in sys.argv[1:]:
    case = Messy(name)
    result = unittest.TestResult()
    case.run(result)
    print(name, len(result.errors), flush=True)
"""


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """A marker and an environment for a separate controller; nothing with the marker may outlive the test."""
    marker = uuid.uuid4().hex
    yield marker, {**os.environ, MARKER: marker, "TMPDIR": str(tmp_path)}
    for pid in processes_marked(marker):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.nightly
def test_controller_that_ends_leaves_nothing(controller: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    """After a controller's end, good and bad cases included, no process and no temporary file is left."""
    marker, environment = controller
    subprocess.run(
        [sys.executable, "-c", SCRIPT, "test_clean", "test_leaves_shared_memory", "test_clean"],
        env=environment,
        timeout=PATIENCE_S * 2,
        check=True,
    )
    wait_for(lambda: not processes_marked(marker), "the server did not end with its controller")

    assert [tmp_path / "unused"] == list(tmp_path.iterdir())


@pytest.mark.nightly
def test_killed_controller_takes_its_ranks_along(controller: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    """A controller that is killed cannot end its ranks; they notice."""
    marker, environment = controller
    before = set(processes_marked(marker))
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, "test_waits"], env=environment)
    # controller, its resource tracker, the server, two ranks
    wait_for(lambda: len(set(processes_marked(marker)) - before) >= 5, "the ranks did not start")
    process.kill()
    process.wait(PATIENCE_S)

    wait_for(lambda: not processes_marked(marker), "a rank has outlived its controller")
    # what is left is the directory of multiprocessing's own sockets
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("pymp-")] == []


#: A rank whose controller has ended: one thread removes the directory while another one leaves. The first goes on only
#: once the second is about to end the process.
LEAVING = """
import multiprocessing.util, shutil, sys, threading
from pathlib import Path
from fsdp_conformance.harness.processes import rank_process

started, leaving = threading.Event(), threading.Event()
remove = shutil.rmtree

def remove_late(path, **options):
    started.set()
    leaving.wait(60)
    remove(path, **options)

shutil.rmtree = remove_late
multiprocessing.util._exit_function = leaving.set
threading.Thread(target=rank_process.remove_directory, args=(Path(sys.argv[1]),), daemon=True).start()
started.wait(60)
if sys.argv[2] == "leaves":
    rank_process.leave(0, multiprocessing.Pipe()[0])
else:
    threading.Timer(0.0, leaving.set).start()
    rank_process.remove_directory(Path(sys.argv[1]))
    rank_process.os._exit(0)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("other", ["leaves", pytest.param("removes it, too", marks=pytest.mark.nightly)])
def test_a_removal_is_finished_before_the_process_ends(other: str, tmp_path: Path) -> None:
    """Both threads of a rank notice that the controller is gone, at about the same time."""
    directory = tmp_path / "case"
    directory.mkdir()
    for number in range(500):
        (directory / str(number)).touch()
    subprocess.run([sys.executable, "-c", LEAVING, directory, other], timeout=PATIENCE_S, check=True)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_rank_without_order_removes_the_directory(tmp_path: Path) -> None:
    """A controller may be killed between the fork of a rank and its order."""
    directory = tmp_path / "case"
    directory.mkdir()
    (directory / "store").touch()
    ours, theirs = multiprocessing.Pipe()
    process = start_process(rank_process.main, theirs, directory, server=server_for(), name="rank 0")
    theirs.close()
    ours.close()
    process.join(PATIENCE_S)

    assert process.exitcode == 0
    assert list(tmp_path.iterdir()) == []


def test_directory_goes_while_others_write_to_it(tmp_path: Path) -> None:
    """Other ranks may be creating files when the first of them notices that the controller has ended."""
    for attempt in range(20):
        directory = tmp_path / f"case{attempt}"
        directory.mkdir()
        writers = [threading.Thread(target=create_files, args=(directory, name)) for name in "ab"]
        for writer in writers:
            writer.start()
        rank_process.remove_directory(directory)
        for writer in writers:
            writer.join(PATIENCE_S)

    assert list(tmp_path.iterdir()) == []


def create_files(directory: Path, name: str) -> None:
    """Create files until the directory is gone."""
    for number in itertools.count():
        try:
            (directory / f"{name}{number}").touch()
        except FileNotFoundError:
            return


@pytest.mark.nightly
def test_interrupt_ends_the_ranks_and_removes_the_files(controller: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    """Ctrl-C reaches the controller alone; it ends its ranks and its files go."""
    marker, environment = controller
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, "test_waits"], env=environment, stderr=subprocess.PIPE, start_new_session=True
    )
    wait_for(
        lambda: any("waiting" in path.read_text() for path in tmp_path.glob("fsdp-conformance-*/rank*.output")),
        "the ranks did not start",
    )
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE_S)

    assert b"KeyboardInterrupt" in errors
    assert list(tmp_path.iterdir()) == []
    wait_for(lambda: not processes_marked(marker), "a process has outlived the interrupt")


def test_what_a_rank_has_started_ends_with_it() -> None:
    """A rank's own children are in its process group, and are ended when the rank has died."""
    case = Messy("test_starts_a_child_and_dies")
    result = unittest.TestResult()
    started: list[int] = []
    conclude = case.conclude

    def note(reports: object, exits: object) -> None:
        started.extend(int(path.read_text()) for path in Path(case.file_name).parent.glob("child*"))
        conclude(reports, exits)

    case.conclude = note  # type: ignore[method-assign]
    case.run(result)

    assert len(started) == 2
    wait_for(lambda: not any(is_running(pid) for pid in started), "a rank's child has outlived it")


def is_running(pid: int) -> bool:
    """True if a process exists and is not a zombie: init may take a while to reap one."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_directory_of_a_case_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Store, outputs, stacks and traces go with the case."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    case = Messy("test_clean")
    case.run(unittest.TestResult())

    assert [path for path in tmp_path.iterdir() if path.name != "unused" and "warm" not in path.name] == []
    assert not os.path.exists(case.file_name)


def test_shared_memory_of_a_killed_rank_is_removed() -> None:
    """The block of a rank that was killed has no owner any more, so it goes."""
    case = Messy("test_leaves_shared_memory")
    # By name: other tests, and whatever else runs on this machine, have blocks too.
    case.launch_payload = uuid.uuid4().hex
    case.run(unittest.TestResult())

    assert [end.exitcode for end in case.exits] == [-signal.SIGKILL] * 2  # type: ignore[attr-defined]
    assert not [name for name in shared_memory() if case.launch_payload in name]


def test_shared_memory_in_use_is_kept() -> None:
    """A block that any process maps is in use, regardless of its creator."""
    before = shared_memory()
    path = Path("/dev/shm", f"nccl-{uuid.uuid4().hex}")
    with path.open("wb+") as file:
        file.truncate(4096)
        block = mmap.mmap(file.fileno(), 4096)
    try:
        survived = path.name not in remove_orphans(before)
        block.close()
        remove_orphans(before)
        removed = not path.exists()  # perhaps by the end of another test's case, which looks for orphans too
    finally:
        path.unlink(missing_ok=True)

    assert (survived, removed) == (True, True)
