"""
The referee of a case: the body runs here a second time, in a process that no engine code ever enters.

    RefereeTraining     the adapters and trainings of a body, as the ranks have shown them
    ReplayedAdapter     an adapter: each call returns or raises what it did on the rank

References are trained, comparisons made and findings written here. What the engine's process could do to torch, to the
suite or to a report does not reach this process: only values do, as data (`history.transfer`). It cannot tell whether
a rank lies about a value that it has read from its own memory; nothing on the same machine can.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from torch import distributed

from fsdp_conformance import codec, errors
from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.cases.rank import CaseRank
from fsdp_conformance.cases.refusal import ReportedError
from fsdp_conformance.cases.training import HOOKS, CaseTraining
from fsdp_conformance.errors import EnvironmentUnavailable, ReferencesDisagree, SuiteError, UsageError
from fsdp_conformance.harness.observations import ObservationReader, ObservationsInvalid
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.history.typed import mistakes
from fsdp_conformance.outcome.records import RankError
from fsdp_conformance.plan import Plan
from fsdp_conformance.workload.definition import Regime, Workload

if TYPE_CHECKING:
    from fsdp_conformance.faults.fault import Fault

#: Classes that say something about the suite or the machine. Raised by code under test, they say nothing.
OF_SUITE = (SuiteError, EnvironmentUnavailable, ReferencesDisagree, UsageError)


#: What a rank shows of a training: its history, and the faults that had nothing to strike, with the ops they strike.
_SHOWN = tuple[TrainingHistory, dict[str, list[str] | tuple[str, ...]]]


class Replay:
    """Everything that one rank has shown, in order."""

    def __init__(self, reader: ObservationReader, here: CaseRank) -> None:
        self._reader = reader
        self._here = here

    def next(self, name: str, *kinds: str) -> tuple[str, dict[str, Any]]:
        """
        The next observation, which must belong to the call of that name. Raises what the call has raised.

        Raises ObservationsInvalid for another call.
        """
        kind, content = self._reader.next()
        got = content.pop("name", None)
        steps = content.pop("steps", None)
        if isinstance(steps, int):
            self._here.steps_trained = steps
        if got != name and not (kind == "hook" and "hook" in kinds):
            raise ObservationsInvalid(f"rank {self._here.rank} must show {name!r}, got {kind} of {got!r}")
        if kind == "raised":
            raise self._exception(content)
        if kind not in kinds:
            raise ObservationsInvalid(f"rank {self._here.rank} must show {' or '.join(kinds)} of {name!r}, got {kind}")
        return kind, {**content, "hook": got}

    def _exception(self, content: dict[str, Any]) -> BaseException:
        try:
            return exception_from(content)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            return ObservationsInvalid(f"rank {self._here.rank} must show an exception, got {sorted(content)}: {error}")

    def result(self, name: str) -> Any:
        """The result of a call. Raises ObservationsInvalid if there is none."""
        _, content = self.next(name, "returned")
        if "value" not in content:
            raise ObservationsInvalid(f"rank {self._here.rank} must show what {name} returned, got {sorted(content)}")
        return content["value"]

    def finish(self) -> None:
        """The body has ended here: it must have ended on the rank, too."""
        self.next("body", "done")
        self._reader.close()


class ReplayedAdapter:
    """An adapter of a rank, in the referee: each call returns or raises what it did there."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay

    def __getattr__(self, name: str) -> Any:
        if name in _VALUES:
            return self._replay.result(name)
        return lambda *arguments, **options: self._called(name)

    def __enter__(self) -> Any:
        return self._replay.result("__enter__")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Any:
        return self._replay.result("__exit__")

    def _called(self, name: str) -> Any:
        kind, content = self._replay.next(name, "returned", "handle")
        return ReplayedAdapter(self._replay) if kind == "handle" else content.get("value")


#: Attributes of adapters that are no methods.
_VALUES = frozenset(name for name, value in vars(Adapter).items() if not callable(value) and not name.startswith("_"))
_VALUES -= {name for name, value in vars(Adapter).items() if isinstance(value, classmethod | staticmethod)}


