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

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.profiler import record_function
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from fsdp_conformance.engine.bucket_assignment import DEFAULT_LIMITS, NO_LIMIT, BucketAssignment, bucket_assignment
from fsdp_conformance.engine.communication_hook import Hook, checked_hook
from fsdp_conformance.engine.errors import (
    GraphChanged,
    HookMisuse,
    MarkedReadyTwice,
    ReductionError,
    ReductionUnfinished,
)
from fsdp_conformance.engine.flat_collectives import resolve_group
from fsdp_conformance.engine.gradient_bucket import Bucket, BucketParameter, DenseBucket, SparseBucket, Transport
from fsdp_conformance.engine.streams import Streams
from fsdp_conformance.engine.unused_parameters import UsedMap, reach_of
from fsdp_conformance.errors import ConfigError

#: How many names an error lists, unless TORCH_DISTRIBUTED_DEBUG is DETAIL.
NAMES_LISTED = 20
_c10d: Any = dist  # names that torch.distributed has, and does not list
_MISSING = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class ReducerConfig:
    """How gradients are reduced. Equal on every rank."""

    bucket_limits: tuple[int, ...] = DEFAULT_LIMITS
    """Bytes at which the first, second, ... bucket is closed; the last repeats."""
    find_unused_parameters: bool = False
    """Parameters may take no part in a forward, on some ranks or on all."""
    gradient_as_bucket_view: bool = False
    """Gradients are views into buckets that live as long as the reducer."""
    static_graph: bool = False
    """
    Every iteration has the graph of the first one: which parameters are used, and how often each gets a gradient, is
    learnt there. Needed where a parameter gets several gradients in one backward (reentrant checkpointing).
    """

    def __post_init__(self) -> None:
        if not self.bucket_limits or min(self.bucket_limits) < 0:
            raise ConfigError(
                [f"bucket_limits={self.bucket_limits}, but should be one or more numbers of bytes, none negative"],
                where="ReducerConfig",
            )


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


