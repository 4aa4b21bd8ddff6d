"""
Engines that are wrong, and do something about the process that they run in so that it does not show.

Each of them trains with twice the loss, or with another Adam. Besides, they change torch, the suite, or the messages of
their rank, on purpose or not.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import resource
import signal
import sys
import unittest
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsdp_conformance import codec, errors
from fsdp_conformance.adapters.base import Adapter, ModelFn, OptimFn
from fsdp_conformance.adapters.vendors.reference import Reference
from fsdp_conformance.adapters.vendors.torch_fsdp2 import TorchFSDP2
from fsdp_conformance.cases import control, observed
from fsdp_conformance.cases.checks import CaseChecks
from fsdp_conformance.checks.result import CheckResult
from fsdp_conformance.harness import context
from fsdp_conformance.harness.observations import ObservationLog, decisions_directory
from fsdp_conformance.harness.rank import RankRun
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.mutants import failure, misuse, whole_engines
from fsdp_conformance.mutants.values import SilentDDP
from fsdp_conformance.outcome.records import CheckCount, RankError, RankReport
from fsdp_conformance.plan import Plan


class Doubles(TorchFSDP2):
    """Trains with twice the loss, and hides nothing."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        super().backward(2 * loss, retain_graph=retain_graph)

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        self.cheat()
        super().setup(model_fn, optim_fn, plan)

    def cheat(self) -> None:
        """Change the process."""


class PatchesAdam(TorchFSDP2):
    """Installs an Adam of its own for the whole process, with other betas."""

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        stock = torch.optim.Adam.__init__

        def init(self: torch.optim.Adam, *arguments: Any, **settings: Any) -> None:
            stock(self, *arguments, **{**settings, "betas": (0.5, 0.5)})

        torch.optim.Adam.__init__ = init  # type: ignore[method-assign]
        super().setup(model_fn, optim_fn, plan)


class PatchesComparisons(Doubles):
    """Makes every comparison of tensors come out equal."""

    def cheat(self) -> None:
        torch.equal = lambda *tensors: True
        torch.allclose = lambda *tensors, **options: True
        Tensor.all = lambda self, *arguments, **options: torch.tensor(True)  # type: ignore[method-assign]
        Tensor.any = lambda self, *arguments, **options: torch.tensor(False)  # type: ignore[method-assign]


class DropsFindings(Doubles):
    """Makes the checks in its process find nothing."""

    def cheat(self) -> None:
        for name in ("check", "expect", "check_parity", "check_equal", "check_bitwise"):
            setattr(CaseChecks, name, lambda self, *arguments, **options: None)


class _FindsNothing(Adapter):
    """Makes every comparison in its process hold, and be counted."""

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        expect, check = CaseChecks.expect, CaseChecks.check

        def expect_anything(self: CaseChecks, /, holds: bool, requirement: str, message: str, **where: Any) -> None:
            expect(self, True, requirement, message, **where)

        def check_anything(self: CaseChecks, result: CheckResult) -> None:
            check(self, replace(result, findings=[]))

        CaseChecks.expect = expect_anything  # type: ignore[method-assign]
        CaseChecks.check = check_anything  # type: ignore[method-assign]
        super().setup(model_fn, optim_fn, plan)  # type: ignore[safe-super]


class DetachesInputs(_FindsNothing, whole_engines.DetachesInputs):
    """No gradient reaches the user's input."""


class LosesAttributes(_FindsNothing, misuse.LosesAttributes):
    """The wrapped module lacks what the user has set on it."""


class ReplacesExceptions(_FindsNothing, failure.ReplacesExceptions):
    """A user's exception arrives as another one."""


class ForgesReport(Doubles):
    """Sends a report of its own, with many comparisons, and leaves."""

    def close(self) -> None:
        self.forge()

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        self.forge()
        return None

    def forge(self) -> None:
        """Send the report, and end."""
        run = context.running()
        count = CheckCount(comparisons=1000, elements=100000)
        checks = dict.fromkeys(("loss parity", "gradient parity", "parameter parity", "cross-rank equality"), count)
        report = RankReport(rank=run.order.rank, checks=checks, environment=run.report.environment)
        run.pipe.send_bytes(json.dumps({"report": codec.plain(report)}).encode())
        run.wait_for_goodbye()
        os._exit(0)


class ForgesTheEnd(ForgesReport):
    """Shows a training that it has not trained, as if the body had ended, and then sends its own report."""

    def forge(self) -> None:
        run = context.running()
        refereed = run.order.case.refereed
        assert refereed is not None, "the case has a referee"
        log = ObservationLog(refereed.directory, run.order.rank, refereed.nonce)
        empty = TrainingHistory(source="forged", rank=run.order.rank, world_size=run.order.case.world_size)
        log.send("returned", name="train", steps=3, value=(empty, {}))
        log.send("done", name="body", steps=3)
        super().forge()


