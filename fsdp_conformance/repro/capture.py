"""
Capture what a case's body trains and compares, without ranks: the body runs once, and its trainings are recorded.

A body that does anything else than train and compare for parity is refused by what it did first.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from fsdp_conformance import codec
from fsdp_conformance.adapters import registry
from fsdp_conformance.outcome.records import RankReport
from fsdp_conformance.plan import Plan
from fsdp_conformance.repro.refused import NoScript
from fsdp_conformance.run_settings import RunOrder, RunSettings
from fsdp_conformance.selftest.cases import BoundCase
from fsdp_conformance.workload.definition import Regime, Workload


@dataclass(frozen=True, slots=True)
class Made:
    """The call of a function at the top of a module that made a workload."""

    module: str
    function: str
    arguments: str

    @property
    def expression(self) -> str:
        """The call as source."""
        return f"{self.function}({self.arguments})"


@dataclass(kw_only=True, slots=True)
class Training:
    """One training of a body, and what it is compared with."""

    workload: Workload
    plan: Plan
    regime: Regime
    reference: Workload | None = None
    """None as long as the body has not compared it."""


@dataclass(slots=True)
class Captured:
    """The trainings and comparisons of a body."""

    trainings: list[Training] = field(default_factory=list)
    made: dict[int, Made] = field(default_factory=dict)
    """By the id of the workload."""
    left_out: dict[str, None] = field(default_factory=dict)
    """Further checks of the trainings."""
    objects: list[Any] = field(default_factory=list)
    """Those whose ids are noted here: while they are alive, no id is used again."""

    def maker(self, workload: Workload) -> Made:
        """The call that made it. Raises NoScript if the body has changed it, or built it directly."""
        if id(workload) not in self.made:
            raise NoScript(f"the body of the case changes the workload {workload.name}, so no function makes it")
        return self.made[id(workload)]


def capture(bound: BoundCase, chosen: RunSettings) -> Captured:
    """Capture what rank 0 of the case would do. Raises NoScript for a body that does more than train and compare."""
    captured = Captured()
    test = _instance(bound, captured, chosen)
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, value: _note(captured, frame, event, value))
    try:
        getattr(test, bound.method)()
    except NoScript:
        raise
    except AttributeError as error:
        if not isinstance(error.obj, Training):
            raise NoScript(f"the body of {bound.case.id} needs ranks: {error}") from error
        raise NoScript(
            f"{bound.case.id} does more than train and compare: it looks at the run's {error.name}"
        ) from error
    except Exception as error:
        raise NoScript(f"the body of {bound.case.id} needs ranks: {type(error).__name__}: {error}") from error
    finally:
        sys.setprofile(before)
    if not captured.trainings:
        raise NoScript(f"{bound.case.id} trains nothing")
    if any(training.reference is None for training in captured.trainings):
        raise NoScript(f"{bound.case.id} trains something that it does not compare for parity")
    return captured


def _instance(bound: BoundCase, captured: Captured, chosen: RunSettings) -> Any:
    def train(self: Any, workload: Workload, plan: Any = None, regime: Any = None, **options: Any) -> Training:
        if extra := sorted(set(options) - {"adapter"}):
            raise NoScript(f"{bound.case.id} trains with {', '.join(extra)}")
        training = Training(workload=workload, plan=plan or self.plan(workload), regime=regime or Regime())
        captured.trainings.append(training)
        captured.objects.append(workload)
        return training

    def check_parity(self: Any, run: Any, workload: Workload, regime: Any = None, **options: Any) -> None:
        if not isinstance(run, Training) or (regime or Regime()) != run.regime:
            raise NoScript(f"{bound.case.id} compares a training with another one")
        run.reference = workload
        captured.objects.append(workload)

    def nothing(self: Any, *args: Any) -> None:
        """Stand in for a method of the adapter."""

    def refuse(name: str) -> Any:
        def refused(self: Any, *args: Any, **options: Any) -> None:
            if name.startswith("check") and any(isinstance(each, Training) for each in args):
                # Of a training that is compared for parity, too, or else the case is refused at the end.
                captured.left_out[name] = None
                return
            raise NoScript(f"{bound.case.id} does more than train and compare: it calls {name}")

        return refused

    others = {
        name: refuse(name)
        for name in dir(bound.owner)
        if name.startswith(("check", "expect", "refusal", "leave_", "blaming", "plain_"))
        and name != "check_every_point"
    }
    replaced = {"train": train, "check_parity": check_parity, "subject": nothing, "drop": nothing}
    kind = type(bound.owner.__name__, (bound.owner,), {**others, **replaced})
    test = kind(bound.method)
    # As in a rank: with -1, torch's harness would start some.
    test.rank = 0
    test.report = RankReport(rank=0)
    description = codec.plain(registry.describe_once(chosen.implementation))
    test.launch_payload = RunOrder(settings=chosen, description=description, device=chosen.device).to_json()
    test.device_type = chosen.device
    return test


def _note(captured: Captured, frame: FrameType, event: str, value: Any) -> None:
    """A profile function: note which call of a function at the top of a module has returned a workload."""
    if event != "return" or not isinstance(value, Workload):
        return
    module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
    function = frame.f_globals.get(name)
    if getattr(function, "__code__", None) is not frame.f_code or not module.startswith("fsdp_conformance."):
        return
    count = frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount
    given = [(each, frame.f_locals[each]) for each in frame.f_code.co_varnames[:count] if each in frame.f_locals]
    if all(_is_literal(each) for _, each in given):
        captured.made[id(value)] = Made(module, name, ", ".join(f"{each}={what!r}" for each, what in given))
        captured.objects.append(value)


def _is_literal(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_literal, value))
    return value is None or isinstance(value, bool | int | float | str)