class _EndOfBackward:
    """What autograd calls when a backward has ended well."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer

    def __call__(self) -> None:
        self._reducer._end_of_backward()


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
        _check(named, sparse)
        self.names = tuple(name for name, _ in named)
        self.parameters = tuple(parameter for _, parameter in named)
        self._indices = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self._sparse_flags = [name in sparse for name in self.names]
        device = self.parameters[0].device if named else torch.device("cpu")
        self._transport = Transport(self.group, None, Streams(device), alone=self.group.size() == 1)
        self._static = self.config.static_graph
        self._finds_unused = self.config.find_unused_parameters and not self._static
        self._tracks_used = self._finds_unused or self._static  # whether a parameter may have been used on no rank
        self._device = device
        self._used = UsedMap(len(named), group=self.group, device=device)

        self._phase = Phase.IDLE
        self._ready = bytearray(len(named))
        self._order: list[int] = []  # of readiness, in this reduction
        self._next = 0  # the bucket to be issued next
        self._scale: Tensor | None = None
        self._divisor: Callable[[], int] | None = None
        self._frozen: frozenset[int] = frozenset()  # parameters that do not require a gradient in this reduction
        self._forwards: weakref.WeakSet[_Forward] = weakref.WeakSet()  # whose graphs are alive
        self._latest: _Forward | None = None
        self._seen: list[_Forward] = []  # those whose outputs this reduction got gradients of
        self._watch: weakref.ref[_EndOfBackward] | None = None  # what autograd calls at the end of this backward
        self._reductions = 0
        self._counts: list[int] | None = None  # static graph: gradients of each parameter in one backward
        self._left: list[int] = []  # static graph: how many of them are still to come
        self._rebuild_order: list[int] | None = None  # of readiness in the first reduction, until buckets are rebuilt
        self._rebuilt = False

        order = list(range(len(named)))[::-1]  # backward goes from the last to the first
        self._lay_out(order)
        # Hooks of the tensors, not of their AccumulateGrad nodes: a parameter that is moved or cast gets another node.
        self._handles: list[RemovableHandle] = []
        reference = weakref.ref(self)
        for index, parameter in enumerate(self.parameters):
            if parameter.requires_grad:
                untyped: Any = parameter
                if self._tracks_used:
                    self._handles.append(untyped.register_hook(partial(_on_incoming, reference, index)))
                self._handles.append(
                    untyped.register_post_accumulate_grad_hook(partial(_on_gradient, reference, index))
                )
        self._leaf_handles: list[RemovableHandle] = []
        self._closed = False
        # Hooks that a forgotten reducer left behind would only cost time.
        self._finalizer = weakref.finalize(self, _remove, self._handles)
        self._finalizer.atexit = False
        for parameter in self.parameters:
            former = _MANAGERS.get(id(parameter))
            if former is not None:
                former.close()
            _MANAGERS[id(parameter)] = self

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
        return [[entry.name for entry in bucket.parameters] for bucket in self._buckets]

    @property
    def bucket_limits(self) -> tuple[int, ...]:
        """The limit in bytes that each bucket was filled under."""
        return self._assignment.limits

    @property
    def bucket_nbytes(self) -> list[int]:
        """The bytes of each bucket."""
        return [bucket.nbytes for bucket in self._buckets]

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """
        Let `hook(state, bucket)` reduce, in place of the averaging all-reduce.

        Its result replaces the average; nothing is divided before or after it. Raises HookMisuse for a hook of the
        wrong shape, a second one, or one that comes in the middle of a reduction.
        """
        checked = checked_hook(state, hook)
        if self._transport.hook is not None:
            raise HookMisuse(
                "a communication hook is registered already, but should be registered once", where="register_comm_hook"
            )
        if self._phase is Phase.REDUCING:
            raise HookMisuse(
                "gradients are being reduced, but a hook should be registered before or after",
                where="register_comm_hook",
            )
        self._transport = self._transport._replace(hook=checked, alone=False)

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
        if not self._is_inside_backward():
            self._remove_leaf_hooks()
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
        if self._is_inside_backward():
            return
        if self._watch is not None:
            self.reset()
        if self._phase is Phase.REDUCING:
            missing = [index for index in range(len(self.names)) if not self._ready[index]]
            self.reset()
            raise _unfinished(self._listed(missing), self.config)

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
        for bucket in self._buckets:
            bucket.start_empty(self._transport)
        if self._sums_used:
            self._used.start(empty=True)
        for bucket in self._buckets:
            bucket.finish_empty(self._transport)
        if self._may_rebuild and self._rebuild_order is None:
            self._rebuild_order = [entry.index for bucket in self._buckets for entry in bucket.parameters]
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
        order = self._order_of_first_rank(mine)
        if sorted(order) != list(range(len(self.names))):
            ready = len(order) - order.count(_MISSING)
            raise ReductionError(
                f"{ready} gradients were ready in the first backward, but should be {len(self.names)}",
                where="Reducer.rebuild",
            )
        self._lay_out(order)

    def reset(self) -> None:
        """
        Drop a reduction that is under way, as after an exception that every rank raised at the same place.

        What was issued is awaited, so that nothing writes into a gradient later on; the gradients of that backward are
        of no use. Nothing happens where no reduction is under way.
        """
        for bucket in self._buckets:
            # A collective that failed says so to whoever issues the next one.
            with contextlib.suppress(RuntimeError):
                bucket.abandon(self._transport)
        self._used.forget_local()
        self._watch = None
        self._phase = Phase.IDLE
        self._restart()

    def close(self) -> None:
        """Take every hook out of the parameters; the reducer is of no use afterwards."""
        self.reset()
        self._remove_leaf_hooks()
        self._finalizer()
        self._closed = True

    # --- in backward -------------------------------------------------------------------------------------------------

    def _on_output(self, forward: _Forward, grad: Tensor) -> None:
        """The first thing that a backward through `forward` calls."""
        if not forward.synchronise:
            # Unless the same backward goes through a forward that is reduced, too.
            if self._phase is Phase.ARMED and not self._seen:
                self._phase = Phase.IDLE
            return
        begins = not self._is_watching()
        if begins:
            self._watch_backward()
        if self._phase is Phase.IDLE:
            self._arm()
        if forward not in self._seen:
            self._seen.append(forward)
        if begins:
            for bucket in self._buckets:
                bucket.expect_fresh()

    def _on_gradient(self, index: int, parameter: Tensor) -> None:
        """Called when backward has dealt with a parameter, also where it had no gradient for it."""
        if not self._tracks_used and parameter.grad is not None:
            self._used.mark(index)
        if self._phase is Phase.IDLE:
            return
        if not self._is_watching():
            self._watch_backward()
        if self._phase is Phase.ARMED:
            self._begin()
        if self._static and not self._is_last_of_static(index):
            return
        self._mark_ready(index)

    def _watch_backward(self) -> None:
        """Have `_end_of_backward` called when this backward is over. Not called if it raises."""
        if self._watch is not None:  # The last one did, and no forward came in between.
            self.reset()
            self._arm()
        watch = _EndOfBackward(self)
        self._watch = weakref.ref(watch)
        Variable._execution_engine.queue_callback(watch)

    def _is_watching(self) -> bool:
        """Whether a backward is under way at whose end `_end_of_backward` is called."""
        # Autograd alone holds what it will call, and lets go of it when a backward raises.
        return self._watch is not None and self._watch() is not None

    def _is_inside_backward(self) -> bool:
        """Whether the caller runs inside of it: a forward that is computed again."""
        return self._is_watching() and torch._C._current_graph_task_id() != -1

    def _begin(self) -> None:
        """The first gradient of a reduction is there."""
        self._phase = Phase.REDUCING
        if self._transport.hook is None:
            divisor = self._divisor() if self._divisor is not None else self.group.size()
            # A 0-dim tensor on the CPU: a Python number would be made one for each gradient, at three times the cost.
            self._scale = torch.tensor(1.0 / divisor, dtype=torch.float64)
        else:
            self._scale = None
        self._divisor = None
        self._frozen = frozenset(
            index for index, parameter in enumerate(self.parameters) if not parameter.requires_grad
        )
        if self._counts is not None:
            self._left = list(self._counts)
            self._mark_unused(index for index, count in enumerate(self._counts) if not count)
        elif not self._static:
            self._mark_unused(self._unused_at_begin())

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

    def _is_last_of_static(self, index: int) -> bool:
        """Whether parameter `index` gets no further gradient in this backward, as the first one has shown."""
        if self._counts is None:
            self._left[index] -= 1  # Counted downwards: see _learn_graph.
            self._order.append(index)
            return False
        if not self._left[index]:
            raise GraphChanged(
                f"parameter {self.names[index]} got {self._counts[index] + 1} gradients in this backward, but should "
                f"get {self._counts[index]} as in the first one",
                where="backward",
                hint="static_graph=True is for models whose graph never changes.",
            )
        self._left[index] -= 1
        return self._left[index] == 0

    def _mark_ready(self, index: int) -> None:
        if self._ready[index]:
            raise _ready_twice(self._listed([index]), finds_unused=self._finds_unused)
        self._ready[index] = 1
        self._order.append(index)
        bucket, place = self._places[index]
        bucket.take(place, self._scale, self._transport, used=self._used.used_here(index))
        if not bucket.pending:
            self._issue()

    def _mark_unused(self, indices: Iterable[int]) -> None:
        for index in indices:
            if not self._ready[index]:
                self._mark_ready(index)

    def _issue(self) -> None:
        """Issue the buckets that are full, up to the first that is not."""
        while self._next < len(self._buckets) and not self._buckets[self._next].pending:
            bucket = self._buckets[self._next]
            with record_function(f"Reducer::reduce {bucket.index} of {bucket.count}"):
                bucket.start(self._transport)
            self._next += 1
        if self._next == len(self._buckets) and self._sums_used:
            self._used.start()

    def _end_of_backward(self) -> None:
        """Runs when a backward has ended, on the stream that called it."""
        self._watch = None
        if self._phase is not Phase.REDUCING:
            self._seen.clear()
            return
        if self._static and self._counts is None:
            self._learn_graph()
        elif self._finds_unused:
            # Reached by the graph, perhaps, but not by this backward: outputs that the loss does not use.
            self._mark_unused(range(len(self.names)))
        if self._next == len(self._buckets):
            with record_function("Reducer::finish"):
                self._finish()

    def _learn_graph(self) -> None:
        """The end of the first backward of a static graph: now it is known who gets how many gradients."""
        self._counts = [-left for left in self._left]
        last: dict[int, int] = {index: tick for tick, index in enumerate(self._order)}
        self._order = []
        for index in sorted(last, key=last.__getitem__):
            self._mark_ready(index)
        self._mark_unused(range(len(self.names)))

    def _finish(self) -> None:
        """Await every bucket, and hand the averages over."""
        used_anywhere: Callable[[int], bool] | None = None
        if self._tracks_used:
            used_anywhere = self._used.used_anywhere
        elif self._frozen:
            used_anywhere = self._used_or_trainable
        for bucket in self._buckets:
            bucket.finish(self._transport, used_anywhere)
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
        self._order = []
        self._next = 0
        self._left = [0] * len(self.names)
        self._seen.clear()
        for bucket in self._buckets:
            bucket.begin()

    def _lay_out(self, order: Sequence[int]) -> None:
        """Put the parameters into buckets, in this order. What the buckets before held goes first."""
        self._buckets: list[Bucket] = []
        self._places: dict[int, tuple[Bucket, int]] = {}
        self._assignment = BucketAssignment((), ())
        if order:
            tensors = [self.parameters[index] for index in order]
            self._assignment = bucket_assignment(tensors, self.config.bucket_limits, self._sparse_flags, order)
        for number, indices in enumerate(self._assignment.buckets):
            entries = [BucketParameter(index, self.names[index], self.parameters[index]) for index in indices]
            bucket = self._new_bucket(number, entries, sparse=self._assignment.limits[number] == NO_LIMIT)
            self._buckets.append(bucket)
            self._places.update({entry.index: (bucket, place) for place, entry in enumerate(entries)})
        self._restart()

    def _new_bucket(self, number: int, entries: Sequence[BucketParameter], *, sparse: bool) -> Bucket:
        count = len(self._assignment.buckets)
        if sparse and self._sparse_flags[entries[0].index]:
            return SparseBucket(number, count, entries)
        return DenseBucket(number, count, entries, gradient_as_view=self.config.gradient_as_bucket_view)

    def _order_of_first_rank(self, mine: Sequence[int]) -> list[int]:
        """The first rank's order. Collective."""
        if self.group.size() == 1:
            return list(mine)
        # The same number of elements on every rank, so that a wrong order is an error and no mismatched collective.
        padded = [*mine, *[_MISSING] * len(self.names)][: len(self.names)]
        order = torch.tensor(padded, dtype=torch.int64).to(self._device)
        dist.broadcast(order, src=dist.get_global_rank(self.group, 0), group=self.group)
        return [int(index) for index in order.tolist()]

    @property
    def _sums_used(self) -> bool:
        """Whether this reduction asks the other ranks which parameters they used."""
        first_of_static = self._static and self._reductions == 0
        return (self._finds_unused or first_of_static) and self.group.size() > 1

    @property
    def _may_rebuild(self) -> bool:
        return not self._finds_unused and not self._rebuilt and bool(self.names)

    def _remove_leaf_hooks(self) -> None:
        for handle in self._leaf_handles:
            handle.remove()
        self._leaf_handles.clear()

    def _listed(self, indices: Sequence[int]) -> list[str]:
        """Names with indices; not more than NAMES_LISTED unless the debug level asks for all."""
        most = len(indices) if _c10d.get_debug_level() == _c10d.DebugLevel.DETAIL else NAMES_LISTED
        names = [f"{self.names[index]} (index {index})" for index in indices[:most]]
        return names + ([f"and {len(indices) - most} more"] if len(indices) > most else [])


