"""
Launches a training script on N ranks, like torchrun on one machine. The ranks are forked from a warm process and
supervised like those of a test case.

Each rank gets the environment variables that torchrun sets. For the rendezvous, rank 0 serves a TCP store on
MASTER_PORT, as with torchrun's static rendezvous; the controller reserves the port until then. A rank that exits early,
hangs or dies is reported as in a test case, and no process outlives the controller.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from fsdp_conformance.harness.deadlines import Deadlines
from fsdp_conformance.harness.processes.forkserver import STOP_TIMEOUT_S, WarmServer
from fsdp_conformance.simulator.collectives.calls import Call, logs_of
from fsdp_conformance.simulator.device import SIMULATED
from fsdp_conformance.simulator.sanitize.order import ChildrenOfRank, ScriptOrder

#: The modules that the warm process imports for the ranks: those that training scripts use, and those that torch
#: imports lazily (dynamo, at the first optimizer step). Not torch's test harness, which changes the process's settings.
PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.device_mesh",
    "torch.distributed.checkpoint",
    "torch.nn.parallel",
    "torch.utils.data",
    "torch._dynamo",
    "numpy.random",
    "fsdp_conformance.script_ranks.rank",
)

#: In addition, for a script that uses "cuda".
_PRELOAD_AS_CUDA = "fsdp_conformance.simulator.as_cuda.translation"

#: Suffix of the file in which a rank saves its observations so far, in case it never sends a report.
OBSERVED_SUFFIX = ".observed"

#: Seconds after the ranks' deadline for collecting stacks and ending the processes.
_END_S = 30.0

#: Seconds between two reads of what the ranks have printed.
_LOOK_S = 0.1

#: Receives the rank and a line that the script printed; called in a separate thread.
Say = Callable[[int, str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptPayload:
    """The part of a rank's order that the harness does not know."""

    order: ScriptOrder
    port: int
    """The port of the store that rank 0 serves."""
    run_id: str
    own_path_entry: str | None
    """The entry of sys.path that the script's directory replaces."""
    children: tuple[ChildrenOfRank, ...]
    """One for each rank; empty if processes that ranks start are not observed."""


class ScriptLaunch:
    """
    The ranks of a script. A context manager: when the block ends, so have all ranks.

    `start` and `wait` are separate so that the warm process and the controller import torch at the same time. An
    exception in the block (Ctrl-C) ends every rank. `server` is a warm process that several launches share; without one
    the launch has its own.
    """

    def __init__(self, order: ScriptOrder, say: Say, server: WarmServer | None = None) -> None:
        self.order = order
        self.observed: list[dict[str, Any] | None] = [None] * order.world_size
        """The observations of each rank: from its report, or those it had saved when it ended."""
        self.calls: list[list[Call]] = [[] for _ in range(order.world_size)]
        """The collectives that each rank has called."""
        self.run_id = str(uuid.uuid4())
        self._say = say
        self._before_files_go: Callable[[], object] = lambda: None
        self._owns_server = server is None
        self._server = server or warm_server(as_cuda=order.as_cuda)
        self._resources = contextlib.ExitStack()
        self._followers: list[_Follower] = []
        self._supervisor: Any = None
        self._orders: list[Any] = []

    def __enter__(self) -> ScriptLaunch:
        if self._owns_server:
            self._resources.callback(end_server, self._server)
        try:
            self._server.ensure_running()
        except BaseException:
            self._resources.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()

    @functools.cached_property
    def directory(self) -> Path:
        """
        The ranks' files, until the block ends; if this process dies, the ranks remove them.

        Use it right before `start`: without ranks, the files would stay.
        """
        return Path(
            self._resources.enter_context(
                tempfile.TemporaryDirectory(prefix="fsdp-conformance-", ignore_cleanup_errors=True)
            )
        )

    def start(
        self, children: Sequence[ChildrenOfRank] = (), *, before_files_go: Callable[[], object] = lambda: None
    ) -> None:
        """
        Fork the ranks. `children` is, for each rank, the setup of the processes that it starts.

        `before_files_go` is called when all processes have ended and their files are still there. Raises
        EnvironmentUnavailable if the warm process cannot start.
        """
        # These import torch, which the warm process does at the same time.
        from fsdp_conformance.harness.processes import rank_process
        from fsdp_conformance.harness.processes.launcher import take_seats
        from fsdp_conformance.harness.processes.leftovers import remove_orphans, shared_memory
        from fsdp_conformance.harness.processes.rank_set import fork_ranks
        from fsdp_conformance.harness.processes.supervisor import Supervisor

        self._resources.callback(remove_orphans, shared_memory())
        directory = self.directory
        self._before_files_go = before_files_go
        port = self._resources.enter_context(held_port())
        payload = ScriptPayload(
            order=self.order,
            port=port,
            run_id=self.run_id,
            own_path_entry=_own_path_entry(),
            children=tuple(children),
        )
        self._orders = _case_order(payload, directory).for_ranks({})
        members = fork_ranks(rank_process.main, len(self._orders), self._server, directory)
        seats = take_seats(self._orders, members)
        self._supervisor = Supervisor(seats, deadlines_of(self.order))
        self._resources.callback(self._close)
        self._followers = [_Follower(order.rank, Path(order.files.output), self._say) for order in self._orders]

    def pid(self) -> int | None:
        """The process of the rank that has the terminal; None if there is none (yet)."""
        rank = self.order.foreground
        return self._supervisor.seats[rank].pid if rank is not None and self._supervisor is not None else None

    def wait(self) -> tuple[list[Any], list[Any]]:
        """Wait for all ranks; returns the RankReport (None if it sent none) and the RankExit of each."""
        self._supervisor.run()
        return self._supervisor.reports(), self._supervisor.exits()

    def _close(self) -> None:
        """End the remaining processes, pass on the last output, and read the observations."""
        self._supervisor.kill()
        for seat in self._supervisor.seats:
            seat.mailbox.connection.close()
        for follower in self._followers:
            follower.stop()
        for index, (order, report) in enumerate(zip(self._orders, self._supervisor.reports(), strict=True)):
            observed = report.measurements.get("observed") if report is not None else None
            self.observed[index] = observed or _written(Path(order.files.output).with_suffix(OBSERVED_SUFFIX))
        self._before_files_go()
        if self._orders:
            self.calls = logs_of(self._orders[0].case.directory, self.order.world_size)


