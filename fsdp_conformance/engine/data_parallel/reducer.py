"""
The reducer: averages gradients over the ranks of a group, bucket by bucket, while backward runs.

    reducer = Reducer(module.named_parameters(), group)
    reducer.prepare_for_forward()
    output = module(batch)
    reducer.prepare_for_backward(tensors_in(output))
    loss(output).backward()                                 # gradients are averages when it returns

How a backward is reduced. A hook on every parameter reports that its gradient is ready; the gradient is scaled by
1 / world_size and copied into its bucket in one pass. Buckets are issued in a fixed order, whatever the order in which
gradients become ready, so every rank issues the same collectives. A callback at the end of backward, on the stream that
called it, waits for them and stores the averages.

Which backward is reduced. Each forward decides (`prepare_for_backward(..., synchronise=True)`), and hooks on its
outputs identify its backward. Two forwards followed by two backwards are reduced once each, and so are two backwards of
one forward. The backward of a forward that was not synchronised is left alone. Gradients that were accumulated locally
are part of what the next reduction averages.

`gradient_buckets` describes what a parameter's gradient is afterwards.
"""

from __future__ import annotations

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
from torch.autograd.profiler import record_function
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from fsdp_conformance.engine.bucketing.bucket_assignment import DEFAULT_LIMITS
from fsdp_conformance.engine.communication import Streams, resolve_group
from fsdp_conformance.engine.data_parallel.autograd_hooks import BackwardWatch, GradientHooks, remove_hooks
from fsdp_conformance.engine.data_parallel.communication_hook import Hook, checked_hook
from fsdp_conformance.engine.data_parallel.gradient_buckets import BucketParameter, BucketQueue, Transport
from fsdp_conformance.engine.data_parallel.parameter_use import StaticGraph, UsedMap, reach_of
from fsdp_conformance.engine.errors import HookMisuse, MarkedReadyTwice, ReductionError, ReductionUnfinished
from fsdp_conformance.errors import ConfigError

#: How many names an error lists, unless TORCH_DISTRIBUTED_DEBUG is DETAIL.
NAMES_LISTED = 20
_c10d: Any = dist  # for names that torch.distributed has but does not export


@dataclass(frozen=True, kw_only=True, slots=True)
class ReducerConfig:
    """How gradients are reduced. Equal on every rank."""

    bucket_limits: tuple[int, ...] = DEFAULT_LIMITS
    """Bytes at which the first, second, ... bucket is closed; the last limit repeats."""
    find_unused_parameters: bool = False
    """True if parameters may take no part in a forward, on some ranks or on all."""
    gradient_as_bucket_view: bool = False
    """True if gradients are views into buckets that live as long as the reducer."""
    static_graph: bool = False
    """
    True if every iteration has the graph of the first one, which shows which parameters are used and how many gradients
    each gets. Required if a parameter gets several gradients in one backward (reentrant checkpointing).
    """

    def __post_init__(self) -> None:
        if not self.bucket_limits or min(self.bucket_limits) < 0:
            raise ConfigError(
                [f"bucket_limits must be one or more non-negative numbers of bytes, got {self.bucket_limits}"],
                where="ReducerConfig",
            )


class Phase(Enum):
    """The way the next gradient is treated."""

    IDLE = "gradients stay on this rank"
    ARMED = "the next backward is reduced; it has not produced a gradient yet"
    REDUCING = "some gradients are in their buckets; buckets are issued as they fill"


class _Forward:
    """One forward, as its outputs remember it."""

    def __init__(self, *, synchronise: bool, unused: frozenset[int], early: bool) -> None:
        self.synchronise = synchronise
        self.unused = unused
        """Indices of the parameters that the graph behind its outputs does not reach."""
        self.early = early
        """True if `unused` is known before backward: not if reentrant nodes hide a part of the graph."""


