"""
One case on one rank, seen from inside: run the body, report, wait for the goodbye.

A rank sends its report when its body has ended, and then waits for the controller's goodbye, which comes when every
rank has reported: no rank tears down its process group while a peer still communicates. The two kinds of ranks add what
differs: `processes.rank_process` prepares a process for one rank, `simulated_ranks.host` one for all of them.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pickle
import sys
import threading
import time
import traceback
import unittest
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch
from torch.distributed import distributed_c10d

from fsdp_conformance import codec
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
from fsdp_conformance.harness.accounting import Part
from fsdp_conformance.harness.environment import quoted_variables
from fsdp_conformance.harness.order import RankOrder
from fsdp_conformance.harness.processes import preload
from fsdp_conformance.outcome.records import RankError, RankReport

#: Exit code of a rank whose report carries an error; MultiProcessTestCase.TEST_ERROR_EXIT_CODE.
ERROR_EXIT_CODE = 10
#: Exit code of a rank that failed after it had reported.
SHUTDOWN_EXIT_CODE = 11
#: Exit code of a rank whose controller has ended.
ORPHAN_EXIT_CODE = 12


class RankCase(Protocol):
    """The attributes of a test case that a rank needs."""

    def init_rank(self) -> None: ...

    def finish_body(self) -> None: ...

    def leave_body(self) -> None: ...

    def describe_error(self, error: BaseException) -> RankError: ...


class RankRun:
    """One case on one rank. Subclasses say how the rank came to be (`start`) and prepare it (`prepare`)."""

    start: str
    has_group: bool = False
    """True if this rank has made its first group already, before it had a case."""

    def __init__(self, order: RankOrder, pipe: Connection) -> None:
        self.order = order
        self.pipe = pipe
        self.payload: Any = None
        self.report = RankReport(rank=order.rank)
        self.reported = False
        self.began = time.monotonic()
        self._part = order.case.first_part
        self._telling = threading.Lock()

    def prepare(self) -> None:
        """Take over streams, environment and deadlines from the order."""
        raise NotImplementedError

    def run(self) -> int:
        """Run the case and return the exit code of the process."""
        case = self.order.case
        try:
            self.prepare()
            self._take_over()
            owner: Any = importlib.import_module(case.module)
            for name in case.qualname.split("."):
                owner = getattr(owner, name)
            self.report.seconds["start"] = time.monotonic() - self.began
            owner._run(self.order.rank, case.test_name, case.file_name, self.pipe, **case.options)
        except SystemExit as leaving:
            return self._leave_by(leaving)
        except BaseException as error:  # noqa: BLE001 - it goes into the report
            if self.reported:
                traceback.print_exc()
                return SHUTDOWN_EXIT_CODE
            self.note(error, describe_error(error))
            self.speak()
            return ERROR_EXIT_CODE
        return 0

    def _take_over(self) -> None:
        """Apply the settings and unpack the payload."""
        case = self.order.case
        self.report.environment = {
            **case.determinism.apply(),
            "torch": torch.__version__,
            "start": self.start,
            # Forked ranks share the seed of Python's hashes and the layout of the heap; spawned ranks do not.
            "hash_seed": "shared by all ranks",
            "variables": quoted_variables(),
        }
        if preload.failures:
            self.report.environment["preload_failures"] = dict(preload.failures)
        self.payload = pickle.loads(case.payload) if case.payload else None  # noqa: S301 - our own controller sent it

    def body(self, case: RankCase, test_name: str) -> int:
        """Run the test method, report, wait for the goodbye. Returns the exit code that torch's harness would use."""
        began = time.monotonic()
        code = 0
        try:
            # So that the case can also show an exception that it catches in order to judge it.
            vars(case)["examine"] = self.examine
            case.init_rank()
            getattr(case, test_name)()
            case.finish_body()
        except SystemExit as leaving:
            skip = skip_message(leaving.code)
            if skip is None:
                raise
            self.report.not_run, code = skip, int(str(leaving.code))
        except unittest.SkipTest as skipped:
            self.report.not_run, code = str(skipped), _torch_skips()["generic"].exit_code
        except BaseException as error:  # noqa: BLE001 - it goes into the report
            self.note(error, case.describe_error(error))
            # Before the report is sent: until then the rank does not count as failed, and its peers are not ended.
            self.examine(error)
            code = ERROR_EXIT_CODE
        case.leave_body()
        self.report.seconds["body"] = time.monotonic() - began
        self.speak()
        self.wait_for_goodbye()
        return code

    @property
    def part(self) -> Part:
        """Whose code this rank runs."""
        return self._part

    def turn_to(self, part: Part) -> Part:
        """
        Tell the controller whose code this rank runs from now on. Returns whose it was, for turning back.

        The suite's own work begins alone: its first collective makes it a meeting.
        """
        with self._telling:  # autograd's threads issue collectives, too
            before = self._part
            if part is not before and not self.reported:
                self._part = part
                message = {"part": part, "rank": self.order.rank, "at": time.monotonic()}
                self.pipe.send_bytes(json.dumps(message).encode())
        return Part.SUITE if before is Part.MEETING else before

    def tell_prompt(self, waits: bool) -> None:
        """Tell the controller whether a debugger in this rank waits for a person."""
        with self._telling:
            if not self.reported:
                self.pipe.send_bytes(json.dumps({"prompt": waits}).encode())

    def meet_peers(self) -> None:
        """Called before a collective is issued: if the suite works, its work is a meeting from now on."""
        if self._part is Part.SUITE:
            self.turn_to(Part.MEETING)

    def examine(self, error: BaseException) -> None:
        """A person who debugs this rank may want to see what ended its body, or what the body judged wrong."""

    def note(self, error: BaseException, described: RankError) -> None:
        """Record in the report what ended the body."""
        if isinstance(error, ReferencesDisagree):
            self.report.inconclusive = str(error)
        elif isinstance(error, EnvironmentUnavailable):
            self.report.not_run = str(error)
        else:
            if isinstance(error, RequirementFailed):
                self.report.findings += [item for item in error.findings if item not in self.report.findings]
            self.report.error = described

    def speak(self) -> None:
        """Send the report, the rank's last message about the case."""
        try:
            message = json.dumps({"report": codec.plain(self.report)})
        except (TypeError, ValueError) as error:
            problem = SuiteError(f"the report of rank {self.order.rank} cannot be written as JSON: {error}")
            self.report = RankReport(rank=self.order.rank, findings=self.report.findings, error=describe_error(problem))
            message = json.dumps({"report": codec.plain(self.report, default=repr)})
        self.reported = True
        self.pipe.send_bytes(message.encode())

    def wait_for_goodbye(self) -> None:
        """Return when the controller says that every rank has reported, or at the deadline. Exit if it is gone."""
        if self.pipe.poll(self.order.case.goodbye_timeout_s):
            try:
                self.pipe.recv_bytes()
            except EOFError:
                os._exit(ORPHAN_EXIT_CODE)

    def collect_garbage(self) -> None:
        """Before the process group ends, collect what may hold it."""
        gc.collect()

    def _leave_by(self, leaving: SystemExit) -> int:
        """The exit code of a SystemExit. One of torch's skip codes before the report is itself a report."""
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


