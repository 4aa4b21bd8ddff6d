"""
A rank whose case has a referee: it drives the engine, and sends everything that the body gets to see.

    ObservedTraining    the adapters and trainings of a body
    ObservedAdapter     an adapter: what its methods return and raise
    SilentChecks        the checks of a body, which the referee makes

The referee (`cases.referee`) runs the same body, and gets there what the engine has shown here. A body therefore makes
the same calls in the same order on both sides: what it learns elsewhere (the process's memory, the log of collectives)
it must get through `ConformanceTestCase.observe`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import fsdp_conformance
from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.cases.checks import CaseChecks
from fsdp_conformance.cases.rank import CaseRank
from fsdp_conformance.cases.refusal import is_raised_explicitly
from fsdp_conformance.cases.training import HOOKS, CaseTraining
from fsdp_conformance.checks.result import CheckResult
from fsdp_conformance.driver.session import Steps
from fsdp_conformance.harness.observations import ObservationLog
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.outcome.records import RankError
from fsdp_conformance.plan import Plan
from fsdp_conformance.workload.definition import Regime, Workload

if TYPE_CHECKING:
    from fsdp_conformance.faults.fault import Fault

T = TypeVar("T")

#: Set on exceptions that the referee has been sent, or that its own body raises. An attribute of the exception, because
#: a list of exceptions would keep their frames alive.
_KNOWN = "fsdp_conformance_known"

_PACKAGE = Path(fsdp_conformance.__file__).parent
#: The code of the suite. In a checkout, cases and fixtures are beside the package.
_OWN = tuple(str(place) for place in (_PACKAGE, _PACKAGE.parent / "suites", _PACKAGE.parent / "fixtures"))
#: Parts of the package that are, or hold, code under test.
_UNDER_TEST = tuple(str(_PACKAGE / name) for name in ("adapters/vendors", "mutants", "engine", "planner", "tests"))
#: Helpers of bundled adapters, by which an engine says on which kind of ranks it cannot be judged at all.
_SAYS_WHERE_IT_RUNS = ("adapters/vendors/real_ranks.py", "adapters/vendors/stub_cuda.py")


class Observations:
    """Sends the referee everything that the body of one rank gets to see."""

    def __init__(
        self, log: ObservationLog, here: CaseRank, describe_error: Callable[[BaseException], RankError]
    ) -> None:
        self._log = log
        self._here = here
        self._describe_error = describe_error
        self._is_inside = False
        """True while a call is observed: what it does in turn is a part of it."""

    def event(self, kind: str, name: str, **content: Any) -> None:
        """Send an event of the body."""
        if self._is_inside:
            return
        self._log.send(kind, name=name, steps=self._here.steps_trained, **content)

    def result(self, name: str, value: Any) -> None:
        """Send the result of a call."""
        self.event("returned", name, value=value)

    def raised(self, name: str, error: BaseException) -> None:
        """Send the exception of a call, unless the referee knows it."""
        if self._is_inside or _KNOWN in vars(error):
            return
        vars(error)[_KNOWN] = True
        self.event(
            "raised",
            name,
            error=self._describe_error(error),
            classes=[(kind.__module__, kind.__qualname__) for kind in type(error).__mro__],
            is_engines=comes_from_engine(error),
            is_explicit=is_raised_explicitly(error),
        )

    @contextmanager
    def of_body(self) -> Iterator[None]:
        """A context for the body's own code: its exceptions are not sent, because the referee runs it, too."""
        outer, self._is_inside = self._is_inside, False
        try:
            yield
        except BaseException as error:
            vars(error)[_KNOWN] = True
            raise
        finally:
            self._is_inside = outer

    def of(self, name: str, call: Callable[[], T]) -> T:
        """Call, and send the outcome."""
        value = self._called(name, call)
        self.result(name, value)
        return value

    def handle(self, name: str, call: Callable[[], Any]) -> ObservedAdapter:
        """Call, and observe what the body does with the object that was returned."""
        value = self._called(name, call)
        self.event("handle", name)
        return ObservedAdapter(value, self)

    def of_adapter(self, name: str, call: Callable[[], Any]) -> Any:
        """Call a method of an adapter, and send the result, or observe what the body does with it."""
        value = self._called(name, call)
        if _is_handle(value):
            self.event("handle", name)
            return ObservedAdapter(value, self)
        self.result(name, value)
        return value

    def _called(self, name: str, call: Callable[[], T]) -> T:
        outer, self._is_inside = self._is_inside, True
        try:
            value = call()
        except BaseException as error:
            self._is_inside = outer
            self.raised(name, error)
            raise
        self._is_inside = outer
        return value

    def finish(self) -> None:
        """Tell the referee that the body has ended."""
        self.event("done", "body")
        self._log.close()


class ObservedAdapter:
    """
    An adapter whose calls are observed. Objects that only have to be waited for, or entered and left, are observed
    like it; any other live object is handed to the body as it is.
    """

    def __init__(self, adapter: Any, observations: Observations) -> None:
        self._adapter = adapter
        self._observations = observations

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._adapter, name)
        if not callable(value):
            self._observations.result(name, value)
            return value

        def call(*arguments: Any, **options: Any) -> Any:
            return self._observations.of_adapter(name, lambda: value(*arguments, **options))

        return call

    def __enter__(self) -> Any:
        return self._observations.of("__enter__", self._adapter.__enter__)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Any:
        return self._observations.of("__exit__", lambda: self._adapter.__exit__(kind, error, trace))


