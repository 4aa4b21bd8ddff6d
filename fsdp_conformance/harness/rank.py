"""
A rank's process from its first line to its last.

The order matters. The process leaves the controller's session, sends its output and its stacks to files, takes over
variables, seeds and settings, and only then imports the test class and runs it. At the end it sends its report and
waits for the controller's goodbye, which comes when every rank has spoken: so no rank tears down its process group
while a peer still communicates. Then it shuts down and leaves by `os._exit`.

Why `os._exit`: a process that ends through Python's finalization dies of SIGABRT every now and then, "terminate
called without an active exception" (1 in 20 to 60 runs of three ranks that use DDP, FSDP1 and FSDP2, torch 2.13).
gloo's worker thread lets go of the last all-reduce a moment after its caller has it, and the thread-local state that
the work has kept holds a Python object, so the thread asks for the interpreter's lock. Once finalization has begun,
CPython up to 3.13 ends a thread that asks: by `pthread_exit`, whose unwinding meets a destructor that may not throw,
and terminates the process (pytorch#190489, pytorch#179291). `destroy_process_group` before the end does not help
while a DDP reducer or a mesh still holds the group.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import pickle
import shutil
import signal
import sys
import threading
import time
import traceback
import unittest
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch

from fsdp_conformance.config import TorchrunWorker
from fsdp_conformance.errors import (
    AdapterError,
    ConfigError,
    EnvironmentUnavailable,
    ReferencesDisagree,
    RequirementFailed,
    SuiteError,
    Unsupported,
    UsageError,
)
from fsdp_conformance.harness.environment import (
    Determinism,
    apply_collective_timeout,
    apply_variables,
    quoted_variables,
)
from fsdp_conformance.harness.processes import preload
from fsdp_conformance.harness.recording.collective_log import log
from fsdp_conformance.harness.torchrun import worker as torchrun
from fsdp_conformance.outcome import RankError, RankReport

#: Exit code of a rank whose report carries an error; MultiProcessTestCase.TEST_ERROR_EXIT_CODE.
ERROR_EXIT_CODE = 10
#: Exit code of a rank that failed after its report was in.
SHUTDOWN_EXIT_CODE = 11
#: Exit code of a rank whose controller has ended.
ORPHAN_EXIT_CODE = 12

#: The signal on which a rank writes the stacks of its threads.
STACK_SIGNAL = signal.SIGUSR1


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFiles:
    """The files of one rank in the case's directory."""

    output: str
    """What the rank writes to stdout and stderr."""
    stack: str
    """Python stacks, on STACK_SIGNAL and on a fatal signal."""
    collectives: str
    """One line per collective, the last ones at the end."""

    @classmethod
    def under(cls, directory: Path, rank: int) -> RankFiles:
        """The files of `rank`, made empty."""
        paths = [directory / f"rank{rank}.{suffix}" for suffix in ("output", "stack", "collectives")]
        for path in paths:
            path.touch()
        return cls(output=str(paths[0]), stack=str(paths[1]), collectives=str(paths[2]))


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStart:
    """Everything that a rank is told before it runs a case. Picklable without importing the case."""

    rank: int
    world_size: int
    module: str
    qualname: str
    """Of the test class."""
    test_name: str
    case_name: str
    """The case's alone in this run."""
    file_name: str
    """Of the file store."""
    device_type: str
    files: RankFiles
    variables: dict[str, str]
    """The whole environment."""
    determinism: Determinism
    payload: bytes
    """The pickled launch payload; opened after the environment is set."""
    collective_timeout_s: float
    worker: TorchrunWorker | None
    """Whoever has started this rank, if its peers are on other hosts."""
    goodbye_timeout_s: float
    """How long the rank waits for the controller's goodbye."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of `_run`."""


class RankCase(Protocol):
    """What a rank needs of a test case."""

    def init_rank(self) -> None: ...

    def describe_error(self, error: BaseException) -> RankError: ...


