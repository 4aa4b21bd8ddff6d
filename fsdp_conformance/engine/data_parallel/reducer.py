"""
The reducer: averages gradients over the ranks of a group, bucket by bucket, while backward still runs.

    reducer = Reducer(module.named_parameters(), group)
    reducer.prepare_for_forward()
    output = module(batch)
    reducer.prepare_for_backward(tensors_in(output))
    loss(output).backward()                                 # gradients are averages when it returns

How a backward is reduced. A hook on every parameter says when its gradient is there; the gradient is scaled by
1 / world_size and copied into its bucket in one pass. Buckets are issued strictly in their order, whatever the order of
readiness, so that every rank issues the same collectives. A callback at the end of backward, on the stream that called
it, awaits them and hands the averages over.

Which backward is reduced. A forward says so (`prepare_for_backward(..., synchronise=True)`), and hooks on its outputs
tell its backward from others: of two forwards followed by two backwards, or two backwards of one forward, each is
reduced, and the backward of a forward that was not to be synchronised is left alone. What was accumulated locally is
part of what the next reduction averages.

What a parameter's gradient is afterwards is `gradient_bucket`'s matter.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
from enum import Enum
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from fsdp_conformance.engine.data_parallel.backward_watch import BackwardWatch
from fsdp_conformance.engine.data_parallel.bucket_queue import BucketQueue
from fsdp_conformance.engine.data_parallel.communication_hook import Hook, checked_hook
from fsdp_conformance.engine.data_parallel.gradient_bucket import BucketParameter, Transport
from fsdp_conformance.engine.data_parallel.gradient_hooks import GradientHooks, remove_hooks
from fsdp_conformance.engine.data_parallel.reducer_checks import check_parameters, ready_twice, unfinished
from fsdp_conformance.engine.data_parallel.reducer_config import ReducerConfig
from fsdp_conformance.engine.data_parallel.static_graph import StaticGraph
from fsdp_conformance.engine.data_parallel.unused_parameters import UsedMap, reach_of
from fsdp_conformance.engine.errors import HookMisuse, ReductionError
from fsdp_conformance.engine.flat_collectives import resolve_group
from fsdp_conformance.engine.streams import Streams


class Phase(Enum):
    """What the gradients of the next parameters are taken for."""

    IDLE = "gradients stay on this rank"
    ARMED = "the next backward is reduced; no gradient of it is there yet"
    REDUCING = "some gradients are in their buckets; buckets are issued as they fill"


class _Forward:
    """One forward, as its outputs remember it."""

    def __init__(self, *, synchronise: bool, unused: frozenset[int], early: bool) -> None:
        self.synchronise = synchronise
        self.unused = unused
        """Indices of parameters that the graph behind its outputs does not lead to."""
        self.early = early
        """Whether they can be told before backward has shown what is behind reentrant nodes."""


class Reducer:
    """
    Averages the gradients of some parameters over the ranks of a group.

    `parameters` are (name, parameter) pairs, in the same order on every rank; each requires a gradient. `sparse` names
    those whose gradients are sparse. Raises ConfigError for parameters on several devices, and for names that do not
    exist.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        process_group: ProcessGroup | None = None,
        *,
        config: ReducerConfig | None = None,
        sparse: Collection[str] = (),
    ) -> None:
        self.config = config or ReducerConfig()
        self.group: ProcessGroup = resolve_group(process_group)
        named = list(parameters)
        check_parameters(named, sparse)
        self.names = tuple(name for name, _ in named)
        self.parameters = tuple(parameter for _, parameter in named)
        self._indices = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self._static = StaticGraph(self.names) if self.config.static_graph else None
        self._finds_unused = self.config.find_unused_parameters and self._static is None
        self._tracks_used = self._finds_unused or self._static is not None  # some may have been used on no rank
        device = self.parameters[0].device if named else torch.device("cpu")
        self._used = UsedMap(len(named), group=self.group, device=device)
        self._queue = BucketQueue(
            [BucketParameter(index, name, parameter) for index, (name, parameter) in enumerate(named)],
            sparse_flags=[name in sparse for name in self.names],
            config=self.config,
            transport=Transport(self.group, None, Streams(device), alone=self.group.size() == 1),
            device=device,
        )

        self._phase = Phase.IDLE
        self._scale: Tensor | None = None
        self._divisor: Callable[[], int] | None = None
        self._frozen: frozenset[int] = frozenset()  # parameters that do not require a gradient in this reduction
        self._forwards: weakref.WeakSet[_Forward] = weakref.WeakSet()  # whose graphs are alive
        self._latest: _Forward | None = None
        self._seen: list[_Forward] = []  # those whose outputs this reduction got gradients of
        self._watch = BackwardWatch()
        self._reductions = 0
        self._rebuild_order: list[int] | None = None  # of readiness in the first reduction, until buckets are rebuilt
        self._rebuilt = False
        self._restart()

        self._leaf_handles: list[RemovableHandle] = []
        self._closed = False
        reference = weakref.ref(self)
        self._hooks = GradientHooks(
            self,
            self.parameters,
            on_gradient=partial(_on_gradient, reference),
            on_incoming=partial(_on_incoming, reference) if self._tracks_used else None,
        )

    # --- what callers ask and say ------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """What gradients are taken for at the moment."""
        return self._phase

    @property
    def rebuilt(self) -> bool:
        """Whether buckets stand in the order of readiness already."""
        return self._rebuilt

    @property
    def bucket_names(self) -> list[list[str]]:
        """The names of the parameters in each bucket, in the order of reduction."""
        return self._queue.names

    @property
    def bucket_limits(self) -> tuple[int, ...]:
        """The limit in bytes that each bucket was filled under."""
        return self._queue.limits

    @property
    def bucket_nbytes(self) -> list[int]:
        """The bytes of each bucket."""
        return self._queue.nbytes

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """
        Let `hook(state, bucket)` reduce, in place of the averaging all-reduce.

        Its result replaces the average; nothing is divided before or after it. Raises HookMisuse for a hook of the
        wrong shape, a second one, or one that comes in the middle of a reduction.
        """
        checked = checked_hook(state, hook)
        if self._queue.transport.hook is not None:
            raise HookMisuse(
                "a communication hook is registered already, but should be registered once", where="register_comm_hook"
            )
        if self._phase is Phase.REDUCING:
            raise HookMisuse(
                "gradients are being reduced, but a hook should be registered before or after",
                where="register_comm_hook",
            )
        self._queue.transport = self._queue.transport._replace(hook=checked, alone=False)

    @property
    def reductions(self) -> int:
        """How many reductions this rank took part in."""
        return self._reductions

    def used_names(self) -> list[str]:
        """The parameters that got a gradient on this rank since the last reduction."""
        return [name for index, name in enumerate(self.names) if self._used.used_here(index)]

    def mark_used(self, names: Collection[str]) -> None:
        """Count parameters as used although their gradients came before this reducer; foreign names are ignored."""
        for index, name in enumerate(self.names):
            if name in names:
                self._used.mark(index)

    def set_divisor(self, divisor: Callable[[], int] | None) -> None:
        """What the next reduction divides by, asked when it begins; None: the size of the group."""
        self._divisor = divisor

    def prepare_for_forward(self) -> None:
        """
        Called before every forward whose graph is kept. Collective once: when buckets are rebuilt.

        Raises what `expect_finished` raises.
        """
        self.expect_finished()
        if not self._watch.is_inside:
            remove_hooks(self._leaf_handles)
            self.rebuild()

    def expect_finished(self) -> None:
        """
        Raise ReductionUnfinished if the last backward ended well and left parameters without a gradient; names them.

        The reduction is dropped then; so it is, without an error, after a backward that ended in an exception, and
        training goes on from here (gradients of that backward should be dropped too, with zero_grad). Raises
        ReductionError if the reducer is not in charge of its parameters any more.
        """
        if self._closed:
            raise ReductionError(
                "the reducer was closed, or another one has taken over its parameters, but should be in charge of them",
                where="Reducer.prepare_for_forward",
            )
        if self._watch.is_inside:
            return
        if self._watch.is_open:
            self.reset()
        if self._phase is Phase.REDUCING:
            missing = [index for index in range(len(self.names)) if not self._ready[index]]
            self.reset()
            raise unfinished(self.names, missing, self.config)

    def prepare_for_backward(self, outputs: Iterable[Tensor], *, synchronise: bool = True) -> None:
        """
        Called after every forward whose graph is kept, with the tensors of its outputs.

        `synchronise=False`: the backward of this forward adds to the gradients of this rank alone.
        """
        tensors = [output for output in outputs if output.requires_grad]
        unused: frozenset[int] = frozenset()
        early = True
        if self._finds_unused and synchronise:
            found, early = reach_of(tensors, self._indices)
            unused = frozenset(range(len(self.names))) - found
        forward = _Forward(synchronise=synchronise, unused=unused, early=early)
        if synchronise:
            self._latest = forward
            self._forwards.add(forward)
            if self._phase is Phase.IDLE:
                self._arm()
        for tensor in tensors:
            handle = cast(Any, tensor).register_hook(partial(self._on_output, forward))
            if tensor.is_leaf:
                self._leaf_handles.append(handle)  # It outlives this forward.

    def shadow_backward(self) -> None:
        """
        Take part in a reduction of the other ranks without gradients of one's own. Collective.

        Issues what they issue, in the order in which they issue it: buckets, used flags, what buckets wait for.
        """
        self._queue.start_empty()
        if self._sums_used:
            self._used.start(empty=True)
        self._queue.finish_empty()
        if self._may_rebuild and self._rebuild_order is None:
            self._rebuild_order = self._queue.order
        self._reductions += 1

    def rebuild(self) -> None:
        """
        Once, after the first reduction: put buckets into the order in which gradients were ready on the group's first
        rank. Collective then, and nothing otherwise.

        Not where unused parameters are looked for: there, readiness differs from one backward to the next.
        """
        if self._rebuild_order is None or self._rebuilt:
            return
        mine, self._rebuild_order = self._rebuild_order, None
        self._rebuilt = True
        self._queue.rebuild(mine)
        self._restart()

    def reset(self) -> None:
        """
        Drop a reduction that is under way, as after an exception that every rank raised at the same place.

        What was issued is awaited, so that nothing writes into a gradient later on; the gradients of that backward are
        of no use. Nothing happens where no reduction is under way.
        """
        self._queue.abandon()
        self._used.forget_local()
        self._watch.end()
        self._phase = Phase.IDLE
        self._restart()

    def close(self) -> None:
        """Take every hook out of the parameters; the reducer is of no use afterwards."""
        self.reset()
        remove_hooks(self._leaf_handles)
        self._hooks.remove()
        self._closed = True

    # --- in backward -------------------------------------------------------------------------------------------------

    def _on_output(self, forward: _Forward, grad: Tensor) -> None:
        """The first thing that a backward through `forward` calls."""
        if not forward.synchronise:
            # Unless the same backward goes through a forward that is reduced, too.
            if self._phase is Phase.ARMED and not self._seen:
                self._phase = Phase.IDLE
            return
        begins = not self._watch.is_under_way
        if begins:
            self._watch_backward()
        if self._phase is Phase.IDLE:
            self._arm()
        if forward not in self._seen:
            self._seen.append(forward)
        if begins:
            self._queue.expect_fresh()

    def _on_gradient(self, index: int, parameter: Tensor) -> None:
        """Called when backward has dealt with a parameter, also where it had no gradient for it."""
        if not self._tracks_used and parameter.grad is not None:
            self._used.mark(index)
        if self._phase is Phase.IDLE:
            return
        if not self._watch.is_under_way:
            self._watch_backward()
        if self._phase is Phase.ARMED:
            self._begin()
        if self._static is not None and not self._static.is_last(index):
            return
        self._mark_ready(index)

    def _watch_backward(self) -> None:
        """Have `_end_of_backward` called when this backward is over. Not called if it raises."""
        if self._watch.is_open:  # The last one did, and no forward came in between.
            self.reset()
            self._arm()
        self._watch.begin(self._end_of_backward)

    def _begin(self) -> None:
        """The first gradient of a reduction is there."""
        self._phase = Phase.REDUCING
        if self._queue.transport.hook is None:
            divisor = self._divisor() if self._divisor is not None else self.group.size()
            # A 0-dim tensor on the CPU: a Python number would be made one for each gradient, at three times the cost.
            self._scale = torch.tensor(1.0 / divisor, dtype=torch.float64)
        else:
            self._scale = None
        self._divisor = None
        self._frozen = frozenset(
            index for index, parameter in enumerate(self.parameters) if not parameter.requires_grad
        )
        self._mark_unused(self._unused_at_begin() if self._static is None else self._static.begin())

    def _unused_at_begin(self) -> Collection[int]:
        """
        Parameters that this backward cannot reach: those that every living forward leaves unused, and frozen ones.

        A backward may go through several forwards, or leave out some outputs: the rest is known when it ends.
        """
        if not self._finds_unused:
            return self._frozen
        forwards = {*self._forwards, *self._seen, *([self._latest] if self._latest is not None else [])}
        if not forwards or not all(forward.early for forward in forwards):
            return self._frozen
        return sorted({*self._frozen, *frozenset.intersection(*(forward.unused for forward in forwards))})

    def _used_or_trainable(self, index: int) -> bool:
        """Whether a parameter has a gradient to be averaged, where all that are not frozen do."""
        return self._used.used_here(index) or index not in self._frozen

    def _mark_ready(self, index: int) -> None:
        if self._ready[index]:
            raise ready_twice(self.names, index, finds_unused=self._finds_unused)
        self._ready[index] = 1
        self._order.append(index)
        all_issued = self._queue.take(index, self._scale, used=self._used.used_here(index))
        if all_issued and self._sums_used:
            self._used.start()

    def _mark_unused(self, indices: Iterable[int]) -> None:
        for index in indices:
            if not self._ready[index]:
                self._mark_ready(index)

    def _end_of_backward(self) -> None:
        """Runs when a backward has ended, on the stream that called it."""
        self._watch.end()
        if self._phase is not Phase.REDUCING:
            self._seen.clear()
            return
        if self._static is not None and not self._static.is_learnt:
            for index in self._static.learn():
                self._mark_ready(index)
            self._mark_unused(range(len(self.names)))
        elif self._finds_unused:
            # Reached by the graph, perhaps, but not by this backward: outputs that the loss does not use.
            self._mark_unused(range(len(self.names)))
        if self._queue.is_issued:
            with record_function("Reducer::finish"):
                self._finish()

    def _finish(self) -> None:
        """Await every bucket, and hand the averages over."""
        used_anywhere: Callable[[int], bool] | None = None
        if self._tracks_used:
            used_anywhere = self._used.used_anywhere
        elif self._frozen:
            used_anywhere = self._used_or_trainable
        self._queue.finish(used_anywhere)
        if self._may_rebuild and self._rebuild_order is None:
            self._rebuild_order = list(self._order)
        self._reductions += 1
        self._used.forget_local()
        self._phase = Phase.IDLE
        self._restart()

    # --- between backwards -------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        if self.parameters:
            self._phase = Phase.ARMED

    def _restart(self) -> None:
        """Expect every gradient anew."""
        self._ready = bytearray(len(self.names))
        self._order: list[int] = []  # of readiness, in this reduction
        self._seen.clear()
        if self._static is not None:
            self._static.restart()
        self._queue.begin()

    @property
    def _sums_used(self) -> bool:
        """Whether this reduction asks the other ranks which parameters they used."""
        first_of_static = self._static is not None and self._reductions == 0
        return (self._finds_unused or first_of_static) and self.group.size() > 1

    @property
    def _may_rebuild(self) -> bool:
        return not self._finds_unused and not self._rebuilt and bool(self.names)


def _on_gradient(reference: weakref.ref[Reducer], index: int, parameter: Tensor) -> None:
    """A parameter's hook: it must not keep the reducer alive."""
    reducer = reference()
    if reducer is not None:
        reducer._on_gradient(index, parameter)


def _on_incoming(reference: weakref.ref[Reducer], index: int, grad: Tensor | None) -> None:
    """A parameter's hook before that one, where it is asked who was used: what comes may be undefined."""
    reducer = reference()
    if reducer is not None and grad is not None:
        reducer._used.mark(index)
