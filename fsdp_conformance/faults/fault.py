"""
A fault: an object that can be installed, disturbs a rank, and can be removed without a trace.

A fault changes when things happen, but never the results of a correct implementation. It counts how often it struck
(`fired`), because a fault that never strikes proves nothing. When it is installed, it sets up what it needs to strike,
or raises ConfigError. When it is removed, it raises ConfigError if it should have struck and has not. A loop that
judges this itself removes faults with `must_have_struck=False`: `silent(rank)` names the faults that should have struck
and did not, and `unmet(rank, records)` those of them that had no collective to strike.

A training loop makes these calls, in this order:

    faults = FaultSet(CollectiveDelay(Op.REDUCE_SCATTER, ranks=[1], milliseconds=20), ...)
    faults.prepare(model)                # when the model is built, before the implementation wraps it
    with faults:                         # install ... remove, which raises for a fault that never struck
        faults.at("after_loss", step)    # between the loss and its backward
        faults.at("before_step", step)   # between the last backward and the optimizer
    faults.silent(rank)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from types import TracebackType
from typing import Self

import torch.distributed as dist
from torch import nn

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.harness import context
from fsdp_conformance.history.collective import CollectiveRecord, Op

#: Places of the training loop at which a fault can strike.
POINTS = ("after_loss", "before_step")

#: Phases (see `CollectiveLog.phase`) that are not training: setup, and reading results for a comparison.
QUIET_PHASES = frozenset({"setup", "observe"})


class Fault(ABC):
    """One disturbance, on the given ranks or on every rank (None)."""

    need: str = "the training must reach it while it is installed"
    """The condition for a strike, as the end of the message for a fault that never struck."""

    def __init__(self, ranks: Iterable[int] | None = None) -> None:
        self.ranks = None if ranks is None else frozenset(ranks)
        self._fired = 0
        self._installed = False

    @property
    def fired(self) -> int:
        """The number of times that it struck on this rank since it was installed."""
        return self._fired

    @property
    def installed(self) -> bool:
        """True if it can strike."""
        return self._installed

    def install(self) -> None:
        """
        Let it strike from now on. A second call changes nothing.

        Raises ConfigError for ranks that the world does not have: it would never strike there.
        """
        if self._installed:
            return
        problems = self.problems_in_world(_world_size())
        if problems:
            raise ConfigError(problems, where=type(self).__name__)
        self._fired = 0
        self._attach()
        self._installed = True

    def remove(self, *, must_have_struck: bool = True) -> None:
        """
        Remove it completely. A second call changes nothing.

        Raises ConfigError if it should have struck on this rank and never did, unless the caller judges that itself.
        """
        if not self._installed:
            return
        # First: a thread of the fault ends once it is no longer installed, and `_detach` waits for that.
        self._installed = False
        self._detach()
        # The world may have been unknown when it was installed.
        problems = [*self.problems_in_world(_world_size()), *self.inert(_rank())] if must_have_struck else []
        if problems:
            raise ConfigError(problems, where=type(self).__name__)

    def __enter__(self) -> Self:
        self.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove(must_have_struck=kind is None)

    def prepare(self, model: nn.Module) -> None:
        """Called with the model when it is built, before the implementation wraps it."""

    def at(self, point: str, step: int) -> None:
        """Called when the loop reaches one of POINTS in a step."""

    @abstractmethod
    def describe(self) -> str:
        """A phrase for reports that describes the fault."""

    def targets(self, rank: int) -> bool:
        """True if it applies to `rank`."""
        return self.ranks is None or rank in self.ranks

    def silent(self, rank: int) -> list[str]:
        """Descriptions of faults that apply to `rank` but never struck there: if any, the run proved nothing."""
        return [self.describe()] if self.targets(rank) and self.fired == 0 else []

    def inert(self, rank: int) -> list[str]:
        """A sentence for each fault that is silent on `rank`, with what it needs."""
        return [
            f"{phrase} never struck on rank {rank}, so the test proves nothing: {self.need}"
            for phrase in self.silent(rank)
        ]

    def unmet(self, rank: int, records: Iterable[CollectiveRecord]) -> dict[str, frozenset[Op]]:
        """
        Descriptions of the silent faults that had nothing to strike among `records`, the collectives of a run, with the
        ops that they strike: the engine communicates by other means. Any other silent fault is a mistake in the plan.
        """
        return {}

    def problems_in_world(self, world_size: int | None) -> list[str]:
        """The reasons why this fault is invalid in a world of that size (None: unknown)."""
        absent = sorted(rank for rank in self.ranks or () if world_size is not None and rank >= world_size)
        return [f"ranks must be less than world_size={world_size}, got {absent}"] if absent else []

    def _attach(self) -> None:
        """Subclasses install themselves here."""

    def _detach(self) -> None:
        """Subclasses undo `_attach` here."""

    def _strikes_here(self) -> bool:
        """True if it is installed and applies to this rank."""
        return self._installed and self.targets(_rank())

    def _ranks_phrase(self) -> str:
        return "every rank" if self.ranks is None else f"ranks {sorted(self.ranks)}"


def _rank() -> int:
    """The number of this rank. Without a default group it is the case's, and 0 if there is no case either."""
    if dist.is_initialized():
        return dist.get_rank()
    run = context.current().run
    return run.order.rank if run is not None else 0


def _world_size() -> int | None:
    """The number of ranks; None if there is neither a default group nor a case."""
    if dist.is_initialized():
        return dist.get_world_size()
    run = context.current().run
    return run.order.case.world_size if run is not None else None


class FaultSet(Fault):
    """Several faults as one: installed in order, all or none, and removed in reverse."""

    def __init__(self, *faults: Fault) -> None:
        super().__init__()
        self.faults = faults

    @property
    def fired(self) -> int:
        """The number of times that its members struck, in total."""
        return sum(fault.fired for fault in self.faults)

    def prepare(self, model: nn.Module) -> None:
        """Prepare each member."""
        for fault in self.faults:
            fault.prepare(model)

    def at(self, point: str, step: int) -> None:
        """Pass the point on to each member."""
        for fault in self.faults:
            fault.at(point, step)

    def describe(self) -> str:
        """The descriptions of its members."""
        return "; ".join(fault.describe() for fault in self.faults)

    def targets(self, rank: int) -> bool:
        """True if one of its members applies to `rank`."""
        return any(fault.targets(rank) for fault in self.faults)

    def silent(self, rank: int) -> list[str]:
        """Descriptions of the members that never struck on `rank` and should have."""
        return [phrase for fault in self.faults for phrase in fault.silent(rank)]

    def inert(self, rank: int) -> list[str]:
        """The sentences of its members."""
        return [sentence for fault in self.faults for sentence in fault.inert(rank)]

    def unmet(self, rank: int, records: Iterable[CollectiveRecord]) -> dict[str, frozenset[Op]]:
        """The unmet faults among its members."""
        records = list(records)
        operations: dict[str, frozenset[Op]] = {}
        for fault in self.faults:
            operations |= fault.unmet(rank, records)
        return operations

    def problems_in_world(self, world_size: int | None) -> list[str]:
        """The problems of all members."""
        return [problem for fault in self.faults for problem in fault.problems_in_world(world_size)]

    def _attach(self) -> None:
        done: list[Fault] = []
        try:
            for fault in self.faults:
                if not fault.installed:
                    fault.install()
                    done.append(fault)
        except BaseException:
            for fault in reversed(done):
                fault.remove(must_have_struck=False)
            raise

    def _detach(self) -> None:
        # Not `must_have_struck`: `remove` of the set judges all members together.
        for fault in reversed(self.faults):
            fault.remove(must_have_struck=False)