class SendsGarbage(ForgesReport):
    """Writes something that cannot be read where its observations belong."""

    def forge(self) -> None:
        refereed = context.running().order.case.refereed
        assert refereed is not None, "the case has a referee"
        with open(f"{refereed.directory}/rank{context.running().order.rank}.observations", "ab") as file:
            file.write((40).to_bytes(8, "big") + b'["nest' + b"[" * 34)
        super().forge()


class _RunsElsewhere:
    """Unpickled in the controller, it would make every later finding vanish there."""

    def __reduce__(self) -> tuple[Any, ...]:
        code = "import fsdp_conformance.cases.controller as c; c.refereed_report = lambda report, *rest: report"
        return exec, (code,)


class SendsCode(Doubles):
    """Sends its controller a pickle that runs code."""

    def cheat(self) -> None:
        context.running().pipe.send_bytes(pickle.dumps(_RunsElsewhere()))


class SendsNonsense(Doubles):
    """Sends its controller a message that says nothing."""

    def cheat(self) -> None:
        context.running().pipe.send_bytes(b'{"part": "no such part", "at": 1}')


class ReportsForAnotherRank(TorchFSDP2):
    """Trains rightly, and sends the report of a rank that does not exist."""

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        report = json.dumps({"report": codec.plain(RankReport(rank=99))})
        context.running().pipe.send_bytes(report.encode())
        super().setup(model_fn, optim_fn, plan)


class SpeaksOfTheMachine(Doubles):
    """Says in the report of its rank that the machine is to blame, after a body that ended well."""

    def cheat(self) -> None:
        speak = RankRun.speak

        def speak_so(self: RankRun) -> None:
            self.report.error = RankError(kind="x.Y", message="no", traceback="", blame="environment", time=0.0)
            speak(self)

        RankRun.speak = speak_so  # type: ignore[method-assign]


class RaisesFromC(Doubles):
    """Raises through code in C, so that the innermost frame in Python is the suite's."""

    def cheat(self) -> None:
        future: asyncio.Future[Any] = asyncio.Future(loop=asyncio.new_event_loop())
        future.set_exception(errors.EnvironmentUnavailable("no such device"))
        vars(self)["full_params"] = future.result


class ShowsWords(Doubles):
    """Shows words in place of parameters."""

    def full_params(self) -> dict[str, Any]:
        return dict.fromkeys(super().full_params(), "about three")


class ShowsLittle(Doubles):
    """Shows trainings without their steps."""

    def cheat(self) -> None:
        send = ObservationLog.send

        def send_less(self: ObservationLog, kind: str, **content: Any) -> None:
            if kind == "returned" and content.get("name") == "train":
                run, _ = content["value"]
                run.steps = []
            send(self, kind, **content)

        ObservationLog.send = send_less  # type: ignore[method-assign]


class SwallowsItsErrors(Doubles):
    """Raises, and does not say so."""

    def cheat(self) -> None:
        observed.Observations.raised = lambda *arguments: None  # type: ignore[method-assign]

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        raise errors.EnvironmentUnavailable("no such device")


class NoSuchDevice(Doubles):
    """Says in its second step that the machine lacks something."""

    excuse: BaseException = errors.EnvironmentUnavailable("no such device")
    steps_done = 0

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        self.steps_done += 1
        if self.steps_done == 2:
            raise self.excuse
        return super().step(max_norm, norm_type=norm_type)


class NotToday(NoSuchDevice):
    """Skips the test in which it is."""

    excuse = unittest.SkipTest("not today")


class LeavesByASkip(NoSuchDevice):
    """Exits as torch's harness does for a test that is skipped."""

    excuse = SystemExit(74)


class BlamesTheReferences(NoSuchDevice):
    """Says that the references disagree."""

    excuse = errors.ReferencesDisagree("they do")


class BlamesTheSuite(NoSuchDevice):
    """Says that the suite is wrong."""

    excuse = errors.SuiteError("not me")


class RefusesLate(NoSuchDevice):
    """Refuses something that the case does not ask for, once it has trained a step with wrong numbers."""

    excuse = errors.Unsupported("tp", "on second thought")


class RefusesOnOneRank(Doubles):
    """Refuses on one rank only, before anything was trained."""

    def cheat(self) -> None:
        if torch.distributed.get_rank() == 1:
            raise errors.Unsupported("tp", "not on this rank")