class ReplayedSteps:
    """The steps of a training beside another one, in the referee."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay

    def __next__(self) -> int:
        return int(self._replay.result("step"))

    @property
    def history(self) -> TrainingHistory:
        """The history of the training."""
        return _history(self._replay.result("history"))


class RefereeTraining(CaseTraining):
    """The adapters of a case, and its trainings, as a rank has shown them."""

    def __init__(self, here: CaseRank, implementation: str, replay: Replay, **options: Any) -> None:
        super().__init__(here, implementation, **options)
        self._replay = replay

    def subject(self) -> Adapter:
        with self._here.blaming("adapter"):
            self._replay.next("subject", "handle")
        return cast(Adapter, ReplayedAdapter(self._replay))

    def drop_all(self) -> None:
        self._references.forget()
        with self._here.blaming("implementation"):
            self._replay.result("drop all")

    def drop(self, adapter: Adapter) -> None:
        with self._here.blaming("implementation"):
            self._replay.result("drop")

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
        self._note_asked(workload, plan or self._here.plan(workload))
        hooks = {name: hook for name, hook in options.items() if name in HOOKS}
        with self._here.blaming("implementation"):
            observation = self._trained("train", hooks)
            _typed(observation, _SHOWN, "a training, with the faults that found nothing to strike,")
            run = self._whole(observation[0], (regime or Regime()).steps - options.get("first_step", 0))
        self._here.report.unmet |= observation[1]
        self._note_run(run)
        return run

    @contextmanager
    def training_beside(self, workload: Workload, plan: Plan, regime: Regime) -> Iterator[Any]:
        self._replay.result("begin beside")
        yield ReplayedSteps(self._replay)
        self._replay.result("end beside")

    def train_without_waits(
        self, workload: Workload, plan: Plan | None, regime: Regime | None, **options: Any
    ) -> TrainingHistory:
        with self._here.blaming("implementation"):
            return _history(self._trained("train without waits", options))

    def _whole(self, run: Any, steps: int) -> TrainingHistory:
        """The history, which must be that of this rank, and have all of its steps."""
        here = self._here
        history = _history(run)
        got = (history.rank, history.world_size, len(history.steps))
        if got != (here.rank, here.world_size, steps):
            expected = f"{steps} steps of rank {here.rank} of {here.world_size}"
            raise ObservationsInvalid(
                f"rank {here.rank} must show {expected}, got {got[2]} steps of rank {got[0]} of {got[1]}"
            )
        return history

    def leave_peers(self) -> None:
        """Do nothing: no engine communicates here."""

    def _trained(self, name: str, hooks: dict[str, Callable[..., object] | None]) -> Any:
        """The result of a training, once the hooks of the body have run as they did on the rank."""
        while True:
            kind, content = self._replay.next(name, "returned", "hook")
            if kind == "returned":
                return content.get("value")
            hook = hooks.get(str(content["hook"]))
            if hook is None:
                raise ObservationsInvalid(f"rank {self._here.rank} called a hook {content['hook']!r} that there is not")
            first_arguments = () if content["hook"] == "on_step" else (ReplayedAdapter(self._replay),)
            hook(*first_arguments, *content.get("arguments", ()))


def _history(value: Any) -> TrainingHistory:
    """The value, which must be a history as its class declares it. Raises ObservationsInvalid."""
    return cast(TrainingHistory, _typed(value, TrainingHistory, "a training"))


def _typed(value: Any, hint: Any, place: str) -> Any:
    """The value, which must be of that type. Raises ObservationsInvalid, with the first place where it is not."""
    if (mistake := next(mistakes(value, hint, place), None)) is not None:
        raise ObservationsInvalid(f"a rank must show {mistake}")
    return value


def exception_from(content: dict[str, Any]) -> ReportedError:
    """
    Rebuild an exception that a rank has raised: with its text, and of the first of its classes that is known here.

    Raises KeyError, TypeError, ValueError or IndexError for something else.
    """
    described = content["error"]
    if not isinstance(described, RankError):
        raise TypeError(f"{type(described).__name__} is no RankError")
    described = codec.typed(RankError, codec.plain(described))
    base: type[BaseException] = RuntimeError
    for module, name in content["classes"]:
        known_class = _known(module, name)
        # What code under test says about the suite or the machine is its own failure.
        if known_class is not None and not (content["is_engines"] and issubclass(known_class, OF_SUITE)):
            base = known_class
            break
    module, name = content["classes"][0]
    kind: Any = type(str(name), (ReportedError, base), {"__module__": str(module)})
    error: ReportedError = kind.__new__(kind, described.message)
    error.args = (described.message,)
    error.described, error.is_explicit = described, bool(content["is_explicit"])
    for attribute in ("capability", "problems"):
        setattr(error, attribute, getattr(described, attribute))
    return error


def _known(module: str, name: str) -> type[BaseException] | None:
    """An exception class of Python, of this package or of torch.distributed; None for any other."""
    places = {"builtins": builtins, errors.__name__: errors, "torch.distributed": distributed}
    kind = getattr(places.get(module), name, None)
    return kind if isinstance(kind, type) and issubclass(kind, Exception) else None
