"""
Runs a script in a rank as `python script.py` (or `python -m module`) would: as `__main__`, with its own sys.argv, with
the script's directory first on sys.path, in the current directory.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import multiprocessing
import os
import runpy
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from fsdp_conformance.simulator.frames import Owner, owner
from fsdp_conformance.simulator.sanitize.observer import Observer
from fsdp_conformance.simulator.sanitize.order import ScriptOrder

#: Seconds between two saves of the observations, for a rank that never gets to report; also between two looks whether
#: the ranks have got stuck.
_SAVE_S = 0.5

#: In an argument of the script, stands for the number of the rank: `torch.distributed.launch` passes it to scripts.
LOCAL_RANK = "{local_rank}"


class ScriptExited(Exception):
    """The script exited with a failure status."""


def prepare(order: ScriptOrder, rank: int, *, own_path_entry: str | None) -> None:
    """
    Set sys.argv and sys.path as Python itself would, let the script choose how it starts processes, and name them as if
    it was started by itself.

    `own_path_entry` is the entry of sys.path that the script's directory replaces.
    """
    multiprocessing.set_start_method(None, force=True)
    process = multiprocessing.current_process()
    process.name = "MainProcess"
    vars(process)["_identity"] = ()  # the beginning of its children's names
    arguments = [word.replace(LOCAL_RANK, str(rank)) for word in order.arguments]
    if own_path_entry in sys.path:
        sys.path.remove(own_path_entry)
    if order.is_module:
        first = os.getcwd()
    else:
        path = Path(order.target)
        first = str((path if path.is_dir() else path.parent).absolute())
    sys.argv = [order.target, *arguments]  # for a module, runpy replaces the name by the file's path
    if not sys.flags.safe_path:
        sys.path.insert(0, first)
    # Ranks are forked: do not use a module of the same name that the warm process has found elsewhere.
    importlib.invalidate_caches()


class _ExitedAtOnce(BaseException):
    """The script has called `os._exit`, which ends a process without a report."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def execute(order: ScriptOrder) -> None:
    """Run the script, its threads and its exit functions. Raises its exceptions, and ScriptExited for a bad status."""
    try:
        with _noticing_exits():
            _run(order)
        _finish()
    except SystemExit as leaving:
        _finish()
        if leaving.code not in (None, 0):
            raise ScriptExited(f"the script ended with sys.exit({leaving.code!r})") from None
    except _ExitedAtOnce as leaving:
        # No thread is joined, no exit function is called and nothing is flushed, as at the real call.
        if leaving.code:
            raise ScriptExited(f"the script ended with os._exit({leaving.code!r})") from None


@contextlib.contextmanager
def _noticing_exits() -> Iterator[None]:
    """`os._exit` in the rank's main thread reaches the caller, who has to report; elsewhere it ends the process."""
    leave, process = os._exit, os.getpid()

    def leave_rank(status: int) -> NoReturn:
        if os.getpid() == process and threading.current_thread() is threading.main_thread():
            raise _ExitedAtOnce(status)
        leave(status)

    os._exit = leave_rank
    try:
        yield
    finally:
        os._exit = leave


@contextlib.contextmanager
def saving_observations(observer: Observer, path: Path) -> Iterator[None]:
    """Save the observations again and again during the block, because a rank that is killed cannot report them."""
    over = threading.Event()

    def keep_observations() -> None:
        saved = -1
        while not over.wait(_SAVE_S):
            observer.look()
            if (now := observer.progress()) != saved:
                saved = now
                _write(path, observer.observed())

    thread = threading.Thread(target=keep_observations, name="observations", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def traceback_of(error: BaseException) -> str:
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


def _run(order: ScriptOrder) -> None:
    process = os.getpid()
    try:
        if order.is_module:
            runpy.run_module(order.target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(order.target, run_name="__main__")
    finally:
        if os.getpid() != process:
            _end_fork(sys.exc_info()[1])


def _end_fork(error: BaseException | None) -> NoReturn:
    """End a process that the script forked with os.fork() once it reaches the end of the script: it is not a rank."""
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


def _write(path: Path, content: dict[str, Any]) -> None:
    """Write the file completely or not at all."""
    part = path.with_suffix(".part")
    with contextlib.suppress(OSError):  # the disk is full or the controller is gone; the report repeats it
        part.write_text(json.dumps(content), encoding="utf-8")
        os.replace(part, path)


def _below(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that begins in the script; all of it if it never got there."""
    part = trace
    while part is not None and _runs_script(part.tb_frame.f_code.co_filename):
        part = part.tb_next
    return part if part is not None else trace


def _runs_script(file: str) -> bool:
    return owner(file) is Owner.MACHINERY or file in ("<frozen runpy>", runpy.__file__)
