"""
The unit: the parameters that are gathered, resharded and reduced together, and its states during a training step.

A unit owns the parameters of its modules that no inner unit owns, in one flat parameter per dtype. It implements
unsharding, resharding and reducing; the schedule decides when they happen.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from functools import partial
from types import MappingProxyType
from typing import NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import profiler

from fsdp_conformance.engine.errors import SharedAcrossUnits, TrainingStateError, UsedWhileSharded
from fsdp_conformance.engine.fully_sharded.boundary import Boundary, base_of
from fsdp_conformance.engine.fully_sharded.buffers import UnitBuffers
from fsdp_conformance.engine.fully_sharded.flat_parameter import FlatParameter
from fsdp_conformance.engine.fully_sharded.gradient_reduction import GradientReduction, ReductionHook
from fsdp_conformance.engine.fully_sharded.inputs import Arguments
from fsdp_conformance.engine.fully_sharded.order_watch import OrderWatch
from fsdp_conformance.engine.fully_sharded.shown_parameters import Member, Place
from fsdp_conformance.engine.fully_sharded.unit_spec import UnitSpec
from fsdp_conformance.engine.sharding_strategy import BackwardPrefetch
from fsdp_conformance.engine.structures import tensors_in
from fsdp_conformance.errors import Unsupported


class TrainingState(Enum):
    """Where a unit is in the training step."""

    # Members are singletons. Enum hashes their names in Python, and states are looked up all the time.
    __hash__ = object.__hash__

    IDLE = "idle"
    """Modules see the originals. Whole parameters may still be held between forward and backward."""
    FORWARD = "forward"
    """In its forward: unsharded, and modules see whole parameters."""
    BACKWARD = "backward"
    """From the gradient of its output to those of its inputs: unsharded, and modules see whole parameters."""
    SUMMONED = "summoned"
    """A user reads or writes whole parameters, outside of a step."""


#: A unit never goes from FORWARD to BACKWARD: it leaves its forward before a gradient reaches it.
TRAINING_TRANSITIONS = MappingProxyType(
    {
        TrainingState.IDLE: frozenset({TrainingState.FORWARD, TrainingState.BACKWARD, TrainingState.SUMMONED}),
        TrainingState.FORWARD: frozenset({TrainingState.IDLE}),
        TrainingState.BACKWARD: frozenset({TrainingState.IDLE}),
        TrainingState.SUMMONED: frozenset({TrainingState.IDLE}),
    }
)


class ForeignParameter(NamedTuple):
    """A parameter of another unit, at places outside of that unit."""

    name: str
    parameter: nn.Parameter
    places: list[Place]


class Schedule(Protocol):
    """The schedule of a unit, as those who run it see it: see `schedule.UnitSchedule`."""

    backward_prefetch: BackwardPrefetch | None
    forward_prefetch: bool

    @property
    def units(self) -> list[ShardedUnit]:
        """The units, inner ones before those around them."""

    @property
    def is_in_forward(self) -> bool:
        """True while a unit is in its forward."""

    def check_idle(self, unit: ShardedUnit, where: str) -> None:
        """Raise TrainingStateError inside a forward, a backward, or `summon_full_params`."""

    def before_forward(self, unit: ShardedUnit, arguments: Arguments, *, training: bool = True) -> Arguments:
        """Unshard, and prepare the inputs. Collective."""

    def watch(self, unit: ShardedUnit, output: object) -> None:
        """Watch some outputs of a unit, whose backward begins the unit's."""

    def after_forward(self, unit: ShardedUnit, output: object) -> None:
        """Watch the outputs, and reshard."""

    def forward_failed(self, unit: ShardedUnit) -> None:
        """Undo a forward that an exception has left."""

    def unshard(self, unit: ShardedUnit) -> UnshardHandle:
        """Begin to gather a unit now. Collective."""

    def reshard(self, unit: ShardedUnit) -> None:
        """Free a unit's whole parameters now."""

    def recover(self) -> None:
        """Return to the state between two steps, after an exception."""

    def recover_if_interrupted(self) -> None:
        """`recover`, if an exception ended a backward."""

    def note_gradient(self, unit: ShardedUnit) -> None:
        """A parameter has received a gradient: its unit takes part in this backward."""