def deadlines_of(order: ScriptOrder) -> Deadlines:
    """A stuck collective times out before its rank is ended, so that it is reported."""
    limit_s = order.timeout_s
    return Deadlines(collective_s=0.75 * limit_s, rank_s=limit_s, case_s=limit_s + _END_S)


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """
    A TCP port of this machine that no other process gets during the block, but that a child can listen on.

    Two sockets can be bound to one port if both allow it and neither listens yet. TCP stores allow it, and other
    servers that ask for any free port get a different one.
    """
    with socket.socket(socket.AF_INET) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        yield int(held.getsockname()[1])


def _case_order(payload: ScriptPayload, directory: Path) -> Any:
    """The order in the harness's words."""
    from fsdp_conformance.harness.environment import Determinism
    from fsdp_conformance.harness.order import CaseOrder, Debugged, packed

    order = payload.order
    return CaseOrder(
        module="fsdp_conformance.script_ranks.rank",
        qualname="ScriptRank",
        test_name=order.target,
        file_name=str(directory / "store"),
        directory=directory,
        world_size=order.world_size,
        device_type="cuda" if order.on_gpus else SIMULATED,
        deadlines=deadlines_of(order),
        # One thread, as with torchrun, unless the user sets another number.
        determinism=Determinism(num_threads=_num_threads(), algorithms="off"),
        variables={"FSDP_CONFORMANCE_SIM_DEVICES": str(order.num_devices)},
        payload=packed(payload),
        debugged=Debugged(rank=order.foreground) if order.foreground is not None else None,
    )


def _num_threads() -> int:
    word = os.environ.get("OMP_NUM_THREADS", "")
    return int(word) if word.isdecimal() and int(word) > 0 else 1


def _own_path_entry() -> str | None:
    """The entry of sys.path for this program's own start, which the script's directory replaces."""
    if sys.flags.safe_path or not sys.path:
        return None
    entry = sys.path[0] or os.getcwd()
    # Keep it if this is a checkout that is not installed: the ranks need it to find this package.
    own = Path(__file__).resolve().parents[2]
    return None if Path(entry).resolve() == own and "site-packages" not in own.parts else entry


def _written(path: Path) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the rank had not got that far
        return None
    return content


def warm_server(*, as_cuda: bool) -> WarmServer:
    """A warm process for scripts. `end_server` ends it."""
    return WarmServer((*PRELOAD, *([_PRELOAD_AS_CUDA] if as_cuda else [])), {})


def end_server(server: WarmServer) -> None:
    """End a warm process: at once if it has no ranks, else when they have ended."""
    server.retire()
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while not server.reap():
        if time.monotonic() > deadline:
            server.kill()
            return
        time.sleep(0.005)


class _Follower:
    """Passes on what a rank prints, line by line."""

    def __init__(self, rank: int, path: Path, say: Say) -> None:
        self._rank = rank
        self._say = say
        self._file: IO[bytes] = path.open("rb")
        self._rest = b""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"output of rank {rank}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Pass on the rest, including an unterminated last line."""
        self._over.set()
        self._thread.join()
        if self._rest:
            self._say(self._rank, _shown(self._rest))
        self._file.close()

    def _follow(self) -> None:
        over = False
        while not over:
            over = self._over.wait(_LOOK_S)
            *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
            for line in lines:
                self._say(self._rank, _shown(line))


def _shown(line: bytes) -> str:
    """The part of a line that a terminal would show: the text after the last carriage return."""
    return line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