def destroy_process_group(collect_garbage: Callable[[], object] = gc.collect) -> None:
    """Destroy the default process group, if there is one, once everything that holds it has been collected."""
    # A DDP reducer or an FSDP state that dies after its group calls into freed memory in some versions.
    collect_garbage()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        # The end of a group joins gloo's threads and keeps the GIL, for which a thread may wait that has just finished
        # a collective (before torch 2.8: pytorch/pytorch#154976). The end of a backend that Python holds releases the
        # GIL, so backends end last.
        backends = list(_backends())
        torch.distributed.destroy_process_group()
        backends.clear()


def _backends() -> Iterator[object]:
    """The backends of all groups."""
    for group in distributed_c10d._world.pg_map:
        for member in filter(None, (group, getattr(group, "_twin", None))):
            for device in member._device_types:
                yield member._get_backend(device)


def describe_error(error: BaseException) -> RankError:
    """An exception as data, with the part that is to blame according to its class."""
    kind = type(error)
    return RankError(
        kind=f"{kind.__module__}.{kind.__qualname__}",
        message=str.__str__(str(error)),
        traceback="".join(traceback.format_exception(error)),
        blame=blame_of(error),
        time=time.monotonic(),
        problems=tuple(map(str, error.problems)) if isinstance(error, AdapterError | ConfigError) else (),
        capability=str(error.capability) if isinstance(error, Unsupported) else None,
    )


def blame_of(error: BaseException) -> str:
    """Who should look at an exception, from its class. Any class that is not ours is the implementation's."""
    if isinstance(error, AdapterError):
        return "adapter"
    if isinstance(error, SuiteError | UsageError | ReferencesDisagree):
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

    Imported only when a case skips: torch's test modules change what the process may do with torch's flags, and a rank
    that runs a user's script has no use for them.
    """
    from fsdp_conformance.harness.torch_testing import TEST_SKIPS

    return dict(TEST_SKIPS)
