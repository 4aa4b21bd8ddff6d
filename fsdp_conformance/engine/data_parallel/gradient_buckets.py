"""
Buckets: gradients that are reduced together in one buffer, from the first copy to the parameters' `.grad`.

`BucketQueue` holds the buckets in the order of their reductions. They fill up in any order but are always issued in
that one, so every rank issues the same collectives. One reduction, for the queue and for each bucket:

    begin   expect every gradient
    take    a gradient is ready: scale it and copy it into its place, in one pass
    start   the bucket is full: issue its reduction, asynchronously
    finish  wait for the reductions and leave the averages in the parameters' gradients

The place of a gradient in the buffer has the strides of its parameter (channels_last is kept) if they are dense;
otherwise it is contiguous.

Afterwards, the memory of the gradients belongs to one of two owners:

  - With `gradient_as_view`, the bucket. Its buffer lives as long as the reducer, and from the first backward on `.grad`
    is a view of it. A gradient that a user kept is overwritten by the next backward.
  - Otherwise, the gradients. One that did not exist before this backward becomes a view of the averaged buffer, which
    the bucket then gives up: the next backward allocates another, and a gradient that a user kept does not change. A
    gradient that did exist is written in place, so it remains the same tensor.

Either way a gradient is copied once, and no memory is held twice if gradients are dropped between steps.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.distributed import ProcessGroup, Work

from fsdp_conformance.engine.bucketing.bucket_assignment import NO_LIMIT, BucketAssignment, bucket_assignment
from fsdp_conformance.engine.communication import Streams, all_gather, all_reduce
from fsdp_conformance.engine.data_parallel.communication_hook import CommunicationHook, GradientBucket, hook_result
from fsdp_conformance.engine.errors import GradientRefused, ReductionError
from fsdp_conformance.engine.mesh.collectives import mesh_all_gather, mesh_broadcast

_TAKE = "backward"
_MISSING = -1


@dataclass(frozen=True, slots=True)
class BucketParameter:
    """A parameter in a bucket."""

    index: int
    """Its index among the reducer's parameters."""
    name: str
    """Its fully qualified name."""
    parameter: nn.Parameter


class Transport(NamedTuple):
    """How buckets reach the other ranks."""

    group: ProcessGroup
    hook: CommunicationHook | None
    streams: Streams
    alone: bool
    """A group of one without a hook: gradients stay as autograd left them."""


