"""
Buckets: gradients that are reduced together, in one buffer, from the first copy to the parameters' `.grad`.

    begin   the bucket expects every one of its parameters
    take    a gradient is ready: scaled and copied into its place in one pass
    start   every gradient is there: the reduction is issued, asynchronously
    finish  the reduction is awaited, and parameters have their averaged gradients

A place in the buffer has the strides of its parameter (channels_last stays so), if those leave no gaps and overlap
nowhere; otherwise it is contiguous.

Who owns the memory of gradients afterwards:

  - As views (`gradient_as_view`), the bucket does: its buffer lives as long as the reducer, `.grad` is a view of it
    from the first backward on, and a gradient that somebody kept is overwritten by the next one.
  - Otherwise a gradient that did not exist before this backward becomes the averaged place in the buffer, which is then
    the gradients' own: the next backward takes new memory, and what somebody kept stays as it was. A gradient that did
    exist is written in place, so that it remains the same tensor.

Either way a gradient is copied once, and nothing is held twice where gradients are dropped between steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work

from fsdp_conformance.engine.data_parallel.communication_hook import CommunicationHook, GradientBucket, hook_result
from fsdp_conformance.engine.data_parallel.sparse_sum import SparseSum
from fsdp_conformance.engine.errors import GradientRefused
from fsdp_conformance.engine.flat_collectives import all_reduce
from fsdp_conformance.engine.streams import Streams
from fsdp_conformance.errors import ConfigError

_TAKE = "backward"
_MAKE = "Bucket"


@dataclass(frozen=True, slots=True)
class BucketParameter:
    """A parameter in a bucket."""

    index: int
    """Its index among the reducer's parameters."""
    name: str
    """Its fully qualified name."""
    parameter: nn.Parameter


class Transport(NamedTuple):
    """How the buckets of a reducer reach the other ranks."""

    group: ProcessGroup
    hook: CommunicationHook | None
    streams: Streams
    alone: bool
    """There is nobody to reduce with, and no hook: then gradients stay as autograd left them."""


