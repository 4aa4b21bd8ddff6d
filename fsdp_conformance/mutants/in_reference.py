"""The reference engine's fully sharded module, each with one defect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fsdp_conformance.engine.communication import ChunkStreams
from fsdp_conformance.engine.fully_sharded.flat_parameter import FlatParameter
from fsdp_conformance.engine.fully_sharded.gradient_reduction import GradientReduction, post_accumulate_hooks
from fsdp_conformance.engine.fully_sharded.order_watch import OrderWatch
from fsdp_conformance.engine.fully_sharded.schedule import UnitSchedule
from fsdp_conformance.engine.fully_sharded.unit import ShardedUnit
from fsdp_conformance.mutants.engines import SeamReference
from fsdp_conformance.mutants.mutant import known_wrong
from fsdp_conformance.plan import Plan


class _Overwriting(FlatParameter):
    def note_forward(self) -> None:
        self.reduction.drop_leaf_gradients()
        self.reduction.gradients.discard()
        super().note_forward()


@known_wrong("R093")
class ReferenceOverwritesCollected(SeamReference):
    """The gradients of a micro-batch replace those that earlier ones left to its reduction."""

    flat_class: ClassVar[type[FlatParameter]] = _Overwriting


class _Summing(GradientReduction):
    def _deliver(self, shard: Tensor) -> list[nn.Parameter]:
        layout = self.storage.layout
        # The tag, which follows the members, has been checked.
        for part in layout.parts(shard):
            part.mul_(layout.world_size)
        return super()._deliver(shard)


@known_wrong("R003")
class ReferenceSumsGradients(SeamReference):
    """Gradients are summed over ranks instead of averaged."""

    reduction_class: ClassVar[type[GradientReduction]] = _Summing


class _Unordered(ChunkStreams):
    def wait(self, event: Any) -> None:
        """Order nothing."""


class _Hasty(FlatParameter):
    def finish_gather(self, watch: OrderWatch) -> None:
        streams = self.storage.pool.streams
        streams.__class__ = _Unordered
        try:
            super().finish_gather(watch)
        finally:
            streams.__class__ = ChunkStreams


@known_wrong("R075", "R073", shows=("hazard",), environment=("accelerator",))
class ReferenceForgetsTheGather(SeamReference):
    """Units compute without having waited for the stream that gathers them."""

    flat_class: ClassVar[type[FlatParameter]] = _Hasty


class _Gathering(UnitSchedule):
    def _end_backward(self) -> None:
        idle = [unit for unit in self.units if not unit.took_part]
        super()._end_backward()
        for unit in idle:
            unit.start_unshard(None, self.order)


@known_wrong("R078")
class ReferenceKeepsUnused(SeamReference):
    """A unit that took no part in a backward is gathered at its end."""

    schedule_class: ClassVar[type[UnitSchedule]] = _Gathering


class _Unchecked(FlatParameter):
    def finish_gather(self, watch: OrderWatch) -> None:
        tag, self.tag = self.tag, None
        try:
            super().finish_gather(watch)
        finally:
            self.tag = tag


class _Uncompared(GradientReduction):
    def finish(self, watch: OrderWatch) -> list[nn.Parameter]:
        tag, self.tag = self.tag, None
        try:
            return super().finish(watch)
        finally:
            self.tag = tag


@known_wrong("R059")
class ReferenceIgnoresOrder(SeamReference):
    """Nothing checks whether all ranks run the same units in the same order."""

    capabilities: ClassVar[frozenset[str]] = frozenset({"exec_order_divergent"})
    flat_class: ClassVar[type[FlatParameter]] = _Unchecked
    reduction_class: ClassVar[type[GradientReduction]] = _Uncompared


class _Held(FlatParameter):
    is_held = False
    is_stale = False

    def release(self) -> None:
        if not self.is_held:
            super().release()


class _Holding(UnitSchedule):
    def after_forward(self, unit: ShardedUnit, output: Any) -> None:
        flats = [flat for flat in unit.flats if isinstance(flat, _Held)]
        for flat in flats:
            flat.is_held = not torch.is_grad_enabled()
        super().after_forward(unit, output)
        for flat in flats:
            flat.is_held = False


@known_wrong("R010")
class ReferenceStaleAfterEval(SeamReference):
    """Units stay gathered after a forward under no_grad, and the next forward takes them for current."""

    flat_class: ClassVar[type[FlatParameter]] = _Held
    schedule_class: ClassVar[type[UnitSchedule]] = _Holding


@known_wrong("R040", environment=("accelerator",))
class ReferenceSurvivesItsOwner(SeamReference):
    """The engine keeps every model that it has ever wrapped alive."""

    _wrapped: ClassVar[list[nn.Module]] = []

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        self._wrapped.append(super().wrap(model, plan))
        return self._wrapped[-1]


class _Deaf(FlatParameter):
    def _adopt(self) -> None:
        for member, part in zip(self.members, self.parts, strict=True):
            member.parameter.data = part


@known_wrong("R143", shows=("finding", "refusal"))
class ReferenceForgetsAssigned(SeamReference):
    """Tensors that users assign to `.data` are replaced by the shard, without taking over their values."""

    flat_class: ClassVar[type[FlatParameter]] = _Deaf


class _Hookless(UnitSchedule):
    def _finish_oldest(self) -> None:
        _, reduction = self._reductions.popleft()
        reduction.finish(self.order)


@known_wrong("R142")
class ReferenceRunsNoHooks(SeamReference):
    """Hooks that run when a parameter has accumulated its gradient are forgotten."""

    schedule_class: ClassVar[type[UnitSchedule]] = _Hookless


class _SteppingEarly(UnitSchedule):
    def _finish_oldest(self) -> None:
        _, reduction = self._reductions.popleft()
        post_accumulate_hooks(reduction.finish(self.order))


@known_wrong("R002")
class ReferenceUpdatesBetweenCalls(SeamReference):
    """An optimizer in backward steps after each call of a unit under a reentrant checkpoint."""

    schedule_class: ClassVar[type[UnitSchedule]] = _SteppingEarly


@known_wrong("R095")
class ReferenceDefersInnerUnits(SeamReference):
    """A unit whose reduction is deferred passes that on to the units inside it."""

    @contextmanager
    def no_sync_of(self, units: Sequence[str]) -> Iterator[None]:
        with ExitStack() as contexts:
            for unit in units:
                contexts.enter_context(self._unit(unit).no_sync())
            yield


class _Kept(FlatParameter):
    is_stale = False


@known_wrong("R096")
class ReferenceKeepsAcrossTheStep(SeamReference):
    """Parameters that were kept across micro-batches are not freed, and not gathered after the optimizer step."""

    flat_class: ClassVar[type[FlatParameter]] = _Kept

    @contextmanager
    def keep_gathered(self) -> Iterator[None]:
        for unit in self._root.units:
            unit.reshards_after_backward = False
        yield


@known_wrong("R100", shows=("refusal",))
class ReferenceForgetsDeferral(SeamReference):
    """Nothing checks whether an optimizer steps, or another context begins, inside a deferred reduction."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with self._root._switched_off("sync_gradients", self._root.units):
            yield


class _InLine(FlatParameter):
    def start_gather(self, after: Any) -> None:
        super().start_gather(None)


@known_wrong("R080", environment=("stream_order",))
class ReferenceGathersInLine(SeamReference):
    """A unit is gathered only after everything that was computed before."""

    flat_class: ClassVar[type[FlatParameter]] = _InLine


class _Patient(UnitSchedule):
    def _reduce(self, unit: ShardedUnit) -> None:
        super()._reduce(unit)
        while self._reductions:
            self._finish_oldest()


@known_wrong("R080", environment=("stream_order",))
class ReferenceWaitsForReductions(SeamReference):
    """Nothing is computed while gradients are reduced."""

    schedule_class: ClassVar[type[UnitSchedule]] = _Patient