class BucketQueue:
    """
    The buckets of `entries`, whose indices are 0, 1, 2, ...

    The initial order is the reverse one, because backward goes from the last parameter to the first.
    `sparse_flags[index]` is true if a parameter's gradient is sparse.
    """

    def __init__(
        self,
        entries: Sequence[BucketParameter],
        *,
        sparse_flags: Sequence[bool],
        limits: Sequence[int],
        gradient_as_view: bool,
        transport: Transport,
        device: torch.device,
    ) -> None:
        self.transport = transport
        self._entries = entries
        self._sparse_flags = sparse_flags
        self._limits = limits
        self._gradient_as_view = gradient_as_view
        self._device = device
        self._lay_out(range(len(entries))[::-1])

    @property
    def names(self) -> list[list[str]]:
        """The names of the parameters in each bucket."""
        return [[entry.name for entry in bucket.parameters] for bucket in self._buckets]

    @property
    def order(self) -> list[int]:
        """The indices of all parameters, bucket by bucket."""
        return [entry.index for bucket in self._buckets for entry in bucket.parameters]

    @property
    def limits(self) -> tuple[int, ...]:
        """The limit in bytes under which each bucket was filled."""
        return self._assignment.limits

    @property
    def is_issued(self) -> bool:
        """True if every bucket has been issued."""
        return self._next == len(self._buckets)

    # --- a reduction -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Expect every gradient."""
        self._next = 0
        for bucket in self._buckets:
            bucket.begin()

    def expect_fresh(self) -> None:
        """Called before a backward has produced a gradient: one that is None now will come from this backward."""
        for bucket in self._buckets:
            bucket.expect_fresh()

    def take(self, index: int, scale: Tensor | None, *, used: bool) -> bool:
        """
        Copy the gradient of parameter `index` into its bucket, then issue the buckets that are full and next in order.

        Returns True if that issued the last bucket. `scale` and `used` are those of `Bucket.take`.
        """
        bucket, place = self._places[index]
        bucket.take(place, scale, self.transport, used=used)
        if bucket.pending:
            return False
        self._issue()
        return self.is_issued

    def finish(self, used_anywhere: Callable[[int], bool] | None) -> None:
        """Wait for every bucket and store the averages. `used_anywhere` is that of `Bucket.finish`."""
        if not self.transport.alone:
            for bucket in self._buckets:
                bucket.finish(self.transport, used_anywhere)

    def start_empty(self) -> None:
        """Issue what the other ranks issue, without any gradients of this rank. Collective."""
        if not self.transport.alone:
            for bucket in self._buckets:
                bucket.start_empty(self.transport)

    def finish_empty(self) -> None:
        """Wait for what `start_empty` issued. Collective."""
        if not self.transport.alone:
            for bucket in self._buckets:
                bucket.finish_empty()

    def abandon(self) -> None:
        """Wait for the reductions that were issued, and drop them."""
        for bucket in self._buckets:
            # A collective that failed is reported by the next one that is issued.
            with contextlib.suppress(RuntimeError):
                bucket.abandon(self.transport)

    def _issue(self) -> None:
        """Issue full buckets, up to the first that is not full."""
        while self._next < len(self._buckets) and not self._buckets[self._next].pending:
            bucket = self._buckets[self._next]
            with record_function(f"Reducer::reduce {bucket.index} of {bucket.count}"):
                bucket.start(self.transport)
            self._next += 1

    # --- between reductions ------------------------------------------------------------------------------------------

    def rebuild(self, mine: Sequence[int]) -> None:
        """
        Put the parameters into buckets in the order of the group's first rank; `mine` is this rank's. Collective.

        Raises ReductionError, on every rank, if that order does not name each parameter once.
        """
        order = self._order_of_first_rank(mine)
        if sorted(order) != list(range(len(self._entries))):
            ready = len(order) - order.count(_MISSING)
            raise ReductionError(
                f"gradients that were ready in the first backward: expected {len(self._entries)}, got {ready}",
                where="Reducer.rebuild",
            )
        self._lay_out(order)

    def _order_of_first_rank(self, mine: Sequence[int]) -> list[int]:
        """The first rank's order. Collective."""
        group = self.transport.group
        if group.size() == 1:
            return list(mine)
        # Every rank sends the same number of elements, so a wrong order raises instead of mismatching a collective.
        count = len(self._entries)
        padded = [*mine, *[_MISSING] * count][:count]
        order = torch.tensor(padded, dtype=torch.int64).to(self._device)
        return [int(index) for index in mesh_broadcast(order, group).wait().tolist()]

    def _lay_out(self, order: Sequence[int]) -> None:
        """Put the parameters into buckets in this order. Frees the buffers of the old buckets first."""
        self._buckets: list[Bucket] = []
        self._places: dict[int, tuple[Bucket, int]] = {}
        self._assignment = BucketAssignment((), ())
        self._next = 0  # the bucket to be issued next
        if order:
            tensors = [self._entries[index].parameter for index in order]
            self._assignment = bucket_assignment(tensors, self._limits, self._sparse_flags, order)
        for number, indices in enumerate(self._assignment.buckets):
            entries = [self._entries[index] for index in indices]
            bucket = self._new_bucket(number, entries, sparse=self._assignment.limits[number] == NO_LIMIT)
            self._buckets.append(bucket)
            self._places.update({entry.index: (bucket, place) for place, entry in enumerate(entries)})

    def _new_bucket(self, number: int, entries: Sequence[BucketParameter], *, sparse: bool) -> Bucket:
        count = len(self._assignment.buckets)
        if sparse and self._sparse_flags[entries[0].index]:
            return SparseBucket(number, count, entries)
        return DenseBucket(number, count, entries, gradient_as_view=self._gradient_as_view)