class RankRun:
    """One case on one rank, from inside."""

    def __init__(self, start: RankStart, pipe: Connection, *, reused: bool = False) -> None:
        self.start = start
        self.pipe = pipe
        self.reused = reused
        self.payload: Any = None
        self.report = RankReport(rank=start.rank)
        self.reported = False
        self.began = time.monotonic()

    def run(self) -> int:
        """Run the case and return the exit code of the process."""
        try:
            self.prepare()
            owner: Any = importlib.import_module(self.start.module)
            for name in self.start.qualname.split("."):
                owner = getattr(owner, name)
            start = self.start
            self.report.seconds["start"] = time.monotonic() - self.began
            owner._run(start.rank, start.test_name, start.file_name, self.pipe, **start.options)
        except SystemExit as leaving:
            return self.leave_by(leaving)
        except BaseException as error:  # noqa: BLE001 - it goes into the report
            if self.reported:
                traceback.print_exc()
                return SHUTDOWN_EXIT_CODE
            self.note(error, describe_error(error))
            self.speak()
            return ERROR_EXIT_CODE
        return 0

    def prepare(self) -> None:
        """Take over streams, environment and settings."""
        prepare_process(self.start)
        if self.reused:
            log().trace_to(self.start.files.collectives)
        self.take_over(start="reused" if self.reused else "forkserver")

    def take_over(self, start: str) -> None:
        """Take over settings and payload; `start` says how the rank came to be."""
        self.report.environment = {
            **self.start.determinism.apply(),
            "torch": torch.__version__,
            "start": start,
            # Forked ranks share the seed of Python's hashes and the layout of the heap, spawned ones do not.
            "hash_seed": "shared by all ranks",
            "variables": quoted_variables(),
        }
        if preload.failures:
            self.report.environment["preload_failures"] = dict(preload.failures)
        self.payload = pickle.loads(self.start.payload)  # noqa: S301 - our own controller sent it

    def body(self, case: RankCase, test_name: str) -> int:
        """Run the test method, report, wait for the goodbye. Returns the exit code that torch's harness would use."""
        began = time.monotonic()
        code = 0
        try:
            case.init_rank()
            getattr(case, test_name)()
        except SystemExit as leaving:
            skip = skip_message(leaving.code)
            if skip is None:
                raise
            self.report.not_run, code = skip, int(str(leaving.code))
        except unittest.SkipTest as skipped:
            self.report.not_run, code = str(skipped), _torch_skips()["generic"].exit_code
        except BaseException as error:  # noqa: BLE001 - it goes into the report
            self.note(error, case.describe_error(error))
            code = ERROR_EXIT_CODE
        self.report.seconds["body"] = time.monotonic() - began
        self.speak()
        self.wait_for_goodbye()
        return code

    def note(self, error: BaseException, described: RankError) -> None:
        """Put what ended the body into the report."""
        if isinstance(error, ReferencesDisagree):
            self.report.inconclusive = str(error)
        elif isinstance(error, EnvironmentUnavailable):
            self.report.not_run = str(error)
        else:
            if isinstance(error, RequirementFailed):
                self.report.findings += [item for item in error.findings if item not in self.report.findings]
            self.report.error = described

    def speak(self) -> None:
        """Send the report. It is this rank's last word on the case."""
        try:
            message = json.dumps({"report": self.report.to_json()})
        except (TypeError, ValueError) as error:
            problem = SuiteError(f"the report of rank {self.start.rank} cannot be written as JSON: {error}")
            self.report = RankReport(rank=self.start.rank, findings=self.report.findings, error=describe_error(problem))
            message = json.dumps({"report": self.report.to_json()}, default=repr)
        self.reported = True
        self.pipe.send_bytes(message.encode())

    def wait_for_goodbye(self) -> None:
        """Return when the controller says that every rank has spoken, when it is gone, or at the deadline."""
        if self.pipe.poll(self.start.goodbye_timeout_s):
            try:
                self.pipe.recv_bytes()
            except EOFError:
                os._exit(ORPHAN_EXIT_CODE)

    def leave_by(self, leaving: SystemExit) -> int:
        """The exit code of a SystemExit; one of torch's skip codes before the report is a report of its own."""
        skip = None if self.reported else skip_message(leaving.code)
        if skip is not None:
            self.report.not_run = skip
            self.speak()
        if leaving.code is None:
            return 0
        if isinstance(leaving.code, int):
            return leaving.code
        print(leaving.code, file=sys.stderr)
        return 1


_current: RankRun | None = None


def current() -> RankRun | None:
    """The case that this process runs as a rank; None in the controller."""
    return _current


def running() -> RankRun:
    """The case that this process runs as a rank. Raises SuiteError in the controller."""
    if _current is None:
        raise SuiteError("this is the controller, but only a rank may do that")
    return _current


def main(start: RankStart, pipe: Connection) -> NoReturn:
    """The whole life of a rank that runs one case."""
    enter()
    leave(run_case(start, pipe), pipe)


def main_of_reused(pipe: Connection) -> NoReturn:
    """The whole life of a rank that runs cases until one of them fails or the controller closes the pipe."""
    enter()
    num_cases = 0
    while True:
        try:
            start = pickle.loads(pipe.recv_bytes())  # noqa: S301 - our own controller sent it
        except EOFError:
            leave(0, pipe)
        code = run_case(start, pipe, reused=num_cases > 0)
        if code:
            leave(code, pipe)
        forget_case()
        num_cases += 1
        pipe.send_bytes(json.dumps({"idle": True}).encode())


