"""
A rank that runs a training script on the simulated accelerator, under the race checker.

It runs the script as `python script.py` (or `python -m module`) would: as `__main__`, with its own sys.argv, with the
script's directory first on sys.path, in the current directory. After the script, its threads and its exit functions
have ended, the rank reports its observations and waits until every other rank has reported. So rank 0's store exists as
long as any rank needs it.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import multiprocessing
import os
import runpy
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, cast

from fsdp_conformance.errors import EnvironmentUnavailable
from fsdp_conformance.harness import rank as harness_rank
from fsdp_conformance.harness.context import log, running
from fsdp_conformance.harness.recording.collective_log import CollectiveObserver
from fsdp_conformance.harness.recording.process_group import register_recording_backend
from fsdp_conformance.outcome.records import RankError
from fsdp_conformance.simulator import observe
from fsdp_conformance.simulator.agreement import Agreement, CollectiveMismatch
from fsdp_conformance.simulator.forked import report_forks
from fsdp_conformance.simulator.labels import caller_of_backward
from fsdp_conformance.simulator.launch import OBSERVED_SUFFIX, ScriptOrder, ScriptPayload, torchrun_variables

#: Seconds between two saves of the observations, for a rank that never gets to report; also between two looks whether
#: the ranks have got stuck.
_KEEP_S = 0.5

#: How many collectives are remembered: a script may issue millions.
_REMEMBERED = 4096


#: In an argument of the script, stands for the number of the rank: `torch.distributed.launch` passes it to scripts.
LOCAL_RANK = "{local_rank}"


class ScriptExited(Exception):
    """The script exited with a failure status."""


class ScriptRank:
    """The entry point of a rank; the harness finds it by name."""

    def __init__(self, payload: ScriptPayload, run: harness_rank.RankRun) -> None:
        self.order: ScriptOrder = payload.order
        self.payload = payload
        self.run = run
        self._observer: observe.Observer | None = None
        self._has_begun = False

    @classmethod
    def _run(cls, rank: int, test_name: str, file_name: str, pipe: Connection, **options: Any) -> None:
        run = running()
        code = run.body(cls(cast(ScriptPayload, run.payload), run), "run_script")
        if code:
            sys.exit(code)

    def init_rank(self) -> None:
        """Activate the simulated accelerator in this process, and observe it."""
        case = self.run.order.case
        os.environ.update(
            torchrun_variables(self.run.order.rank, case.world_size, port=self.payload.port, run_id=self.payload.run_id)
        )
        rank = self.run.order.rank
        agreement = Agreement(case.directory, rank, case.world_size, caller_of_backward)
        self._observer = observe.begin(self.order, case.directory, agreement)
        if self.payload.children:
            told = self.payload.children[rank]
            os.environ.update(told.variables)
            report_forks(Path(told.directory), told.inherited, self._observer.described)
        register_recording_backend(case.device_type)
        log().observers.append(_Forgetful())
        log().issuer = agreement.issue

    def run_script(self) -> None:
        """Run the script; the observations go into the report, however it ends."""
        observer = self._observer
        if observer is None:
            raise EnvironmentUnavailable("the simulated accelerator is not active")
        kept = Path(self.run.order.files.output).with_suffix(OBSERVED_SUFFIX)
        with _kept(observer, kept):
            try:
                self._prepare()
                self._has_begun = True
                self._execute()
                _finish()
                observer.agreement.end()
            except SystemExit as leaving:
                _finish()
                if leaving.code not in (None, 0):
                    raise ScriptExited(f"the script ended with sys.exit({leaving.code!r})") from None
                observer.agreement.end()
            finally:
                self.run.report.measurements["observed"] = observer.observed()

    def describe_error(self, error: BaseException) -> RankError:
        """The exception, with the script's frames and without those that started it."""
        described = harness_rank.describe_error(error)
        reason = self._observer.agreement.stopped_by if self._observer is not None else None
        if reason is not None:
            # The script's error only says that its collectives were aborted.
            error = CollectiveMismatch(reason.sentence()).with_traceback(error.__traceback__)
            described = harness_rank.describe_error(error)
        return RankError(
            kind=described.kind,
            message=described.message,
            traceback=_script_traceback(error),
            blame="implementation" if self._has_begun else "suite",
            time=described.time,
        )

    def _prepare(self) -> None:
        """
        Set sys.argv and sys.path as Python itself would, and let the script choose how it starts processes, and name
        them as if it was started by itself.
        """
        multiprocessing.set_start_method(None, force=True)
        process = multiprocessing.current_process()
        process.name = "MainProcess"
        vars(process)["_identity"] = ()  # the beginning of its children's names
        rank = str(self.run.order.rank)
        arguments = [word.replace(LOCAL_RANK, rank) for word in self.order.arguments]
        entry = self.payload.own_path_entry
        if entry is not None and entry in sys.path:
            sys.path.remove(entry)
        if self.order.is_module:
            first = os.getcwd()
            # runpy replaces the name by the file's path.
            sys.argv = [self.order.target, *arguments]
        else:
            path = Path(self.order.target)
            first = str((path if path.is_dir() else path.parent).absolute())
            sys.argv = [self.order.target, *arguments]
        if not sys.flags.safe_path:
            sys.path.insert(0, first)
        # Ranks are forked: do not use a module of the same name that the warm process has found elsewhere.
        importlib.invalidate_caches()

    def _execute(self) -> None:
        rank = os.getpid()
        try:
            if self.order.is_module:
                runpy.run_module(self.order.target, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(self.order.target, run_name="__main__")
        finally:
            if os.getpid() != rank:
                _end_fork(sys.exc_info()[1])


class _Forgetful(CollectiveObserver):
    """Keeps the log from growing without bound; the trace file has the last collectives anyway."""

    def after(self, record: Any, work: Any) -> None:
        if len(log().records) >= _REMEMBERED:
            log().clear()


def _end_fork(error: BaseException | None) -> NoReturn:
    """A process that the script has forked with os.fork() has come to the script's end: it is no rank, and ends."""
    if error is not None and not isinstance(error, SystemExit):
        traceback.print_exception(error)
    code = error.code if isinstance(error, SystemExit) else int(error is not None)
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    _finish()
    os._exit(code or 0)


def _finish() -> None:
    """Do what Python does at the end of a program: join threads, call exit functions, flush."""
    threading._shutdown()  # type: ignore[attr-defined]  # the same name in 3.11 to 3.14; joins all but daemon threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the script may have closed it
            stream.flush()


@contextlib.contextmanager
def _kept(observer: observe.Observer, path: Path) -> Any:
    """Keep saving the observations during the block, because a rank that is killed cannot report them."""
    over = threading.Event()

    def keep_observations() -> None:
        seen = -1
        while not over.wait(_KEEP_S):
            observer.look()
            if (now := observer.progress()) != seen:
                seen = now
                _write(path, observer.observed())

    thread = threading.Thread(target=keep_observations, name="observations", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _write(path: Path, content: dict[str, Any]) -> None:
    """Write the file completely or not at all."""
    part = path.with_suffix(".part")
    with contextlib.suppress(OSError):  # the disk is full or the controller is gone; the report repeats it
        part.write_text(json.dumps(content), encoding="utf-8")
        os.replace(part, path)


def _script_traceback(error: BaseException) -> str:
    """The exception and its causes, each from the script's first frame on."""
    if isinstance(error, ScriptExited):
        return str(error)
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = _below(one.__traceback__)
        todo += [one.__cause__, one.__context__]
    return "".join(traceback.format_exception(error))


def _below(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that begins in the script; all of it if it never got there."""
    own = {__file__, harness_rank.__file__, "<frozen runpy>", runpy.__file__}
    part = trace
    while part is not None and part.tb_frame.f_code.co_filename in own:
        part = part.tb_next
    return part if part is not None else trace