class Bucket(ABC):
    """
    Parameters that are reduced together.

    `index` is the bucket's place in the order of reduction, out of `count` buckets; `pending` is the number of its
    gradients that are not ready yet. Only `take`, `start` and `abandon` are called in a group of one without a hook.
    """

    def __init__(self, index: int, count: int, parameters: Sequence[BucketParameter]) -> None:
        self.index = index
        self.count = count
        self.parameters = tuple(parameters)
        self.pending = len(self.parameters)

    def begin(self) -> None:
        """Expect every gradient."""
        self.pending = len(self.parameters)

    def expect_fresh(self) -> None:
        """Called before the backward has produced a gradient: one that is None now will come from this backward."""

    @abstractmethod
    def take(self, place: int, scale: Tensor | None, transport: Transport, *, used: bool) -> None:
        """
        The gradient of `parameters[place]` is ready.

        `scale` is 1 / (number of ranks), 0-dim on the CPU, or None with a hook, which gets gradients undivided. `used`
        is False if this backward produced no gradient: then an older one contributes if it exists, otherwise zeros.
        Raises GradientRefused, naming the parameter.
        """

    @abstractmethod
    def start(self, transport: Transport) -> None:
        """Issue the reduction, asynchronously. Collective."""

    @abstractmethod
    def finish(self, transport: Transport, used_anywhere: Callable[[int], bool] | None) -> None:
        """
        Wait for the reduction and store the averages in the parameters' gradients.

        `used_anywhere(index)` is False for a parameter that no rank used: its gradient is left alone, None or not.
        If it is None, every parameter counts as used.
        """

    @abstractmethod
    def start_empty(self, transport: Transport) -> None:
        """Issue the same collective with zeros, on a rank that has no inputs left. Touches no gradient. Collective."""

    @abstractmethod
    def finish_empty(self) -> None:
        """Wait for what `start_empty` issued. Collective."""

    @abstractmethod
    def abandon(self, transport: Transport) -> None:
        """Wait for the reduction if it was issued, and drop it. Gradients are left as they are."""

    def _run_hook(self, hook: CommunicationHook, buffer: Tensor, gradients: Sequence[Tensor]) -> torch._C.Future[Any]:
        parameters = [entry.parameter for entry in self.parameters]
        last = self.index == self.count - 1
        return hook.start(GradientBucket(self.index, buffer, gradients=gradients, parameters=parameters, last=last))