class Reducer:
    """
    Averages the gradients of some parameters over the ranks of a group.

    `parameters` are (name, parameter) pairs, in the same order on every rank, each of which requires a gradient.
    `sparse` names those with sparse gradients. Raises ConfigError for parameters on several devices and for unknown
    names.
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
        _check_parameters(named, sparse)
        self.names = tuple(name for name, _ in named)
        self.parameters = tuple(parameter for _, parameter in named)
        self._indices = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self._static = StaticGraph(self.names) if self.config.static_graph else None
        self._finds_unused = self.config.find_unused_parameters and self._static is None
        self._tracks_used = self._finds_unused or self._static is not None  # some parameters may be used on no rank
        device = self.parameters[0].device if named else torch.device("cpu")
        self._used = UsedMap(len(named), group=self.group, device=device)
        self._queue = BucketQueue(
            [BucketParameter(index, name, parameter) for index, (name, parameter) in enumerate(named)],
            sparse_flags=[name in sparse for name in self.names],
            limits=self.config.bucket_limits,
            gradient_as_view=self.config.gradient_as_bucket_view,
            transport=Transport(self.group, None, Streams(device), alone=self.group.size() == 1),
            device=device,
        )

        self._phase = Phase.IDLE
        self._scale: Tensor | None = None
        self._divisor: Callable[[], int] | None = None
        self._frozen: frozenset[int] = frozenset()  # parameters that do not require a gradient in this reduction
        self._forwards: weakref.WeakSet[_Forward] = weakref.WeakSet()  # those whose graphs are alive
        self._latest: _Forward | None = None
        self._seen: list[_Forward] = []  # forwards whose outputs this reduction got gradients of
        self._watch = BackwardWatch()
        self._reductions = 0
        self._rebuild_order: list[int] | None = None  # order of readiness in the first reduction, until the rebuild
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

    # --- for callers -------------------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """The way the next gradient is treated."""
        return self._phase

    @property
    def bucket_names(self) -> list[list[str]]:
        """The names of the parameters in each bucket, in the order of reduction."""
        return self._queue.names

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """
        Let `hook(state, bucket)` reduce, instead of the averaging all-reduce.

        Its result replaces the average; nothing is divided before or after it. Raises HookMisuse for a hook with the
        wrong signature, a second hook, or one registered in the middle of a reduction.
        """
        checked = checked_hook(state, hook)
        where = "register_comm_hook"
        if self._queue.transport.hook is not None:
            raise HookMisuse("a communication hook is already registered", where=where)
        if self._phase is Phase.REDUCING:
            raise HookMisuse("cannot register a communication hook while gradients are being reduced", where=where)
        self._queue.transport = self._queue.transport._replace(hook=checked, alone=False)

    @property
    def reductions(self) -> int:
        """The number of reductions that this rank has taken part in."""
        return self._reductions

    def used_names(self) -> list[str]:
        """The parameters that got a gradient on this rank since the last reduction."""
        return [name for index, name in enumerate(self.names) if self._used.used_here(index)]

    def mark_used(self, names: Collection[str]) -> None:
        """Mark parameters whose gradients arrived before this reducer was made. Unknown names are ignored."""
        for index, name in enumerate(self.names):
            if name in names:
                self._used.mark(index)

    def set_divisor(self, divisor: Callable[[], int] | None) -> None:
        """Set what the next reduction divides by; called when that begins. None means the size of the group."""
        self._divisor = divisor

    def prepare_for_forward(self) -> None:
        """
        Call before every forward whose graph is kept. Collective once: when buckets are rebuilt.

        Raises what `expect_finished` raises.
        """
        self.expect_finished()
        if not self._watch.is_inside:
            remove_hooks(self._leaf_handles)
            self.rebuild()

    def expect_finished(self) -> None:
        """
        Raise ReductionUnfinished if the last backward succeeded but left parameters without a gradient; names them.

        That drops the reduction. A backward that raised is dropped without an error, and training continues from here;
        the caller should also drop its gradients with zero_grad. Raises ReductionError if the reducer no longer owns
        its parameters.
        """
        if self._closed:
            raise ReductionError(
                "the reducer was closed, or another one has taken over its parameters",
                where="Reducer.prepare_for_forward",
            )
        if self._watch.is_inside:
            return
        if self._watch.is_open:
            self.reset()
        if self._phase is Phase.REDUCING:
            missing = [index for index in range(len(self.names)) if not self._ready[index]]
            self.reset()
            raise self._unfinished(missing)

    def prepare_for_backward(self, outputs: Iterable[Tensor], *, synchronise: bool = True) -> None:
        """
        Call after every forward whose graph is kept, with the tensors in its outputs.

        With `synchronise=False` the backward of this forward only adds to this rank's gradients.
        """
        tensors = [output for output in outputs if output.requires_grad]
        unused: frozenset[int] = frozenset()
        early = True
        if self._finds_unused and synchronise:
            reached, early = reach_of(tensors, self._indices)
            unused = frozenset(range(len(self.names))) - reached
        forward = _Forward(synchronise=synchronise, unused=unused, early=early)
        if synchronise:
            self._latest = forward
            self._forwards.add(forward)
            if self._phase is Phase.IDLE:
                self._arm()
        for tensor in tensors:
            handle = cast(Any, tensor).register_hook(partial(self._on_output, forward))
            if tensor.is_leaf:
                self._leaf_handles.append(handle)  # outlives this forward

    def shadow_backward(self) -> None:
        """
        Take part in a reduction of the other ranks without any gradients of this rank. Collective.

        Issues what they issue, in their order: buckets, then the used flags, then what finishing a bucket sends.
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
        Reorder buckets, once, after the first reduction, by when gradients became ready on the group's first rank.

        Collective that one time; otherwise does nothing. Never done while searching for unused parameters, because then
        the order differs from one backward to the next.
        """
        if self._rebuild_order is None or self._rebuilt:
            return
        own_order, self._rebuild_order = self._rebuild_order, None
        self._rebuilt = True
        self._queue.rebuild(own_order)
        self._restart()

    def reset(self) -> None:
        """
        Drop a reduction in progress, for example after an exception that every rank raised at the same place.

        Waits for the collectives that were issued, so that nothing writes into a gradient later. The gradients of that
        backward are useless. Does nothing if no reduction is in progress.
        """
        self._queue.abandon()
        self._used.forget_local()
        self._watch.end()
        self._phase = Phase.IDLE
        self._restart()

    def close(self) -> None:
        """Remove every hook from the parameters. The reducer cannot be used afterwards."""
        self.reset()
        remove_hooks(self._leaf_handles)
        self._hooks.remove()
        self._closed = True

    # --- in backward -------------------------------------------------------------------------------------------------

    def _on_output(self, forward: _Forward, grad: Tensor) -> None:
        """Called when a gradient reaches an output of `forward`: decides if this backward is reduced."""
        if not forward.synchronise:
            # Unless the same backward also goes through a forward that is reduced.
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
        """Called when backward has finished with a parameter, even if it produced no gradient for it."""
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

    def _on_incoming(self, index: int) -> None:
        """Called before `_on_gradient`, if used parameters are tracked, when backward produced a gradient."""
        self._used.mark(index)

    def _watch_backward(self) -> None:
        """Have `_end_of_backward` called when this backward ends. It is not called if the backward raises."""
        if self._watch.is_open:  # the last one raised, with no forward since
            self.reset()
            self._arm()
        self._watch.begin(self._end_of_backward)

    def _begin(self) -> None:
        """Begin a reduction, whose first gradient has arrived."""
        self._phase = Phase.REDUCING
        if self._queue.transport.hook is None:
            divisor = self._divisor() if self._divisor is not None else self.group.size()
            # A 0-dim tensor on the CPU: a Python number would be converted once per gradient, at three times the cost.
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
        Parameters that this backward cannot reach: those that no living forward uses, and frozen ones.

        A backward may go through several forwards, or leave out some outputs: the rest is known when it ends.
        """
        if not self._finds_unused:
            return self._frozen
        forwards = {*self._forwards, *self._seen, *([self._latest] if self._latest is not None else [])}
        if not forwards or not all(forward.early for forward in forwards):
            return self._frozen
        return sorted({*self._frozen, *frozenset.intersection(*(forward.unused for forward in forwards))})

    def _used_or_trainable(self, index: int) -> bool:
        """True if a parameter has a gradient to average, if every trainable parameter has one."""
        return self._used.used_here(index) or index not in self._frozen

    def _mark_ready(self, index: int) -> None:
        if self._ready[index]:
            raise self._ready_twice(index)
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
            # The graph may reach them, but this backward did not: the loss does not use some outputs.
            self._mark_unused(range(len(self.names)))
        if self._queue.is_issued:
            with record_function("Reducer::finish"):
                self._finish()

    def _finish(self) -> None:
        """Wait for every bucket and store the averages."""
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
        """Expect every gradient."""
        self._ready = bytearray(len(self.names))
        self._order: list[int] = []  # of readiness, in this reduction
        self._seen.clear()
        if self._static is not None:
            self._static.restart()
        self._queue.begin()

    @property
    def _sums_used(self) -> bool:
        """True if this reduction asks the other ranks which parameters they used."""
        first_of_static = self._static is not None and self._reductions == 0
        return (self._finds_unused or first_of_static) and self.group.size() > 1

    @property
    def _may_rebuild(self) -> bool:
        return not self._finds_unused and not self._rebuilt and bool(self.names)

    # --- errors ------------------------------------------------------------------------------------------------------

    def _unfinished(self, missing: Sequence[int]) -> ReductionUnfinished:
        """The error for a backward that succeeded but left the parameters `missing` without a gradient."""
        if self._static is not None:
            hint = "With static_graph=True every iteration must use the parameters that the first one used."
        else:
            hint = (
                "If a forward does not use some parameters, or the loss does not depend on them, set "
                "find_unused_parameters=True. Return every output that the loss depends on from forward. Every rank "
                "must have used all other parameters in that backward."
            )
        return ReductionUnfinished(
            f"the last backward produced no gradient for {self._listed(missing)}",
            where="Reducer.prepare_for_forward",
            hint=hint,
        )

    def _ready_twice(self, index: int) -> MarkedReadyTwice:
        """The error for a parameter that got a second gradient in one reduction."""
        hint = (
            "Likely causes: a parameter is used outside forward and got a gradient from another backward; several "
            "backwards of one forward share it; or several reentrant checkpoints use it, which static_graph=True "
            "allows."
        )
        if self._finds_unused:
            hint += (
                " Or it was taken for unused because the graph behind forward's outputs does not show its use: return "
                "every output that the loss depends on, in lists, tuples, dicts or dataclasses."
            )
        return MarkedReadyTwice(
            f"parameter {self._listed([index])} got a second gradient in one reduction", where="backward", hint=hint
        )

    def _listed(self, indices: Sequence[int]) -> str:
        """Names with indices; at most NAMES_LISTED unless the debug level asks for all."""
        most = len(indices) if _c10d.get_debug_level() == _c10d.DebugLevel.DETAIL else NAMES_LISTED
        listed = [f"{self.names[index]} (index {index})" for index in indices[:most]]
        return ", ".join(listed + ([f"and {len(indices) - most} more"] if len(indices) > most else []))