class Bucket(ABC):
    """
    Parameters that are reduced together.

    `index` is the bucket's place in the order of reduction, of `count` buckets; `pending` is the number of its
    parameters whose gradients are not ready yet.
    """

    def __init__(self, index: int, count: int, parameters: Sequence[BucketParameter]) -> None:
        self.index = index
        self.count = count
        self.parameters = tuple(parameters)
        self.pending = len(self.parameters)

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of its parameters."""

    def begin(self) -> None:
        """Expect every parameter again."""
        self.pending = len(self.parameters)

    def expect_fresh(self) -> None:
        """Called before the backward has given any gradient: what is None now will be a gradient of this backward."""

    @abstractmethod
    def take(self, place: int, scale: Tensor | None, transport: Transport, *, used: bool) -> None:
        """
        The gradient of `parameters[place]` is ready.

        `scale` is the factor of the average, 0-dim on the CPU; None: the hook gets gradients undivided. `used` is False
        where this backward gave no gradient: an older one, if there is one, takes part, and zeros otherwise. Raises
        GradientRefused, naming the parameter.
        """

    @abstractmethod
    def start(self, transport: Transport) -> None:
        """Issue the reduction. Asynchronous. Collective."""

    @abstractmethod
    def finish(self, transport: Transport, used_anywhere: Callable[[int], bool] | None) -> None:
        """
        Await the reduction and leave the averages in the parameters' gradients.

        `used_anywhere(index)` is False for a parameter that no rank used: its gradient is left alone, None or not.
        None: every parameter counts as used.
        """

    @abstractmethod
    def start_empty(self, transport: Transport) -> None:
        """Issue the same collective with zeros, and touch no gradient: this rank has no inputs left. Collective."""

    @abstractmethod
    def finish_empty(self, transport: Transport) -> None:
        """Await what `start_empty` issued. Collective."""

    @abstractmethod
    def abandon(self, transport: Transport) -> None:
        """Await what is under way, if anything is, and forget it; gradients are left as they are."""


class DenseBucket(Bucket):
    """Gradients of one dtype on one device, in one contiguous buffer."""

    def __init__(
        self, index: int, count: int, parameters: Sequence[BucketParameter], *, gradient_as_view: bool
    ) -> None:
        super().__init__(index, count, parameters)
        _refuse_mixture(self.parameters)
        first = self.parameters[0].parameter
        self.dtype, self.device = first.dtype, first.device
        self.numel = sum(entry.parameter.numel() for entry in self.parameters)
        self._as_view = gradient_as_view
        self._layout = _layout(self.parameters)
        self._buffer: Tensor | None = None  # 1D, numel
        self._zeros: Tensor | None = None  # 1D, numel, of a rank without inputs
        self._views: list[Tensor] = []  # ND, the shapes of the parameters
        self._is_given = False  # whether a gradient was made a part of the buffer in this backward
        self._open: list[int] = []  # places whose parameters get their gradient at the end
        self._kept: dict[int, Tensor] = {}  # values to be put back where no rank used the parameter
        self._fresh = [False] * len(self.parameters)
        self._allocated_on: Any = None
        self._settled_on: Any = None  # the stream on which the buffer was last allocated or handed over
        self._copied_on: list[Any] = []  # streams on which gradients were copied in
        self._under_way: Work | torch._C.Future[Any] | None = None

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

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
        assert self._buffer is not None, "a bucket is started after its gradients were taken"
        transport.streams.follow(self._copied_on)
        self._under_way = self._reduce(self._buffer, self._views, transport)

    def finish(self, transport: Transport, used_anywhere: Callable[[int], bool] | None) -> None:
        if transport.alone:
            return
        assert self._buffer is not None, "a bucket is finished after it was started"
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
        if transport.alone:
            return
        # Kept until it is reduced: freed earlier, its memory could be another tensor's by then.
        self._zeros = torch.zeros(self.numel, dtype=self.dtype, device=self.device)
        self._under_way = self._reduce(self._zeros, self._places(self._zeros), transport)

    def finish_empty(self, transport: Transport) -> None:
        if self._under_way is not None:
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
        return transport.hook.start(
            GradientBucket(
                self.index,
                buffer,
                gradients=views,
                parameters=[entry.parameter for entry in self.parameters],
                last=self.index == self.count - 1,
            )
        )

    def _await(self, buffer: Tensor) -> Tensor:
        """The reduced gradients, 1D: the buffer, or what the hook made of it. The current stream waits for them."""
        under_way, self._under_way = self._under_way, None
        assert under_way is not None, "a bucket is awaited after it was started"
        if isinstance(under_way, torch._C.Future):
            return hook_result(under_way.wait(), buffer, bucket=self.index)
        under_way.wait()
        return buffer

    def _hand_over(self, parameter: nn.Parameter, view: Tensor) -> None:
        """Let the averaged values be the parameter's gradient."""
        grad = parameter.grad
        if grad is None or (self._as_view and grad is not view):
            self._set(parameter, view)
        elif grad is not view:
            grad.copy_(view)

    def _set(self, parameter: nn.Parameter, view: Tensor) -> None:
        """Let a place in the buffer be the parameter's gradient."""
        if self._as_view:
            parameter.grad = view
        else:
            parameter.grad = view.data  # Not a view to autograd: a gradient that is one cannot be detached in place.
            self._is_given = True

    def _let_go(self) -> None:
        """A buffer that gradients are parts of is theirs from now on."""
        if self._is_given:
            self._buffer, self._views = None, []

    def _allocate(self, streams: Streams) -> None:
        self._buffer = torch.empty(self.numel, dtype=self.dtype, device=self.device)
        self._allocated_on = self._settled_on = streams.current()
        self._views = self._places(self._buffer)

    def _places(self, buffer: Tensor) -> list[Tensor]:
        """The place of each parameter in a buffer, in the parameter's shape."""
        return [buffer.as_strided(shape, stride, offset) for shape, stride, offset in self._layout]

    def _come_from(self, streams: Streams) -> None:
        """The current stream is about to write into the buffer: it comes after whoever had it, before the reduction."""
        stream = streams.current()
        if stream not in self._copied_on:
            streams.follow([self._settled_on])
            self._copied_on.append(stream)