class DenseBucket(Bucket):
    """Gradients of one dtype on one device, in one contiguous buffer."""

    def __init__(
        self, index: int, count: int, parameters: Sequence[BucketParameter], *, gradient_as_view: bool
    ) -> None:
        super().__init__(index, count, parameters)
        first = self.parameters[0].parameter
        self.dtype, self.device = first.dtype, first.device
        self.numel = sum(entry.parameter.numel() for entry in self.parameters)
        self._as_view = gradient_as_view
        self._layout = _layout(self.parameters)
        self._buffer: Tensor | None = None  # 1D, numel
        self._zeros: Tensor | None = None  # 1D, numel, of a rank without inputs
        self._views: list[Tensor] = []  # ND, the shapes of the parameters
        self._is_given = False  # whether a gradient became a view of the buffer in this backward
        self._open: list[int] = []  # places whose parameters get their gradient in finish()
        self._kept: dict[int, Tensor] = {}  # values to restore if no rank used the parameter
        self._fresh = [False] * len(self.parameters)
        self._allocated_on: torch.Stream | None = None
        self._settled_on: torch.Stream | None = None  # the stream on which the buffer was last allocated or handed over
        self._copied_on: list[torch.Stream | None] = []  # streams that copied gradients in
        self._under_way: Work | torch._C.Future[Any] | None = None

    def begin(self) -> None:
        super().begin()
        self._is_given = False
        self._open = []
        self._fresh = [False] * len(self.parameters)
        self._kept.clear()
        self._copied_on.clear()
        self._under_way = None

    def expect_fresh(self) -> None:
        self._fresh = [entry.parameter.grad is None for entry in self.parameters]

    def take(self, place: int, scale: Tensor | None, transport: Transport, *, used: bool) -> None:
        parameter = self.parameters[place].parameter
        grad = parameter.grad
        if grad is not None and (grad.layout is not torch.strided or grad.requires_grad):
            raise _refusal(grad, self.parameters[place])
        self.pending -= 1
        if transport.alone:
            return
        streams = transport.streams
        if self._buffer is None:
            self._allocate(streams)
        if streams.exist:
            self._come_from(streams)
        view = self._views[place]
        if grad is None:
            view.zero_()
            self._open.append(place)
            return
        if not used and grad is view:
            self._kept[place] = grad.clone()
        if scale is not None:
            torch.mul(grad, scale, out=view)
        elif grad is not view:
            view.copy_(grad)
        if not used or not (self._as_view or self._fresh[place]):
            self._open.append(place)
        elif grad is not view:
            self._set(parameter, view)

    def start(self, transport: Transport) -> None:
        if transport.alone:
            return
        assert self._buffer is not None, "take() must come before start()"
        transport.streams.follow(self._copied_on)
        self._under_way = self._reduce(self._buffer, self._views, transport)

    def finish(self, transport: Transport, used_anywhere: Callable[[int], bool] | None) -> None:
        assert self._buffer is not None, "start() must come before finish()"
        buffer, views = self._buffer, self._views
        result = self._await(buffer)
        if result.data_ptr() != buffer.data_ptr():
            buffer.copy_(result.reshape(-1))
        transport.streams.keep(buffer, self._allocated_on)
        self._settled_on = transport.streams.current()
        for place in self._open:
            entry = self.parameters[place]
            if used_anywhere is None or used_anywhere(entry.index):
                self._hand_over(entry.parameter, views[place])
            elif place in self._kept:
                views[place].copy_(self._kept[place])
        self._let_go()

    def start_empty(self, transport: Transport) -> None:
        # Kept until it is reduced; if it were freed earlier, its memory could belong to another tensor by then.
        self._zeros = torch.zeros(self.numel, dtype=self.dtype, device=self.device)
        self._under_way = self._reduce(self._zeros, self._places(self._zeros), transport)

    def finish_empty(self) -> None:
        assert self._under_way is not None, "start_empty() must come before finish_empty()"
        self._under_way.wait()
        self._under_way = self._zeros = None

    def abandon(self, transport: Transport) -> None:
        if self._under_way is not None:
            self._under_way.wait()
            if self._buffer is not None:
                transport.streams.keep(self._buffer, self._allocated_on)
        self._let_go()
        self.begin()

    def _reduce(self, buffer: Tensor, views: list[Tensor], transport: Transport) -> Work | torch._C.Future[Any]:
        if transport.hook is None:
            return all_reduce(buffer, transport.group)
        return self._run_hook(transport.hook, buffer, views)

    def _await(self, buffer: Tensor) -> Tensor:
        """The reduced gradients, 1D: the buffer, or the hook's result. The current stream waits for them."""
        under_way, self._under_way = self._under_way, None
        assert under_way is not None, "start() must come before finish()"
        if isinstance(under_way, torch._C.Future):
            return hook_result(under_way.wait(), buffer, bucket=self.index)
        under_way.wait()
        return buffer

    def _hand_over(self, parameter: nn.Parameter, view: Tensor) -> None:
        """Store the averaged values in the parameter's gradient."""
        grad = parameter.grad
        if grad is None or (self._as_view and grad is not view):
            self._set(parameter, view)
        elif grad is not view:
            grad.copy_(view)

    def _set(self, parameter: nn.Parameter, view: Tensor) -> None:
        """Make a view of the buffer the parameter's gradient."""
        if self._as_view:
            parameter.grad = view
        else:
            parameter.grad = view.data  # hides the view from autograd, which could not detach it in place
            self._is_given = True

    def _let_go(self) -> None:
        """Give up the buffer if gradients became views of it."""
        if self._is_given:
            self._buffer, self._views = None, []

    def _allocate(self, streams: Streams) -> None:
        self._buffer = torch.empty(self.numel, dtype=self.dtype, device=self.device)
        self._allocated_on = self._settled_on = streams.current()
        self._views = self._places(self._buffer)

    def _places(self, buffer: Tensor) -> list[Tensor]:
        """A view of the buffer for each parameter, in its shape."""
        return [buffer.as_strided(shape, stride, offset) for shape, stride, offset in self._layout]

    def _come_from(self, streams: Streams) -> None:
        """Order the current stream, which is about to write, after the buffer's last owner and before the reduction."""
        stream = streams.current()
        if stream not in self._copied_on:
            streams.follow([self._settled_on])
            self._copied_on.append(stream)