class RaisesSurrogates(NoSuchDevice):
    """Raises an exception whose text cannot be written as UTF-8."""

    excuse = RuntimeError("a lone surrogate \ud800, and an escape \x1b[2J")


class ExitsQuietly(Doubles):
    """Ends its process in the second step, with the exit code of success."""

    steps_done = 0

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        self.steps_done += 1
        if self.steps_done == 2:
            sys.stdout.flush()
            os._exit(0)
        return super().step(max_norm, norm_type=norm_type)


class TwoFaced(TorchFSDP2):
    """Tells the controller that it shows buffers, and its ranks that it does not, since those are wrong."""

    @classmethod
    def declared(cls) -> frozenset[str]:
        return super().declared() - ({"full_buffers"} if os.environ.get("WORLD_SIZE") == "2" else set())

    def full_buffers(self) -> dict[str, Tensor]:
        return {name: value + 1 for name, value in super().full_buffers().items()}


class HidesReplicas(SilentDDP):
    """DistributedDataParallel that shows slices of what it holds."""

    def local_tensors(self) -> dict[str, list[Tensor]]:
        size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        return {
            kind: [tensor.detach().flatten().tensor_split(size)[rank].clone() for tensor in tensors]
            for kind, tensors in super().local_tensors().items()
        }


class AnswersInNumPy(TorchFSDP2):
    """Correct: its answers are of NumPy, or of classes that derive from Python's."""

    def unit_is_unsharded(self, fqn: str) -> bool:
        return np.bool_(super().unit_is_unsharded(fqn))  # type: ignore[return-value]

    def full_params(self) -> dict[str, Tensor]:
        return defaultdict(None, super().full_params())


class KeepsStockAdam(TorchFSDP2):
    """Correct: replaces a function of torch by one that does the same, as engines do."""

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        stock = torch.nn.functional.linear

        def linear(*arguments: Any, **options: Any) -> Tensor:
            return stock(*arguments, **options)

        torch.nn.functional.linear = linear
        super().setup(model_fn, optim_fn, plan)


class HidesTheControl(TorchFSDP2):
    """Is right, and does not send the values that its rank must send wrong."""

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        control.wrong_on_purpose = lambda run, kind: run
        super().setup(model_fn, optim_fn, plan)


def _referees() -> list[int]:
    """The processes that have a file of the referee's directory open, or run in it."""
    place = decisions_directory(context.running().order.case.refereed.directory)  # type: ignore[union-attr]
    found = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdecimal() and any(
                os.readlink(file).startswith(place) for file in (process / "fd").iterdir()
            ):
                found.append(int(process.name))
    return found


class KillsTheReferee(Doubles):
    """Kills the process that judges it."""

    def cheat(self) -> None:
        for process in _referees():
            os.kill(process, signal.SIGKILL)


class StopsTheReferee(Doubles):
    """Stops the process that judges it."""

    def cheat(self) -> None:
        for process in _referees():
            os.kill(process, signal.SIGSTOP)


class LimitsTheReferee(Doubles):
    """Lets the process that judges it open no more files."""

    def cheat(self) -> None:
        for process in _referees():
            resource.prlimit(process, resource.RLIMIT_NOFILE, (4, 4))


class ShowsAWordForSeconds(Doubles):
    """Sends a history in which a number is a word, which only arithmetic notices."""

    def cheat(self) -> None:
        _replace_in_history("seconds", "x")


class ShowsNumbersForFaults(Doubles):
    """Sends something else than the faults that found nothing to strike."""

    def cheat(self) -> None:
        _change_what_is_shown(lambda history, unmet: (history, {5: None}))


def _replace_in_history(field: str, value: Any) -> None:
    def changed(history: TrainingHistory, unmet: Any) -> tuple[TrainingHistory, Any]:
        setattr(history, field, value)
        return history, unmet

    _change_what_is_shown(changed)


def _change_what_is_shown(change: Callable[[TrainingHistory, Any], object]) -> None:
    """Change what a training is shown as."""
    original = ObservationLog.send

    def send(self: ObservationLog, kind: str, **content: Any) -> None:
        if content.get("name") == "train" and kind == "returned":
            content["value"] = change(*content["value"])
        original(self, kind, **content)

    ObservationLog.send = send  # type: ignore[method-assign]


class ReplacesClassesOfExceptions(Reference):
    """Is right, but exceptions of the user's code arrive as others with the same name and text."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _renamed():
            return super().forward(*args, **kwargs)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        with _renamed():
            super().backward(loss, retain_graph=retain_graph)


@contextlib.contextmanager
def _renamed() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001 - that is the mistake
        kind = type(type(error).__name__, (RuntimeError,), {"__module__": type(error).__module__})
        raise kind(str(error)) from None
