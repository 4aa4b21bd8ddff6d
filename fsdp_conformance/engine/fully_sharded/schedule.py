"""
The schedule of a tree of units: when each is gathered, resharded and reduced.

    enter        the outermost forward: users' changes are adopted, and gathers are ordered after the optimizer's writes
    forward      gather a unit (and prefetch the next), compute, reshard
    backward     gather it again (and prefetch the previous one), compute, reduce, reshard
    end          when backward returns: the rest is reduced, originals have their gradients, nothing is unsharded

A unit's backward begins with the gradient of an output and ends once the gradients of all its inputs are computed. The
gradients of its parameters are then complete, because autograd prefers to accumulate. A unit whose inputs need no
gradient ends with the backward as a whole. Which parameters were used does not matter: all ranks reduce the same units
in the same order.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import nn

from fsdp_conformance.engine.chunks.memory_pool import MemoryPool
from fsdp_conformance.engine.errors import TrainingStateError
from fsdp_conformance.engine.fully_sharded.gradient_reduction import GradientReduction, post_accumulate_hooks
from fsdp_conformance.engine.fully_sharded.inputs import Arguments, placed_inputs
from fsdp_conformance.engine.fully_sharded.order_watch import OrderWatch
from fsdp_conformance.engine.fully_sharded.unit import ShardedUnit, TrainingState, UnshardHandle
from fsdp_conformance.engine.sharding_strategy import BackwardPrefetch
from fsdp_conformance.engine.structures import has_unknown, tensors_in

#: Reductions under way at once if waiting blocks the host. Each keeps a buffer as large as a whole unit.
MAX_REDUCTIONS = 2


class UnitSchedule:
    """The schedule of some units, which it does not keep alive."""

    def __init__(
        self,
        *,
        backward_prefetch: BackwardPrefetch | None,
        forward_prefetch: bool,
    ) -> None:
        self.backward_prefetch = backward_prefetch
        self.forward_prefetch = forward_prefetch
        self._units: list[weakref.ref[ShardedUnit]] = []
        self._stack: list[ShardedUnit] = []
        self._in_backward = False
        self._written: torch.Event | None = None
        # Indices into `_units`, in the order in which forwards began and ended.
        self._began: list[int] = []
        self._began_before: list[int] = []
        self._ended: list[int] = []
        self._cursor = 0
        # How often each unit was called since the last backward, in forwards that a backward may follow.
        self._calls: Counter[int] = Counter()
        self._reductions: deque[tuple[ShardedUnit, GradientReduction]] = deque()
        # Parameters of units with several calls that have got a gradient in the backward under way.
        self._waiting: dict[nn.Parameter, None] = {}
        self.order = OrderWatch()
        """Checks that peers run the same units."""

    # --- units -------------------------------------------------------------------------------------------------------

    @property
    def units(self) -> list[ShardedUnit]:
        """The units, inner ones before those around them."""
        return [unit for reference in self._units if (unit := reference()) is not None]

    def add(self, unit: ShardedUnit) -> None:
        """Schedule a unit here from now on."""
        unit.index, unit.schedule = len(self._units), self
        self._units.append(weakref.ref(unit))

    @property
    def is_idle(self) -> bool:
        """True if no unit is in a forward or a backward."""
        return not self._stack and not self._in_backward

    @property
    def is_in_forward(self) -> bool:
        """True if a unit is in its forward."""
        return bool(self._stack)

    def check_idle(self, unit: ShardedUnit, where: str) -> None:
        """Raise TrainingStateError inside a forward, a backward, or `summon_full_params`."""
        self.recover_if_interrupted()
        if unit.state is not TrainingState.IDLE or not self.is_idle:
            raise TrainingStateError(
                f"{unit.label} is in a step ({unit.state.name}): call this outside forward and backward", where=where
            )

    # --- forward -----------------------------------------------------------------------------------------------------

    def before_forward(self, unit: ShardedUnit, arguments: Arguments, *, training: bool = True) -> Arguments:
        """
        Unshard, and prepare the inputs. Collective. `training`: whether the unit's module is in training mode.

        Raises TrainingStateError if the mode implies another precision while gradients have yet to be reduced.
        """
        if _in_own_backward(unit):
            # Recomputed by a checkpoint in the unit's own backward: the hooks are in place.
            self._unshard(unit)
            return self._prepared(unit, arguments, entering=self._is_outermost(unit))
        # A forward inside backward is a recomputation: it belongs to the iteration that is under way.
        if not self._stack and not _inside_backward():
            self._enter()
        entering = not self._stack
        unit.move(TrainingState.FORWARD)
        self._stack.append(unit)
        with unit.span("before_forward"):
            full = not training and unit.mixed_precision.full_precision_in_eval
            if full and not torch.is_grad_enabled():
                unit.show_full_precision()
                return self._placed(unit, arguments) if entering else arguments
            unit.use_full_precision(full)
            self._note_begin(unit)
            # This unit's gather before those ahead: all gathers share a stream, so it would have to wait for them.
            unit.start_unshard(self._written, self.order)
            for ahead in self._ahead_in_forward(unit):
                ahead.start_unshard(self._written, self.order)
            unit.finish_unshard(self.order)
            # What is recomputed begins in the middle of the model: its inputs were prepared by the outermost unit.
            is_first = entering and (self._is_outermost(unit) or not _inside_backward())
            arguments = self._prepared(unit, arguments, entering=is_first)
            # The graph of the first forward has the hooks. A second set would end the unit's backward twice.
            if not self._is_recomputing(unit):
                arguments = unit.boundary.enter(arguments, partial(self.after_backward, unit))
        return arguments

    def after_forward(self, unit: ShardedUnit, output: object) -> None:
        """
        Watch the outputs, and reshard.

        Raises UsedWhileSharded if an output is a parameter of the unit, and its memory is freed.
        """
        if _in_own_backward(unit):
            return
        self.watch(unit, output)
        while True:
            # Units of several modules, some of which did not run, may be above it.
            closed_unit = self._stack.pop()
            # A unit that calls itself is closed once, with its outer forward.
            if closed_unit not in self._stack:
                self._close(closed_unit)
            if closed_unit is unit:
                break
        if not self._stack and not _inside_backward():
            self._leave()
        unit.check_returned(output)

    def watch(self, unit: ShardedUnit, output: object) -> None:
        """Watch some outputs of a unit, whose backward begins the unit's."""
        if not torch.is_grad_enabled():
            return
        if self._is_recomputing(unit):
            unit.keeps_graph = unit.keeps_graph or any(tensor.requires_grad for tensor in tensors_in(output))
            return
        unit.keeps_graph |= unit.boundary.leave(output, partial(self.before_backward, unit, unit.is_full_precision))
        if unit.is_trained and has_unknown(output):
            # No hook on the output will say when its backward begins. So it stays unsharded, and its leaves say that
            # it takes part.
            unit.keeps_graph = unit.is_held = True

    def _close(self, unit: ShardedUnit) -> None:
        """A unit's forward is over: reshard it, unless its backward will need it soon."""
        with unit.span("after_forward"):
            recomputing = self._is_recomputing(unit)
            keeps_graph, unit.keeps_graph = unit.keeps_graph, False
            unit.num_expected += keeps_graph and not recomputing
            self._ended.append(unit.index)
            unit.move(TrainingState.IDLE)
            unit.boundary.forget()
            unit.show_originals()
            entered = not self._stack and not _inside_backward()
            # These stay: a recomputed unit, whose backward is about to run; the outermost one, whose backward comes
            # first; and a held one, whose backward no hook announces.
            with self._lingering(unit):
                if not keeps_graph:
                    unit.reshard()
                elif unit.reshard_after_forward and not (recomputing or entered or unit.is_held):
                    unit.reshard_until_backward()

    @contextmanager
    def _lingering(self, unit: ShardedUnit) -> Iterator[None]:
        """
        A context in which freed memory stays with its block until the next gather has begun.

        Otherwise the allocator would give the memory of this unit to that gather, which would then wait for this unit's
        computation: communication and computation would take turns (R080 found that).
        """
        # Not if the stack is empty: no gather of this forward follows. Not with prefetching: that gather has begun, and
        # what lingers would be a third unit in memory. Not in backward, for the same reason: there gathers are issued
        # ahead, and gradients take memory, too.
        ahead = self.forward_prefetch or unit.ahead_in_forward is not None
        with ExitStack() as stack:
            if self._stack and not ahead and not _inside_backward():
                for pool in self._pools([unit]):
                    stack.enter_context(pool.lingering())
            yield

    @staticmethod
    def _pools(units: Iterable[ShardedUnit]) -> set[MemoryPool]:
        return {flat.storage.pool for unit in units for flat in unit.flats}

    def forward_failed(self, unit: ShardedUnit) -> None:
        """Undo a forward that an exception has left, of this unit and of the units inside."""
        if _in_own_backward(unit):
            # A checkpoint stops its recomputation with an exception. The backward goes on.
            return
        while self._stack:
            failed = self._stack.pop()
            if failed.state is TrainingState.FORWARD:
                failed.move(TrainingState.IDLE)
                failed.boundary.forget()
                failed.show_originals()
                # A checkpoint stops its recomputation with an exception, and needs what it saved right away.
                if not _inside_backward():
                    failed.reshard()
            if failed is unit:
                break
        if not self._stack and not _inside_backward():
            self._leave()

    def _enter(self) -> None:
        """Begin an iteration, or a micro-batch of one."""
        self.recover_if_interrupted()
        self.order.begin()
        units = self.units
        self._began, self._began_before, self._ended = [], self._began, []
        has_graph = torch.is_grad_enabled()
        for unit in units:
            unit.follow_users()
            # Forwards whose output was dropped never see a backward. They must not count in the next iteration. An
            # evaluation between a forward and its backward is none: without the count, a unit that was called twice
            # would be reduced twice.
            if has_graph:
                unit.num_expected = 0
        # Every gather of this iteration is ordered after the optimizer's writes, and after nothing later. Not
        # before `follow_users`, which may write to shards. ColossalAI's first prefetch did not wait, and could read
        # weights from before the step (ColossalAI#5803).
        self._written = next((flat.storage.pool.streams.record() for unit in units for flat in unit.flats), None)

    def _note_begin(self, unit: ShardedUnit) -> None:
        place = len(self._began)
        self._began.append(unit.index)
        # Peers are compared in the first iteration and where this rank's own order changes: see `order_watch`.
        if self._began_before[place : place + 1] != [unit.index]:
            self.order.is_on = True
        for flat in unit.flats:
            flat.note_forward()

    def _leave(self) -> None:
        """End the outermost forward: free units that were gathered ahead but not reached, and memory that lingers."""
        for pool in self._pools(self.units):
            pool.settle()
        ran = set(self._ended)
        for unit in self.units:
            if unit.is_unsharded and unit.index not in ran and unit.state is TrainingState.IDLE and not unit.is_kept:
                unit.reshard()
            if not torch.is_grad_enabled():
                # No backward follows, at whose end this would be done. The host may write offloaded shards next.
                unit.finish_reads()
        if torch.is_grad_enabled():
            self._calls.update(self._began)
        else:
            self.order.judge()
            self.order.is_on = False
        self._cursor = len(self._ended)

    def _prepared(self, unit: ShardedUnit, arguments: Arguments, *, entering: bool) -> Arguments:
        precision = unit.mixed_precision
        if unit.is_full_precision:
            return self._placed(unit, arguments) if entering else arguments
        casts = precision.cast_root_forward_inputs if entering else precision.cast_forward_inputs
        dtype = precision.param_dtype if casts else None
        if not entering and dtype is None:
            return arguments
        return self._placed(unit, arguments, dtype)

    def _is_outermost(self, unit: ShardedUnit) -> bool:
        return unit is self.units[-1]

    def _placed(self, unit: ShardedUnit, arguments: Arguments, dtype: torch.dtype | None = None) -> Arguments:
        """Inputs where the unit computes; one without parameters computes where the others do."""
        owner = unit if unit.flats else next((each for each in self.units if each.flats), None)
        return arguments if owner is None else placed_inputs(arguments, owner.device, dtype)

    def _ahead_in_forward(self, unit: ShardedUnit) -> list[ShardedUnit]:
        if unit.ahead_in_forward is not None:
            return [each for reference in unit.ahead_in_forward if (each := reference()) is not None]
        if not self.forward_prefetch or _inside_backward():
            return []
        place = len(self._began)  # of the next one, if all is as in the last iteration
        if self._began_before[place - 1 : place] != [unit.index]:
            return []
        return self._at(self._began_before[place : place + 1])

    def _is_recomputing(self, unit: ShardedUnit) -> bool:
        """
        True if a forward inside of backward repeats one whose graph is there.

        Then the hooks of that one do all. A reentrant checkpoint had no graph: its forward in backward is the one that
        counts.
        """
        return unit.num_expected > 0 and _inside_backward()

    # --- by hand -----------------------------------------------------------------------------------------------------

    def unshard(self, unit: ShardedUnit) -> UnshardHandle:
        """Begin to gather a unit now; its modules see whole parameters after waiting for the handle. Collective."""
        if self.is_idle:
            unit.follow_users()
        unit.start_unshard(None, self.order)
        return UnshardHandle(unit, self.order)

    def reshard(self, unit: ShardedUnit) -> None:
        """Free a unit's whole parameters now. Raises TrainingStateError in its forward or backward."""
        if unit.state is not TrainingState.IDLE:
            raise TrainingStateError(
                f"cannot reshard a unit in {unit.state.name}: wait until its forward or backward has ended",
                where=f"reshard of {unit.label}",
            )
        unit.reshard()

    # --- backward ----------------------------------------------------------------------------------------------------

    def before_backward(self, unit: ShardedUnit, full: bool = False) -> None:
        """
        A gradient of an output of the unit has arrived: unshard. Collective. `full`: whether the forward was in full
        precision.
        """
        self._begin_backward()
        unit.check_precision(full)
        if unit.state is TrainingState.BACKWARD:
            # It has several outputs, and this is not the first gradient.
            return
        # Before the gather, which would bring new values to the activations of old ones. A state dict loaded at this
        # point was silently ignored in FSDP1 (pytorch#117421).
        for flat in unit.flats:
            flat.check_unwritten()
        unit.move(TrainingState.BACKWARD)
        unit.took_part = True
        with unit.span("before_backward"):
            self._unshard(unit, ahead=self.backward_prefetch is BackwardPrefetch.BACKWARD_PRE)

    def note_gradient(self, unit: ShardedUnit) -> None:
        """A parameter has received a gradient: its unit takes part, even if no output was seen to."""
        self._begin_backward()
        unit.took_part = True

    def _begin_backward(self) -> None:
        if not self._in_backward:
            self._in_backward = True
            _call_at_end(self._end_backward)

    def after_backward(self, unit: ShardedUnit) -> None:
        """The gradients of all inputs of the unit are computed: reduce, and reshard. Collective."""
        # Until its last forward has had its backward: gradients of all of them are reduced together.
        unit.num_expected -= 1
        done = unit.num_expected <= 0
        with unit.span("after_backward"):
            unit.move(TrainingState.IDLE)
            unit.show_originals()
            # Before the gradient buffer is leased: the two are never held together.
            if unit.reshards_after_backward and (unit.reshard_after_forward or (done and unit.sync_gradients)):
                unit.reshard()
            if done:
                self._reduce(unit)
            # After the reduction was started and this unit was freed: one unit less in memory than BACKWARD_PRE.
            if self.backward_prefetch is BackwardPrefetch.BACKWARD_POST:
                for ahead in self._ahead_in_backward(unit):
                    ahead.start_unshard(self._written, self.order)

    def recover(self) -> None:
        """
        Return to the state between two steps, after an exception in forward or backward.

        All ranks must have issued the same collectives, as is the case if the exception was raised at the same point on
        every rank. Gradients that were reduced before it remain: drop them with zero_grad.
        """
        self._stack.clear()
        self._reductions.clear()
        self._waiting.clear()
        self._calls.clear()
        self._in_backward = False
        self.order.forget()
        for unit in self.units:
            unit.reset()
        for pool in self._pools(self.units):
            # Also the cached blocks that gradients were collected in: the end of backward would have freed them.
            pool.trim()

    def recover_if_interrupted(self) -> None:
        """`recover`, if an exception ended a backward."""
        # Autograd does not run the callback at the end of a backward that raises: the flag is still set.
        if self._in_backward and not _inside_backward():
            self.recover()

    def _unshard(self, unit: ShardedUnit, *, ahead: bool = False) -> None:
        unit.start_unshard(self._written, self.order)
        if ahead or unit.ahead_in_backward is not None:
            for target in self._ahead_in_backward(unit):
                target.start_unshard(self._written, self.order)
        unit.finish_unshard(self.order)

    def _ahead_in_backward(self, unit: ShardedUnit) -> list[ShardedUnit]:
        """The units whose backward is expected next: the ones before it in forward, or those that it lists."""
        if unit.ahead_in_backward is not None:
            return [each for reference in unit.ahead_in_backward if (each := reference()) is not None]
        place = min(self._cursor, len(self._ended)) - 1
        while place >= 0 and self._ended[place] != unit.index:
            place -= 1
        if place < 0:
            return []
        self._cursor = place
        while place > 0:
            place -= 1
            units = self._at(self._ended[place : place + 1])
            if units and units[0].flats and units[0] is not unit:
                return units
        return []

    def _reduce(self, unit: ShardedUnit) -> None:
        if not unit.sync_gradients:
            unit.accumulate()
            return
        # Here, because all ranks reduce the same units in the same order: collectives match if each rank issues its
        # all-reduces at the same point.
        for _, reduction in self._reductions:
            reduction.advance()
        # Before the next one opens its buffer. Where streams order collectives, all buffers are back already.
        while self._reductions and len(self._reductions) >= MAX_REDUCTIONS and not unit.runs_ahead:
            self._finish_oldest()
        self._reductions += [(unit, reduction) for reduction in unit.start_reduction(self.order)]

    def _finish_oldest(self) -> None:
        # The oldest, on every rank: finishing may issue the all-reduce of hybrid sharding.
        unit, reduction = self._reductions.popleft()
        parameters = reduction.finish(self.order)
        if self._calls[unit.index] > 1:
            # Its backward may end once for each call, as under a reentrant checkpoint, or in two forwards. An optimizer
            # that stepped now would miss the other gradients, which then would be computed with its new values.
            self._waiting |= dict.fromkeys(parameters)
        else:
            post_accumulate_hooks(parameters)

    def _end_backward(self) -> None:
        """End the backward: reduce what is left, call the parameters' hooks, and free memory. Collective."""
        units = self.units
        # Units whose inputs need no gradient have not been reduced yet. They are now, in the order of other backwards.
        ended = self._at(reversed(self._ended))
        for unit in dict.fromkeys([*ended, *units]):
            if not unit.is_kept:
                unit.reshard()
            if unit.took_part or unit.has_gradients or (unit.all_reduces and unit.has_partial):
                self._reduce(unit)
        while self._reductions:
            self._finish_oldest()
        waiting, self._waiting = self._waiting, {}
        self._calls.clear()
        post_accumulate_hooks(list(waiting))
        for unit in units:
            unit.state = TrainingState.IDLE
            if not unit.is_kept:
                unit.reshard()
            unit.finish_reads()
        for pool in self._pools(units):
            if pool.streams.exist:
                # Its allocator keeps memory for the next step. The CPU's does not, and fresh pages are expensive.
                pool.trim()
        # Before `judge`, which may raise: the backward has ended even if ranks turn out to disagree.
        self._in_backward = False
        self.order.judge()
        self.order.is_on = False

    def _at(self, indices: Iterable[int]) -> list[ShardedUnit]:
        units = (self._units[index]() for index in indices)
        return [unit for unit in units if unit is not None]


def _in_own_backward(unit: ShardedUnit) -> bool:
    """True if the unit is in its backward now, rather than left in that state by an exception."""
    return unit.state is TrainingState.BACKWARD and _inside_backward()


def _inside_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _call_at_end(function: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(function)