class SparseBucket(Bucket):
    """One parameter whose gradients are sparse: reduced by gathering indices and values."""

    def __init__(self, index: int, count: int, parameters: Sequence[BucketParameter]) -> None:
        super().__init__(index, count, parameters)
        if len(self.parameters) != 1:
            names = ", ".join(entry.name for entry in self.parameters) or "nothing"
            raise ConfigError([f"bucket of {names}, but should be one parameter with sparse gradients"], where=_MAKE)
        (self._entry,) = self.parameters
        self._mine: Tensor | None = None
        self._sum: SparseSum | None = None
        self._future: torch._C.Future[Any] | None = None

    @property
    def nbytes(self) -> int:
        return self._entry.parameter.numel() * self._entry.parameter.element_size()

    def take(self, place: int, scale: Tensor | None, transport: Transport, *, used: bool) -> None:
        grad = self._entry.parameter.grad
        if grad is not None and grad.layout != torch.sparse_coo:
            raise GradientRefused(
                f"gradient of {self._entry.name} is {grad.layout}, but should be sparse: it was announced as such",
                where=_TAKE,
                hint="Do not name the parameter as sparse, or use it through sparse operations alone.",
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
        assert self._mine is not None, "a bucket is started after its gradient was taken"
        self._start(self._mine, transport)

    def finish(self, transport: Transport, used_anywhere: Callable[[int], bool] | None) -> None:
        if transport.alone:
            return
        reduced = self._await(transport)
        parameter = self._entry.parameter
        if used_anywhere is None or used_anywhere(self._entry.index):
            if parameter.grad is None:
                parameter.grad = reduced
            else:
                parameter.grad.copy_(reduced)
        self._mine = None

    def start_empty(self, transport: Transport) -> None:
        if not transport.alone:
            self._start(self._nothing(), transport)

    def finish_empty(self, transport: Transport) -> None:
        if not transport.alone:
            self._await(transport)

    def abandon(self, transport: Transport) -> None:
        if self._sum is not None:
            self._sum.wait_for_sizes()
        if self._future is not None:
            self._future.wait()
        self._mine = self._sum = self._future = None
        self.begin()

    def _start(self, mine: Tensor, transport: Transport) -> None:
        if transport.hook is None:
            self._sum = SparseSum(mine, transport.group)
        else:
            self._mine = mine
            self._future = transport.hook.start(
                GradientBucket(
                    self.index,
                    mine,
                    gradients=[mine],
                    parameters=[self._entry.parameter],
                    last=self.index == self.count - 1,
                )
            )

    def _await(self, transport: Transport) -> Tensor:
        assert self._mine is not None or self._sum is not None, "a bucket is awaited after it was started"
        if self._future is not None:
            future, self._future = self._future, None
            assert self._mine is not None, "what the hook got is kept until its result is there"
            return hook_result(future.wait(), self._mine, bucket=self.index)
        assert self._sum is not None, "without a hook the bucket sums by itself"
        total, self._sum = self._sum.wait(), None
        return total

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


def _layout(parameters: Sequence[BucketParameter]) -> list[tuple[torch.Size, tuple[int, ...], int]]:
    """Shape, strides and offset of each parameter's place in a buffer; one after the other, without gaps."""
    layout, offset = [], 0
    for entry in parameters:
        tensor = entry.parameter.detach()
        stride = tensor.stride() if _is_dense(tensor) else tensor.contiguous().stride()
        layout.append((tensor.shape, stride, offset))
        offset += tensor.numel()
    return layout


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's strides leave no gaps and overlap nowhere."""
    expected = 1
    for stride, size in sorted(
        (stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


def _refuse_mixture(parameters: Sequence[BucketParameter]) -> None:
    """Raise ConfigError unless there is a parameter, and all have one dtype and one device."""
    kinds = sorted({f"{entry.parameter.dtype} on {entry.parameter.device}" for entry in parameters})
    if len(kinds) != 1:
        names = ", ".join(entry.name for entry in parameters) or "nothing"
        raise ConfigError(
            [f"bucket of {names} ({' and '.join(kinds) or 'no dtype'}), but should be of one dtype and one device"],
            where=_MAKE,
        )


def _refusal(grad: Tensor, entry: BucketParameter) -> GradientRefused:
    """Why a gradient cannot be a part of a dense bucket."""
    if grad.layout is not torch.strided:
        return GradientRefused(
            f"gradient of {entry.name} is {grad.layout}, but should be dense: it was not announced as sparse",
            where=_TAKE,
            hint="Name the parameter as sparse when the reducer is made.",
        )
    return GradientRefused(
        f"gradient of {entry.name} has a graph (create_graph=True), but should have none",
        where=_TAKE,
        hint="The average of ranks would not be part of the graph; use torch.autograd.grad for higher derivatives.",
    )