def _on_gradient(reference: weakref.ref[Reducer], index: int, parameter: Tensor) -> None:
    """A hook that does not keep the reducer alive."""
    reducer = reference()
    if reducer is not None:
        reducer._on_gradient(index, parameter)


def _on_incoming(reference: weakref.ref[Reducer], index: int, grad: Tensor | None) -> None:
    """A hook that does not keep the reducer alive. The gradient may be undefined."""
    reducer = reference()
    if reducer is not None and grad is not None:
        reducer._on_incoming(index)


def _check_parameters(named: Sequence[tuple[str, nn.Parameter]], sparse: Collection[str]) -> None:
    """Raise ConfigError for parameters that cannot be reduced together and for names that do not exist."""
    names = [name for name, _ in named]
    repeated = sorted(name for name, count in Counter(names).items() if count > 1)
    unknown = sorted(set(sparse) - set(names))
    devices = sorted({str(parameter.device) for _, parameter in named})
    problems = []
    if repeated:
        problems.append(f"parameter names must be unique, got {', '.join(repeated)} more than once")
    if unknown:
        problems.append(f"sparse must name parameters of the reducer, got {', '.join(unknown)}")
    if len(devices) > 1:
        problems.append(f"parameters must be on one device, got {' and '.join(devices)}")
    if "meta" in devices:
        problems.append("parameters must have values, got some on the meta device")
    if problems:
        raise ConfigError(problems, where="Reducer")