def _is_handle(value: Any) -> bool:
    """True for a context, and for what has to be waited for."""
    kind = type(value)
    return kind.__module__ != "torch" and (
        (hasattr(kind, "__enter__") and hasattr(kind, "__exit__"))
        or (hasattr(value, "wait") and not hasattr(value, "to"))
    )


def without_observation(adapter: Adapter) -> Adapter:
    """The adapter that an ObservedAdapter observes; any other adapter itself."""
    return cast(Adapter, adapter._adapter) if isinstance(adapter, ObservedAdapter) else adapter


class ObservedSteps:
    """The steps of a training beside another one."""

    def __init__(self, steps: Steps, observations: Observations) -> None:
        self._steps = steps
        self._observations = observations

    def __next__(self) -> int:
        return self._observations.of("step", lambda: next(self._steps))

    @property
    def history(self) -> TrainingHistory:
        """The history of the training."""
        return self._observations.of("history", lambda: self._steps.history)


class ObservedTraining(CaseTraining):
    """The adapters of a case, and its trainings, with everything sent to the referee."""

    def __init__(self, here: CaseRank, implementation: str, observations: Observations, **options: Any) -> None:
        super().__init__(here, implementation, **options)
        self._observations = observations

    def subject(self) -> Adapter:
        return cast(Adapter, self._observations.handle("subject", super().subject))

    def drop_all(self) -> None:
        self._observations.of("drop all", super().drop_all)

    def drop(self, adapter: Adapter) -> None:
        raw = without_observation(adapter)
        self._observations.of("drop", lambda: super(ObservedTraining, self).drop(raw))

    def train(
        self,
        /,
        workload: Workload,
        plan: Plan | None = None,
        regime: Regime | None = None,
        *,
        faults: Sequence[Fault] = (),
        adapter: Adapter | None = None,
        **options: Any,
    ) -> TrainingHistory:
        def train() -> tuple[TrainingHistory, dict[str, list[str]]]:
            raw = None if adapter is None else without_observation(adapter)
            run = super(ObservedTraining, self).train(
                workload, plan, regime, faults=faults, adapter=raw, **self._observed(options)
            )
            return run, self._here.report.unmet

        return self._observations.of("train", train)[0]

    @contextmanager
    def training_beside(self, workload: Workload, plan: Plan, regime: Regime) -> Iterator[Any]:
        with ExitStack() as inside:
            beside = super().training_beside(workload, plan, regime)
            steps: list[Steps] = []
            self._observations.of("begin beside", lambda: steps.append(inside.enter_context(beside)))
            yield ObservedSteps(steps[0], self._observations)
            self._observations.of("end beside", inside.close)

    def train_without_waits(
        self, workload: Workload, plan: Plan | None, regime: Regime | None, **options: Any
    ) -> TrainingHistory:
        train = super().train_without_waits
        return self._observations.of(
            "train without waits", lambda: train(workload, plan, regime, **self._observed(options))
        )

    def _observed(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a training, with hooks whose calls are sent."""
        return {
            name: self._hook(name, value) if name in HOOKS and value is not None else value
            for name, value in options.items()
        }

    def _hook(self, name: str, hook: Callable[..., object]) -> Callable[..., object]:
        """A hook of the body that gets an observed adapter."""

        def call(*arguments: Any) -> object:
            observed_arguments = [
                ObservedAdapter(each, self._observations) if isinstance(each, Adapter) else each for each in arguments
            ]
            with self._observations.of_body():
                self._observations.event("hook", name, arguments=[each for each in arguments if isinstance(each, int)])
                return hook(*observed_arguments)

        return call


class SilentChecks(CaseChecks):
    """The checks of a body on an observed rank: the referee makes them. What they ask of the engine is still asked."""

    def check(self, result: CheckResult) -> None:
        pass

    def check_parity(self, run: TrainingHistory, workload: Workload, *arguments: Any, **options: Any) -> None:
        pass

    def check_rounding(self, run: TrainingHistory, workload: Workload, *arguments: Any, **options: Any) -> None:
        pass

    def check_bitwise(self, run: TrainingHistory, expected: TrainingHistory, requirement: str) -> None:
        pass

    def check_equal(self, /, requirement: str, *arguments: Any, **options: Any) -> None:
        pass

    def check_digests(self, *arguments: Any, **options: Any) -> None:
        pass

    # These two would hash every value and every call, for nothing.
    def check_same_on_every_rank(self, run: TrainingHistory, requirement: str) -> None:
        pass

    def check_same_schedule(self, run: TrainingHistory, requirement: str) -> None:
        pass

    def expect(self, /, holds: bool, requirement: str, message: str, **where: Any) -> None:
        pass

    def leave_unobserved(self, flag: str) -> None:
        pass

    def _expect_noticed(self, kind: str, run: TrainingHistory, *arguments: Any) -> None:
        pass


def comes_from_engine(error: BaseException) -> bool:
    """True if code that is not the suite's own raised the exception, whatever its class says."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    file = trace.tb_frame.f_code.co_filename
    if file.endswith(_SAYS_WHERE_IT_RUNS):
        return False
    # If no `raise` statement of the suite raised it, code in C did, perhaps because of what the engine has passed.
    return not file.startswith(_OWN) or file.startswith(_UNDER_TEST) or not is_raised_explicitly(error)
