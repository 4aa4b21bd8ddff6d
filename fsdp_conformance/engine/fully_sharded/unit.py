"""
The unit: what is gathered, resharded and reduced together; and its walk through the states of a training step.

A unit owns the parameters of its modules that no inner unit owns, in one flat parameter for each dtype. It knows how
to be unsharded, resharded and reduced; the schedule knows when.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import profiler

from fsdp_conformance.engine.errors import SharedAcrossUnits, TrainingStateError
from fsdp_conformance.engine.fully_sharded.buffers import UnitBuffers
from fsdp_conformance.engine.fully_sharded.flat_parameter import FlatParameter, ReductionHook
from fsdp_conformance.engine.fully_sharded.member import Member, Place
from fsdp_conformance.engine.fully_sharded.training_state import TRAINING_TRANSITIONS, TrainingState
from fsdp_conformance.errors import Unsupported

if TYPE_CHECKING:
    from fsdp_conformance.engine.fully_sharded.recipe import UnitRecipe
    from fsdp_conformance.engine.fully_sharded.schedule import UnitSchedule


class ForeignParameter(NamedTuple):
    """A parameter of another unit, at places outside of that."""

    name: str
    parameter: nn.Parameter
    places: list[Place]


class ShardedUnit:
    """
    One unit.

    `recipe` is how its flat parameters were made. `reshard_after_forward`: whether its parameters are freed after a
    forward that was not the outermost one.
    """

    def __init__(
        self,
        flats: Sequence[FlatParameter],
        *,
        recipe: UnitRecipe,
        buffers: UnitBuffers,
        reshard_after_forward: bool,
        foreign: Mapping[int, ForeignParameter],
    ) -> None:
        self.flats = list(flats)
        self.recipe = recipe
        self.buffers = buffers
        self.name = ""
        """Its FQN from the outermost unit that is known."""
        self.device = recipe.device
        """Where it computes."""
        self.schedule: UnitSchedule
        """Set by the outermost unit that is known."""
        self.foreign = dict(foreign)
        """Parameters that its modules use and another unit has, by id; an outer unit has to join the two."""
        self.index = 0
        """Its place in the schedule."""
        self.reshard_after_forward = reshard_after_forward
        self.mixed_precision = recipe.mixed_precision
        self.state = TrainingState.IDLE
        self.sync_gradients = True
        """Whether gradients are reduced in backward; else they are collected on this rank."""
        self.all_reduces = True
        """Whether gradients that are reduced in backward are reduced over the replicas, too; else that waits."""
        self.num_expected = 0
        """How many of its forwards of this iteration still wait for their backward."""
        self.is_held = False
        """Whether an output of it was of an unknown kind: its backward may begin unseen, so it stays unsharded."""
        self.keeps_graph = False
        """Whether an output of the forward that it is in leads to a backward."""
        self.took_part = False
        """Whether it was in this backward, and has not been reduced since."""
        self.ahead_in_forward: list[weakref.ref[ShardedUnit]] | None = None
        """Units to gather ahead in its forward; None: what the schedule says."""
        self.ahead_in_backward: list[weakref.ref[ShardedUnit]] | None = None
        self.communication_hook: ReductionHook | None = None
        """What reduces in place of the average."""
        self._sees_leaves = False
        self.is_full_precision = False
        """Whether it computes in the parameters' own dtype, whatever its policy says: asked for in eval mode."""
        self._raised_buffers = False

    # --- state -------------------------------------------------------------------------------------------------------

    def move(self, state: TrainingState) -> None:
        """Go to a state. Raises TrainingStateError if that is not legal; then it stays."""
        if state is not self.state and state not in TRAINING_TRANSITIONS[self.state]:
            legal = ", ".join(sorted(legal.name for legal in TRAINING_TRANSITIONS[self.state]))
            raise TrainingStateError(
                f"the unit goes from {self.state.name} to {state.name}, but should go to {legal}", where=self.label
            )
        self.state = state

    def check_idle(self, where: str) -> None:
        """Raise TrainingStateError inside of a forward, a backward, or `summon_full_params`."""
        self.schedule.recover_if_interrupted()
        if self.state is not TrainingState.IDLE or not self.schedule.is_idle:
            raise TrainingStateError(
                f"{self.label} is {self.state.name} in a step, but should be IDLE, outside of forward and backward",
                where=where,
            )

    @property
    def label(self) -> str:
        """Its name in messages."""
        return self.name or "the root"

    @property
    def is_unsharded(self) -> bool:
        """Whether it holds whole parameters, or they are on their way."""
        return any(flat.is_unsharded for flat in self.flats)

    @property
    def is_as_wrapped(self) -> bool:
        """Whether modules have what they had when they were wrapped: whole parameters, buffers in their own dtype."""
        return all(flat.is_whole for flat in self.flats) and not self.buffers.are_cast

    @property
    def is_kept(self) -> bool:
        """Whether it stays unsharded from one micro-batch to the next, as long as nobody writes its parameters."""
        return not self.reshard_after_forward and not self.sync_gradients

    @property
    def runs_ahead(self) -> bool:
        """Whether waiting for its collectives does not hold the host."""
        return all(flat.chunk.pool.streams.orders(flat.chunk.group) for flat in self.flats)

    @property
    def is_trained(self) -> bool:
        """Whether one of its parameters gets gradients."""
        return any(flat.is_trained for flat in self.flats)

    @property
    def has_gradients(self) -> bool:
        """Whether gradients wait to be reduced."""
        return any(flat.has_gradients for flat in self.flats)

    @property
    def has_partial(self) -> bool:
        """Whether gradients that were reduced over the shard group wait to be reduced over the replicas."""
        return any(flat.has_partial for flat in self.flats)

    def span(self, phase: str) -> AbstractContextManager[Any]:
        """A span with the phase and the unit's FQN, where a profiler looks."""
        if not torch._C._autograd._profiler_enabled():
            return nullcontext()
        return profiler.record_function(f"FullyShard::{phase} ({self.label})")

    # --- parameters --------------------------------------------------------------------------------------------------

    def follow_users(self) -> None:
        """
        Take over what was written, moved, cast, frozen or thawed since the last forward. Between steps only.

        Raises ParameterReplaced, ParameterMoved or SharedAcrossUnits for what cannot be followed.
        """
        if self.foreign:
            raise SharedAcrossUnits(
                f"{', '.join(each.name for each in self.foreign.values())} of {self.label} belong to another unit, but "
                "should belong to one that both are in",
                where="forward",
                hint="Wrap the module that holds both, too",
            )
        self.show_originals()
        for flat in self.flats:
            flat.follow_users()
            if flat.is_unsharded and flat.is_stale:
                flat.release()
            self.device = flat.chunk.pool.device

    def start_unshard(self, after: Any) -> None:
        """Begin to gather, unless it has begun. Collective."""
        for flat in self.flats:
            if not flat.is_unsharded:
                with self.span("all_gather"):
                    flat.start_gather(after)

    def finish_unshard(self) -> None:
        """Wait for the gather, and let modules see whole parameters."""
        with self.span("wait_for_unshard"):
            for flat in self.flats:
                flat.finish_gather(self.schedule.order)
        self.show_leaves()

    def use_full_precision(self, full: bool) -> None:
        """
        Compute and reduce in the parameters' own dtype, with the buffers' own, from now on; or as configured.

        Raises TrainingStateError while gradients of the other precision wait to be reduced.
        """
        if full:
            self.buffers.restore()
        else:
            self.buffers.lower()
        changing = [flat for flat in self.flats if flat.is_lowered and flat.is_full_precision != full]
        if changing and (self.has_gradients or self.has_partial):
            raise TrainingStateError(
                f"{self.label} goes {'to' if full else 'from'} full precision while gradients wait to be reduced, but "
                "should stay in training mode, or in eval mode, until they are",
                where="forward",
            )
        for flat in changing:
            flat.use_full_precision(full)
        self.is_full_precision = full

    def check_precision(self, full: bool) -> None:
        """Raise TrainingStateError in the backward of a forward in another precision: its values are gone."""
        if full != self.is_full_precision:
            raise TrainingStateError(
                f"{self.label} had {'full' if full else 'low'} precision in the forward, and has another now, but "
                "should stay in training mode, or in eval mode, from a forward to its backward",
                where="backward",
            )

    def show_full_precision(self) -> None:
        """
        Gather in the parameters' own dtype, and let modules see that until `show_originals`. Collective.

        For a forward without a graph: what a training step has begun is not touched.
        """
        self._raised_buffers = self.buffers.restore()
        with self.span("all_gather"):
            for flat in self.flats:
                views = flat.chunk.layout.views(flat.gathered())
                flat.register([nn.Parameter(view, requires_grad=False) for view in views[: len(flat.members)]])
        self._sees_leaves = True

    def show_leaves(self) -> None:
        """Let modules see whole parameters."""
        if not self._sees_leaves:
            self._sees_leaves = True
            for flat in self.flats:
                flat.register_leaves()

    def show_originals(self) -> None:
        """Let modules see what the optimizer has."""
        if self._sees_leaves:
            self._sees_leaves = False
            for flat in self.flats:
                flat.register_originals()
        if self._raised_buffers:
            self._raised_buffers = False
            self.buffers.lower()

    def reshard(self) -> None:
        """Free whole parameters."""
        self.show_originals()
        for flat in self.flats:
            flat.release()

    def reshard_until_backward(self) -> None:
        """Free whole parameters, but for what a smaller group keeps of them."""
        self.show_originals()
        for flat in self.flats:
            flat.shrink()

    def finish_reads(self) -> None:
        """Return when the host may write offloaded shards."""
        for flat in self.flats:
            flat.chunk.wait_shard_reads()

    def rename(self, name: str) -> None:
        """Be known by an FQN."""
        self.name = name
        for flat in self.flats:
            flat.name = self.label

    def give_up(self, parameters: Sequence[nn.Parameter]) -> list[Member]:
        """Let an outer unit have some parameters, whole again; the rest is sharded anew. Collective."""
        members = [member for flat in self.flats for member in flat.members]
        for flat in self.flats:
            flat.restore()
        wanted = {id(parameter) for parameter in parameters}
        self.flats = self.recipe.flat_parameters([each for each in members if id(each.parameter) not in wanted])
        self.rename(self.name)
        return [each for each in members if id(each.parameter) in wanted]

    # --- gradients ---------------------------------------------------------------------------------------------------

    def accumulate(self) -> None:
        """Keep the gradients of this backward on this rank."""
        self.took_part = False
        with self.span("accumulate"):
            for flat in self.flats:
                flat.accumulate()

    def start_reduction(self) -> list[FlatParameter]:
        """Begin to reduce the gradients of this backward, and what was kept before. Returns what is on its way."""
        self.took_part = False
        started = [flat for flat in self.flats if flat.is_trained or flat.has_gradients or flat.has_partial]
        with self.span("reduce_scatter"):
            for flat in started:
                flat.start_reduction(self.communication_hook, all_reduce=self.all_reduces)
        return started

    def reset(self) -> None:
        """Be as between two steps, after an exception: sharded, and without gradients that were not reduced."""
        self.show_originals()
        self.state = TrainingState.IDLE
        self.num_expected = 0
        self.took_part = self.keeps_graph = False
        for flat in self.flats:
            flat.reset()

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedUnit:
        raise Unsupported("copyable", "a sharded module cannot be copied: save its state dict, and load it")

    def __reduce__(self) -> Any:
        raise Unsupported("copyable", "a sharded module cannot be pickled: save its state dict")


def post_accumulate_hooks(parameters: Sequence[nn.Parameter]) -> None:
    """Call what users have registered to be called when a gradient is there: an optimizer in backward, for one."""
    for parameter in parameters:
        hooks: Mapping[int, Callable[[Tensor], None]] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        for hook in list(hooks.values()):
            hook(parameter)