def _layout(parameters: Sequence[BucketParameter]) -> list[tuple[torch.Size, tuple[int, ...], int]]:
    """Shape, strides and offset of each parameter's place in a buffer, without gaps."""
    layout, offset = [], 0
    for entry in parameters:
        tensor = entry.parameter.detach()
        stride = tensor.stride() if _is_dense(tensor) else tensor.contiguous().stride()
        layout.append((tensor.shape, stride, offset))
        offset += tensor.numel()
    return layout


def _is_dense(tensor: Tensor) -> bool:
    """True if a tensor's strides leave no gaps and do not overlap."""
    expected = 1
    for stride, size in sorted(
        (stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


def _refusal(grad: Tensor, entry: BucketParameter) -> GradientRefused:
    """The error for a gradient that a dense bucket cannot hold."""
    if grad.layout is not torch.strided:
        return GradientRefused(
            f"layout of the gradient of {entry.name}: expected torch.strided, got {grad.layout}",
            where=_TAKE,
            hint="Name parameters with sparse gradients in the reducer's `sparse` argument.",
        )
    return GradientRefused(
        f"cannot average the gradient of {entry.name}: it has a graph (create_graph=True)",
        where=_TAKE,
        hint="The average would not be part of that graph. Use torch.autograd.grad for higher derivatives.",
    )


class SparseBucket(Bucket):
    """One parameter with sparse gradients, which are reduced by gathering indices and values."""

    def __init__(self, index: int, count: int, parameters: Sequence[BucketParameter]) -> None:
        super().__init__(index, count, parameters)
        (self._entry,) = self.parameters
        self._mine: Tensor | None = None
        self._under_way: SparseSum | torch._C.Future[Any] | None = None

    def take(self, place: int, scale: Tensor | None, transport: Transport, *, used: bool) -> None:
        grad = self._entry.parameter.grad
        if grad is not None and grad.layout != torch.sparse_coo:
            raise GradientRefused(
                f"layout of the gradient of {self._entry.name}: expected torch.sparse_coo, got {grad.layout}",
                where=_TAKE,
                hint="Only name a parameter in `sparse` if all operations that use it have sparse gradients.",
            )
        self.pending -= 1
        if transport.alone:
            return
        if grad is None:
            self._mine = self._nothing()
        else:
            grad = grad.detach().coalesce()
            if scale is not None:
                grad = torch.sparse_coo_tensor(
                    grad.indices(), grad.values() * scale, grad.shape, is_coalesced=True, check_invariants=False
                )
            self._mine = grad

    def start(self, transport: Transport) -> None:
        if transport.alone:
            return
        assert self._mine is not None, "take() must come before start()"
        if transport.hook is None:
            self._under_way = SparseSum(self._mine, transport.group)
        else:
            self._under_way = self._run_hook(transport.hook, self._mine, [self._mine])

    def finish(self, transport: Transport, used_anywhere: Callable[[int], bool] | None) -> None:
        reduced = self._await()
        parameter = self._entry.parameter
        if used_anywhere is None or used_anywhere(self._entry.index):
            if parameter.grad is None:
                parameter.grad = reduced
            else:
                parameter.grad.copy_(reduced)

    def start_empty(self, transport: Transport) -> None:
        self._mine = self._nothing()
        self.start(transport)

    def finish_empty(self) -> None:
        self._await()

    def abandon(self, transport: Transport) -> None:
        if isinstance(self._under_way, SparseSum):
            self._under_way.wait_for_sizes()
        elif self._under_way is not None:
            self._under_way.wait()
        self._mine = self._under_way = None
        self.begin()

    def _await(self) -> Tensor:
        mine, under_way = self._mine, self._under_way
        assert mine is not None, "take() must come before finish()"
        assert under_way is not None, "start() must come before finish()"
        self._mine = self._under_way = None
        if isinstance(under_way, SparseSum):
            return under_way.wait()
        return hook_result(under_way.wait(), mine, bucket=self.index)

    def _nothing(self) -> Tensor:
        """A sparse tensor of the parameter's shape without elements."""
        parameter = self._entry.parameter
        shape = parameter.shape
        return torch.sparse_coo_tensor(
            torch.empty((1, 0), dtype=torch.int64, device=parameter.device),
            torch.empty((0, *shape[1:]), dtype=parameter.dtype, device=parameter.device),
            shape,
            is_coalesced=True,
            check_invariants=False,
        )


class SparseSum:
    """
    A sum of sparse tensors over ranks, in progress. Collective twice: sizes in the constructor, the rest in `wait`.

    Indices and values are gathered, padded to the rank that has most, and coalesced, so any backend that can gather
    will do. `mine` is coalesced. Ranks may have different numbers of elements, or none, but those that have any must
    agree on the number of sparse dims.
    """

    def __init__(self, mine: Tensor, group: ProcessGroup) -> None:
        self._mine = mine
        self._group = group
        size = torch.tensor([mine.values().shape[0], mine.sparse_dim()], dtype=torch.int64).to(mine.device)
        self._sizes = size.new_empty(group.size() * 2)  # elements and sparse dims, rank by rank
        self._work: Work | None = all_gather(self._sizes, size, group)

    def wait(self) -> Tensor:
        """
        The sum, coalesced. Collective; the host waits for the sizes.

        Raises GradientRefused, on every rank, if ranks disagree on the number of sparse dims.
        """
        self.wait_for_sizes()
        sizes = self._sizes.view(-1, 2).tolist()
        counts = [count for count, _ in sizes]
        dims = {dim for count, dim in sizes if count}
        if not dims:
            return self._mine.clone()
        if len(dims) > 1:
            by_rank = [dim for _, dim in sizes]
            raise GradientRefused(
                f"sparse dims of the gradient: expected the same number on all ranks, got {by_rank}", where="SparseSum"
            )
        (sparse_dim,) = dims
        shape = self._mine.shape
        if counts[self._group.rank()]:
            indices, values = self._mine.indices().t(), self._mine.values()
        else:
            indices = self._mine.indices().new_empty((0, sparse_dim))
            values = self._mine.values().new_empty((0, *shape[sparse_dim:]))
        return torch.sparse_coo_tensor(
            mesh_all_gather(indices, self._group, sizes=counts).wait().t(),
            mesh_all_gather(values, self._group, sizes=counts).wait(),
            shape,
            check_invariants=False,
        ).coalesce()

    def wait_for_sizes(self) -> None:
        """Wait for the collective that the constructor issued."""
        if self._work is not None:
            self._work.wait()
            self._work = None