def use(run: RankRun) -> None:
    """Make it what `current()` returns."""
    global _current
    _current = run


def run_case(start: RankStart, pipe: Connection, *, reused: bool = False) -> int:
    """Run one case in this process."""
    run = RankRun(start, pipe, reused=reused)
    use(run)
    return run.run()


def prepare_process(start: RankStart) -> None:
    """
    Take over streams, environment and deadlines.

    Raises EnvironmentUnavailable if the warm process has touched CUDA.
    """
    _redirect(start.files)
    apply_variables(start.variables)
    if preload.cuda_initialised_by is not None:
        raise EnvironmentUnavailable(
            f"importing {preload.cuda_initialised_by} initialised CUDA in the warm process, so no rank can use "
            "a GPU. Move the call that touches the GPU out of the module's top level, into a function."
        )
    apply_collective_timeout(start.collective_timeout_s)
    if start.worker is not None:
        torchrun.meet_peers(start.worker, start.case_name, start.rank, start.world_size)


def forget_case() -> None:
    """Put back what a case leaves in a process: groups, compiled code, torch's defaults, the log of collectives."""
    global _current
    _current = None
    destroy_process_group()
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.reset()
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    collectives = log()
    collectives.clear()
    collectives.observers.clear()
    collectives.trace_to(None)


def enter() -> None:
    """Leave the controller's session, and end with it."""
    # Ctrl-C reaches the controller alone, which ends its ranks; and what a rank has started can be ended with its
    # group.
    os.setsid()
    # What the warm process has imported is nobody's garbage: to walk through it takes a collection 0.15 s, and copies
    # its pages.
    gc.freeze()
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), name="controller watch", daemon=True).start()


def leave(code: int, pipe: Connection) -> NoReturn:
    """End the process without finalizing Python: the module's docstring says what that would cost."""
    _flush()
    pipe.close()
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    _flush()
    os._exit(code)


def destroy_process_group() -> None:
    """Destroy the default process group, if there is one, after everything that holds it was collected."""
    # A DDP reducer or an FSDP state that dies after its group calls into freed memory in some versions.
    gc.collect()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def describe_error(error: BaseException) -> RankError:
    """An exception as data, with the part that is to blame where its class says so."""
    kind = type(error)
    return RankError(
        kind=f"{kind.__module__}.{kind.__qualname__}",
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
        blame=blame_of(error),
        time=time.monotonic(),
        problems=tuple(map(str, error.problems)) if isinstance(error, AdapterError | ConfigError) else (),
        capability=error.capability if isinstance(error, Unsupported) else None,
    )


def blame_of(error: BaseException) -> str:
    """Who has to look at an exception, from its class: anything that is not ours is the implementation's."""
    if isinstance(error, AdapterError):
        return "adapter"
    if isinstance(error, SuiteError | UsageError):
        return "suite"
    if isinstance(error, EnvironmentUnavailable):
        return "environment"
    return "refusal" if isinstance(error, Unsupported) else "implementation"


def skip_message(code: object) -> str | None:
    """The reason behind one of torch's skip codes, or None for another code."""
    for skip in _torch_skips().values():
        if skip.exit_code == code:
            return str(skip.message)
    return None


def _torch_skips() -> dict[str, Any]:
    """
    Torch's skip codes by name.

    Imported when a case skips, not before: torch's test modules change what the process may do with torch's flags, and
    a rank that runs somebody's own script has no use for them.
    """
    from fsdp_conformance.harness.torch_testing import TEST_SKIPS

    return dict(TEST_SKIPS)


def _redirect(files: RankFiles) -> None:
    """Send stdout and stderr, and stacks, to the rank's files."""
    _flush()
    output = os.open(files.output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)
    global _stack_file
    stack_file = open(files.stack, "a")  # noqa: SIM115 - faulthandler needs it for the life of the process
    faulthandler.enable(file=stack_file, all_threads=True)
    faulthandler.register(STACK_SIGNAL, file=stack_file, all_threads=True)
    _stack_file = stack_file


_stack_file: Any = None


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # a test may have closed it
            continue


def _end_with(sentinel: int) -> None:
    """End this process and what it started when the controller has ended, and remove the files of the case."""
    multiprocessing.connection.wait([sentinel])
    if _current is not None:
        shutil.rmtree(Path(_current.start.files.output).parent, ignore_errors=True)
    os.killpg(os.getpgrp(), signal.SIGKILL)