#: Who averages which parameter (by id: a reducer keeps its parameters alive). Two at a time would average twice.
_MANAGERS: weakref.WeakValueDictionary[int, Reducer] = weakref.WeakValueDictionary()


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


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


def _check(named: Sequence[tuple[str, nn.Parameter]], sparse: Collection[str]) -> None:
    names = [name for name, _ in named]
    problems = []
    for kind, wrong in (
        ("appear more than once", sorted(name for name, count in Counter(names).items() if count > 1)),
        ("are named as sparse, but should be among the parameters", sorted(set(sparse) - set(names))),
    ):
        if wrong:
            problems.append(f"{', '.join(wrong)} {kind}")
    devices = sorted({str(parameter.device) for _, parameter in named})
    if len(devices) > 1:
        problems.append(f"parameters are on {' and '.join(devices)}, but should be on one device")
    if "meta" in devices:
        problems.append("parameters are on the meta device, but should have values")
    if problems:
        raise ConfigError(problems, where="Reducer")


def _unfinished(names: Sequence[str], config: ReducerConfig) -> ReductionUnfinished:
    if config.static_graph:
        hint = "The graph was declared static: every iteration must use the parameters that the first one used."
    else:
        hint = (
            "Parameters that a forward does not use, or that the loss does not depend on, need "
            "find_unused_parameters=True; the outputs that the loss is made of must be returned by forward. Every "
            "rank must use all others in the backward before."
        )
    return ReductionUnfinished(
        f"the last backward gave no gradient to {', '.join(names)}, but should give one to every parameter before the "
        "next forward",
        where="Reducer.prepare_for_forward",
        hint=hint,
    )


def _ready_twice(names: Sequence[str], *, finds_unused: bool) -> MarkedReadyTwice:
    hint = (
        "Likely causes: a parameter is used outside of forward and got a backward of its own; several backwards of one "
        "forward share it; or it is used in several reentrant checkpoints, which static_graph=True allows."
    )
    if finds_unused:
        hint += (
            " Or it was taken for unused, because the graph behind forward's outputs does not show its use: return "
            "every output that the loss depends on, in lists, tuples, dicts or dataclasses."
        )
    return MarkedReadyTwice(
        f"parameter {', '.join(names)} got a second gradient in one reduction, but should get one",
        where="backward",
        hint=hint,
    )