class ShardedUnit:
    """
    One unit.

    `spec` is how its parameters are stored. `reshard_after_forward`: whether they are freed after a forward that is not
    the outermost one.
    """

    def __init__(
        self,
        flats: Sequence[FlatParameter],
        *,
        spec: UnitSpec,
        buffers: UnitBuffers,
        reshard_after_forward: bool,
        foreign: Mapping[int, ForeignParameter],
    ) -> None:
        self.take(flats)
        self.spec = spec
        self.buffers = buffers
        self.name = ""
        """Its FQN below the outermost unit known so far."""
        self.device = spec.device
        """Where it computes."""
        self.schedule: Schedule
        """The schedule of the outermost unit known so far. Set by the schedule, once the unit is complete."""
        self.foreign = dict(foreign)
        """Parameters that its modules use and another unit owns, by id; an outer unit has to join the two."""
        self.index = 0
        """Its position in the schedule."""
        self.reshard_after_forward = reshard_after_forward
        self.mixed_precision = spec.mixed_precision
        self.state = TrainingState.IDLE
        self.boundary = Boundary()
        """The boundary of its forward that is under way."""
        self.sync_gradients = True
        """True if gradients are reduced in backward; otherwise they are collected on this rank."""
        self.reshards_after_backward = True
        """True if its parameters are freed after backward; otherwise they are kept until they are written."""
        self.all_reduces = True
        """True if a reduction in backward includes the replicas; otherwise that is left for later."""
        self.num_expected = 0
        """The number of its forwards in this iteration that have yet to see their backward."""
        self.is_held = False
        """True if an output was of an unknown kind: its backward may begin unnoticed, so it stays unsharded."""
        self.keeps_graph = False
        """True if an output of the current forward leads to a backward."""
        self.took_part = False
        """True if it took part in this backward, and has not been reduced since."""
        self.ahead_in_forward: list[weakref.ref[ShardedUnit]] | None = None
        """Units to prefetch in its forward; None: the schedule decides."""
        self.ahead_in_backward: list[weakref.ref[ShardedUnit]] | None = None
        self.communication_hook: ReductionHook | None = None
        """A user's replacement for the average in a reduction."""
        # Apart from `state`: modules still see the originals of a unit that is gathered ahead.
        self._sees_leaves = False
        self.is_full_precision = False
        """True if it computes in the parameters' own dtype regardless of its policy, as requested for eval mode."""
        # True while `show_full_precision` has raised buffers that were lowered, which are then lowered again.
        self._raised_buffers = False

    def take(self, flats: Sequence[FlatParameter]) -> None:
        """Own these flat parameters from now on."""
        self.flats = list(flats)
        # Weakly: a parameter does not keep its unit alive.
        own = weakref.ref(self)
        for flat in self.flats:
            flat.shown.on_gradient = partial(_note_gradient, own)

    # --- state -------------------------------------------------------------------------------------------------------

    def move(self, state: TrainingState) -> None:
        """Go to a state. Raises TrainingStateError, and keeps the state, if that is not legal."""
        # The state that it is in is legal: a unit may call itself.
        if state is not self.state and state not in TRAINING_TRANSITIONS[self.state]:
            legal = ", ".join(sorted(legal.name for legal in TRAINING_TRANSITIONS[self.state]))
            raise TrainingStateError(
                f"the unit cannot go from {self.state.name} to {state.name}, only to {legal}", where=self.label
            )
        self.state = state

    @property
    def label(self) -> str:
        """Its name in messages."""
        return self.name or "the root"

    @property
    def is_unsharded(self) -> bool:
        """True if it holds whole parameters, or they are being gathered."""
        return any(flat.is_unsharded for flat in self.flats)

    @property
    def is_as_wrapped(self) -> bool:
        """True if modules have whole parameters, and buffers in their own dtype, as when they were wrapped."""
        return all(flat.is_whole for flat in self.flats) and not self.buffers.are_cast

    @property
    def is_kept(self) -> bool:
        """True if it stays unsharded from one micro-batch to the next, unless its parameters are written."""
        # The second half is gradient sharding inside `no_sync`: no optimizer writes before the next micro-batch.
        return not self.reshards_after_backward or not (self.reshard_after_forward or self.sync_gradients)

    @property
    def runs_ahead(self) -> bool:
        """True if the host can wait for its collectives without blocking."""
        return all(flat.storage.pool.streams.orders(flat.storage.group) for flat in self.flats)

    @property
    def is_trained(self) -> bool:
        """True if one of its parameters gets gradients."""
        return any(flat.reduction.is_trained for flat in self.flats)

    @property
    def has_gradients(self) -> bool:
        """True if gradients have yet to be reduced."""
        return any(flat.reduction.has_gradients for flat in self.flats)

    @property
    def has_partial(self) -> bool:
        """True if gradients reduced over the shard group have yet to be reduced over the replicas."""
        return any(flat.reduction.has_partial for flat in self.flats)

    def span(self, phase: str) -> AbstractContextManager[object]:
        """A profiler span with the phase and the unit's FQN, if a profiler is running."""
        if not torch._C._autograd._profiler_enabled():
            return nullcontext()
        return profiler.record_function(f"FullyShard::{phase} ({self.label})")

    # --- parameters --------------------------------------------------------------------------------------------------

    def follow_users(self) -> None:
        """
        Adopt what users have written, moved, cast, frozen or unfrozen since the last forward. Between steps only.

        Raises ParameterReplaced, ParameterMoved or SharedAcrossUnits for changes that are not supported.
        """
        if self.foreign:
            # The other unit would shard a parameter that this one's modules use whole.
            raise SharedAcrossUnits(
                f"{', '.join(each.name for each in self.foreign.values())} of {self.label} also belong to another unit",
                where="forward",
                hint="Also wrap the module that holds both units",
            )
        # Users change the originals, so modules have to show them before they are compared.
        self.show_originals()
        for flat in self.flats:
            flat.follow_users()
            # A unit that was kept has the values of its gather. FSDP2 does not look: its root, kept by an evaluation
            # between backward and step, computes the next forward with the weights from before the step.
            if flat.is_unsharded and flat.is_stale:
                flat.release()
            # After `follow_users`, which takes another pool if a user has moved the parameters.
            self.device = flat.storage.pool.device

    def start_unshard(self, after: torch.Event | None, watch: OrderWatch) -> None:
        """Begin to gather, unless it has begun. Collective. `watch` compares what peers are about to do."""
        for flat in self.flats:
            if not flat.is_unsharded:
                with self.span("all_gather"):
                    # Before the collective: NCCL compares no sizes, and hangs or writes past the buffer.
                    flat.announce(watch)
                    flat.start_gather(after)

    def finish_unshard(self, watch: OrderWatch) -> None:
        """Wait for the gather, and let modules see whole parameters. `watch` notes which units arrived."""
        with self.span("wait_for_unshard"):
            # Also for a unit that was unsharded all along: another stream than last time may be about to read it.
            for flat in self.flats:
                flat.finish_gather(watch)
        # Last: modules may read a leaf as soon as they see it.
        self.show_leaves()

    def use_full_precision(self, full: bool) -> None:
        """
        Compute and reduce in the own dtypes of parameters and buffers from now on, or as configured.

        Raises TrainingStateError if gradients of the other precision have yet to be reduced.
        """
        if full:
            self.buffers.restore()
        else:
            self.buffers.lower()
        # The two precisions have separate gradient buffers: switching would leave one of them behind.
        changing = [flat for flat in self.flats if flat.is_lowered and flat.is_full_precision != full]
        if changing and (self.has_gradients or self.has_partial):
            raise TrainingStateError(
                f"{self.label} cannot switch {'to' if full else 'from'} full precision while gradients have yet to be "
                "reduced: stay in training mode, or in eval mode, until they are",
                where="forward",
            )
        for flat in changing:
            flat.use_full_precision(full)
        self.is_full_precision = full

    def check_precision(self, full: bool) -> None:
        """Raise TrainingStateError if the forward had another precision: its values are gone."""
        if full != self.is_full_precision:
            raise TrainingStateError(
                f"{self.label} had {'full' if full else 'low'} precision in the forward and another one in the "
                "backward: stay in training mode, or in eval mode, between the two",
                where="backward",
            )

    def show_full_precision(self) -> None:
        """
        Gather in the parameters' own dtype, and let modules see that until `show_originals`. Collective.

        For a forward without a graph: it leaves a training step that is under way alone.
        """
        self._raised_buffers = self.buffers.restore()
        # Copies, not the block: low-precision leaves of a step under way are views of the block, and autograd has
        # saved them.
        with self.span("all_gather"):
            for flat in self.flats:
                views = flat.storage.layout.views(flat.storage.gathered())
                # Without the last view, which is that of the tag.
                flat.shown.register([nn.Parameter(view, requires_grad=False) for view in views[: len(flat.members)]])
        # The copies count as leaves: `show_originals` takes them away, and with them their memory.
        self._sees_leaves = True

    def show_leaves(self) -> None:
        """Let modules see whole parameters."""
        if not self._sees_leaves:
            # All checks before the first change: an error leaves every module with its originals.
            for flat in self.flats:
                flat.shown.check_places()
            self._sees_leaves = True
            for flat in self.flats:
                flat.shown.register_leaves()

    def show_originals(self) -> None:
        """Let modules see what the optimizer has."""
        if self._sees_leaves:
            self._sees_leaves = False
            for flat in self.flats:
                flat.shown.register_originals()
        if self._raised_buffers:
            self._raised_buffers = False
            self.buffers.lower()

    def reshard(self) -> None:
        """Free whole parameters."""
        # In this order: a module must never show a leaf whose memory is gone.
        self.show_originals()
        for flat in self.flats:
            flat.release()

    def reshard_until_backward(self) -> None:
        """Free whole parameters, except for what a smaller group keeps of them."""
        # In this order, as in `reshard`.
        self.show_originals()
        for flat in self.flats:
            flat.shrink()

    def check_returned(self, output: object) -> None:
        """Raise UsedWhileSharded if a tensor in `output` is a parameter that has just been freed, or a view of one."""
        returned = [base for tensor in tensors_in(output) if isinstance(base := base_of(tensor), nn.Parameter)]
        if returned:
            freed = [
                member.name
                for flat in self.flats
                if not flat.has_memory
                for member, leaf in zip(flat.members, flat.shown.leaves, strict=True)
                if any(leaf is parameter for parameter in returned)
            ]
            if freed:
                raise UsedWhileSharded(
                    f"the output must not be a parameter, whose memory is freed after the forward, got "
                    f"{', '.join(freed)}",
                    where=f"forward of {self.label}",
                    hint="Return a clone of it.",
                )

    def finish_reads(self) -> None:
        """Block the host until it may write offloaded shards: an optimizer on the CPU steps without asking streams."""
        for flat in self.flats:
            flat.storage.wait_shard_reads()

    def rename(self, name: str) -> None:
        """Set its FQN."""
        self.name = name
        for flat in self.flats:
            flat.shown.name = self.label

    def give_up(self, parameters: Sequence[nn.Parameter]) -> list[Member]:
        """Give some parameters, whole again, to an outer unit, and shard the rest again. Collective."""
        members = [member for flat in self.flats for member in flat.members]
        # Also those that stay: a flat parameter cannot lose members, so new ones are made.
        for flat in self.flats:
            flat.restore()
        given_ids = {id(parameter) for parameter in parameters}
        self.take(self.spec.flat_parameters([each for each in members if id(each.parameter) not in given_ids]))
        self.rename(self.name)
        return [each for each in members if id(each.parameter) in given_ids]

    # --- gradients ---------------------------------------------------------------------------------------------------

    def accumulate(self) -> None:
        """Keep the gradients of this backward on this rank."""
        self.took_part = False
        with self.span("accumulate"):
            for flat in self.flats:
                flat.reduction.accumulate()

    def start_reduction(self, watch: OrderWatch) -> list[GradientReduction]:
        """
        Begin to reduce the gradients of this backward and any kept before. Returns the reductions, to be finished in
        order. `watch` compares with peers what they are about to reduce, and the tags that arrive.
        """
        self.took_part = False
        # By what is trainable, not by what this rank has used: otherwise ranks would reduce different parameters, whose
        # gradients are added up where their shapes agree. FSDP2 does that (pytorch#174862).
        started = [
            flat.reduction
            for flat in self.flats
            if flat.reduction.is_trained or flat.reduction.has_gradients or flat.reduction.has_partial
        ]
        with self.span("reduce_scatter"):
            for reduction in started:
                # Before the collective, as in `start_unshard`.
                reduction.announce(watch)
                reduction.start(watch, self.communication_hook, all_reduce=self.all_reduces)
        return started

    def reset(self) -> None:
        """Return to the state between two steps after an exception: sharded, without unreduced gradients."""
        # Before the memory goes, as in `reshard`.
        self.show_originals()
        # Without `move`: an exception leaves it in any state.
        self.state = TrainingState.IDLE
        self.boundary.forget()
        self.num_expected = 0
        self.took_part = self.keeps_graph = False
        for flat in self.flats:
            flat.reset()

    def __deepcopy__(self, memo: dict[int, object]) -> NoReturn:
        raise Unsupported("copyable", "a sharded module cannot be copied: save its state dict and load that")

    def __reduce__(self) -> NoReturn:
        raise Unsupported("copyable", "a sharded module cannot be pickled: save its state dict")


def _note_gradient(unit: weakref.ref[ShardedUnit], _: Tensor) -> None:
    owner = unit()
    if owner is not None:
        owner.schedule.note_gradient(owner)


class UnshardHandle:
    """
    The handle of a gather. Dropping it without waiting is safe: a forward of the unit waits, and data that are not used
    are freed.

    Source: `UnshardHandle` of torch's FSDP2 (fsdp/_fully_shard/_fully_shard.py).
    """

    def __init__(self, unit: ShardedUnit, watch: OrderWatch) -> None:
        self._unit: ShardedUnit | None = unit
        self._watch = watch

    def wait(self) -> None:
        """
        Let the unit's modules see whole parameters, ready for the current stream.

        Does nothing on a second call, or if the unit has been resharded since.
        """
        # Forgotten before it waits: a handle must not keep the unit alive, nor gather again after an error.
        unit, self._unit = self._unit, None
        if unit is not None and unit.is_unsharded:
            unit.finish_unshard(self._watch)
