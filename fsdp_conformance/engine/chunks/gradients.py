"""
The gradients of a sharded storage: the flat buffer that collects them, and their reduction into this rank's shard.

    gradients = StorageGradients(storage)
    gradients.buffer.put(index, gradient)               # during backward
    handle = gradients.start(gradients.take())          # reduce-scatter from the buffer
    gradient = handle.wait()                            # 1D, of this rank's shard

The buffer has the layout of the storage, in the dtype of the reduction. It is not zeroed beforehand: the first gradient
of a tensor is copied, later ones are added, and whatever never arrived is zeroed once, just before the reduction. That
takes one pass over the memory, where zeroing and accumulating would take two. The reduce-scatter reads the buffer and
writes the gradient, without an extra copy.

A reduction runs these steps, in this order, where they apply:

    divide by `factors.before`              in the reduce dtype, over the whole buffer
    reduce-scatter over the shard group
    add `partial`                           reduce-scattered earlier, and not yet all-reduced
    all-reduce over the replica group       hybrid sharding
    divide by `factors.after`               in the reduce dtype, over the shard
    cast to the dtype of the shard, copy to its device

A step that needs a collective yields its work, and resumes once that has been waited for. With streams every step is
enqueued at once, on the reduce stream, and `wait` makes the current stream wait. Without streams the steps after a
collective run when `advance` or `wait` is called, in the same order on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from fsdp_conformance.engine.chunks.layout import StorageLayout
from fsdp_conformance.engine.chunks.memory_pool import Block, MemoryPool
from fsdp_conformance.engine.chunks.storage import ShardedStorage
from fsdp_conformance.engine.communication import all_reduce, reduce_scatter
from fsdp_conformance.engine.errors import ChunkStateError, TensorRefused


class GradientBuffer:
    """
    Gradients of one storage, accumulated over any number of backwards.

    `payload` is 1D, contiguous, and as long as the storage. `block` is the block that it was leased as, which goes back
    to the pool after the reduction; a buffer without one may itself become the result.
    """

    def __init__(self, layout: StorageLayout, payload: Tensor, *, block: Block | None = None) -> None:
        self.payload = payload
        self.block = block
        self.present = [False] * len(layout.slots)
        """True for each tensor whose gradient has arrived, in order."""
        self._layout = layout
        self._views: list[Tensor] | None = None

    @property
    def views(self) -> list[Tensor]:
        """The gradients, in the shapes of their tensors. Those that have not arrived are uninitialised."""
        if self._views is None:
            self._views = self._make_views()
        return self._views

    def view(self, index: int) -> Tensor:
        """
        A view to accumulate one gradient into; zero unless something has arrived.

        The gradient counts as arrived from now on. If the view is the parameter's `grad`, autograd adds to it in place.
        """
        view = self.views[index]
        if not self.present[index]:
            with torch.no_grad():
                view.zero_()
            self.present[index] = True
        return view

    def put(self, index: int, gradient: Tensor) -> None:
        """
        Copy a gradient in, cast to the buffer's dtype, or add it to what has arrived.

        The caller may drop the gradient afterwards (on the current stream). Raises TensorRefused if it does not fit.
        """
        self._check([index], [gradient])
        view = self.views[index]
        # Detached rather than under no_grad: a hook calls this once per parameter.
        if self.present[index]:
            view.add_(gradient.detach())
        else:
            view.copy_(gradient.detach())
            self.present[index] = True

    @torch.no_grad()
    def put_all(self, gradients: Sequence[Tensor | None]) -> None:
        """
        `put` for every tensor of the storage, in order; None for a tensor without a gradient.

        Raises TensorRefused, naming everything that does not fit, before anything is put.
        """
        if len(gradients) != len(self.present):
            raise TensorRefused(
                f"expected {len(self.present)} gradients, one per tensor, got {len(gradients)}",
                where="GradientBuffer.put_all",
            )
        indices = [index for index, gradient in enumerate(gradients) if gradient is not None]
        arriving = [gradient for gradient in gradients if gradient is not None]
        self._check(indices, arriving)
        first: list[tuple[Tensor, Tensor]] = []
        more: list[tuple[Tensor, Tensor]] = []
        for index, gradient in zip(indices, arriving, strict=True):
            (more if self.present[index] else first).append((self.views[index], gradient))
            self.present[index] = True
        if first:
            torch._foreach_copy_([view for view, _ in first], [gradient for _, gradient in first])
        if more:
            torch._foreach_add_([view for view, _ in more], [gradient for _, gradient in more])

    @torch.no_grad()
    def complete(self) -> None:
        """Zero gaps, padding and the gradients that never arrived."""
        layout = self._layout
        for begin, end in layout.gaps if all(self.present) else layout.uncovered(self.present):
            self.payload[begin:end].zero_()

    def _make_views(self) -> list[Tensor]:
        """Views of the payload, reused from the block's last tenant if its tensors were in the same places."""
        if self.block is None:
            return self._layout.views(self.payload)
        cached = self.block.views
        if cached is None or cached[0] != self._layout.slots:
            cached = self.block.views = (self._layout.slots, self._layout.views(self.payload))
        return cached[1]

    def _check(self, indices: Sequence[int], gradients: Sequence[Tensor]) -> None:
        slots, device = self._layout.slots, self.payload.device
        problems: list[str] = []
        for index, gradient in zip(indices, gradients, strict=True):
            if gradient.layout is not torch.strided:
                problems.append(f"layout of gradient {index}: expected torch.strided, got {gradient.layout}")
            elif gradient.shape != slots[index].shape or gradient.device != device:
                problems.append(
                    f"gradient {index}: expected {tuple(slots[index].shape)} on {device}, "
                    f"got {tuple(gradient.shape)} on {gradient.device}"
                )
        if problems:
            raise TensorRefused(problems, where="GradientBuffer")


class DivideFactors(NamedTuple):
    """Divisors of the gradients: before the first collective, and after the last."""

    before: float
    after: float


def divide_factors(divisor: float, dtype: torch.dtype) -> DivideFactors:
    """
    The factors for a division of sums by `divisor`, usually the number of ranks, in `dtype`.

    float16 is divided before, so that the mean of finite values never overflows on the way. Dividing by about the
    square root before and by the rest after, as torch's FSDP does, can overflow: 4 ranks with 2**15 each, halved, add
    up to 2**16, which exceeds float16. Dtypes with a wider exponent are divided after: one pass over a shard instead of
    over the whole buffer.
    """
    return DivideFactors(divisor, 1) if dtype is torch.float16 else DivideFactors(1, divisor)


class ReductionPlan(NamedTuple):
    """All that a reduction needs to know of its storage."""

    group: ProcessGroup
    world_size: int
    replica_group: ProcessGroup | None
    """The group to all-reduce over; None if there is one replica."""
    all_reduce: bool
    """False: the all-reduce and the steps after it are left for later. The result is then the sum over the shard group,
    in the reduce dtype and on the device of the buffer."""
    factors: DivideFactors
    dtype: torch.dtype
    """The dtype of the result."""
    device: torch.device
    """The device of the result."""
    pin_memory: bool


class Reduction:
    """
    The handle of a reduction.

    `wait` returns the gradient of this rank's shard: 1D, as long as the shard, padding included. Only the handle keeps
    it; the storage does not. `on_result` is called with it on the stream that made it, unless the all-reduce is left
    for later. `on_done` is called once, after the last step or an exception.
    """

    def __init__(
        self,
        plan: ReductionPlan,
        buffer: GradientBuffer,
        *,
        partial: Tensor | None,
        pool: MemoryPool,
        on_result: Callable[[Tensor], None] | None,
        on_done: Callable[[], None],
    ) -> None:
        self._plan = plan
        self._pool = pool
        self._streams = pool.streams
        self._partial = partial
        self._on_result = on_result
        self._on_done: Callable[[], None] | None = on_done
        self._work: Work | None = None
        self._steps: Generator[Work, None, None] | None = self._reduce(buffer)
        self._host_part: Tensor | None = None
        self.event: torch.Event | None = None
        """The event to wait for on the current stream; None before the last step is enqueued, and without streams."""
        self._result: Tensor | None = None

    def start(self, *, ahead: bool) -> None:
        """Take the first step; take all of them if `ahead`, which requires that waiting does not block the host."""
        with torch.no_grad(), self._streams.on(self._streams.reduce):
            self._step()
            while ahead and self._steps is not None:
                self._step()

    @property
    def done(self) -> bool:
        """True if every step has been taken, or enqueued."""
        return self._steps is None

    @property
    def result(self) -> Tensor | None:
        """The tensor that `wait` returns, without ordering the current stream after it; None before the last step."""
        return self._result

    def advance(self) -> None:
        """
        Take the next step, after waiting for the collective before it.

        In hybrid sharding this starts the all-reduce without waiting for it. Call it at the same points on all ranks.
        """
        if self._steps is not None:
            with torch.no_grad(), self._streams.on(self._streams.reduce):
                self._step()

    def wait(self) -> Tensor:
        """
        The reduced gradient, ready for the current stream, or for the host if it is offloaded.

        A second call changes nothing.
        """
        while self._steps is not None:
            self.advance()
        if self._host_part is not None:
            self._finish_on_host(self._host_part)
        elif self.event is not None:
            self._streams.wait(self.event)
        assert self._result is not None, "a reduction whose steps are taken has a result, or has raised"
        return self._result

    def _step(self) -> None:
        steps, work = self._steps, self._work
        assert steps is not None, "a step is left"
        self._work = None
        self._steps = None  # An exception ends the reduction.
        try:
            if work is not None:
                work.wait()
            self._work = next(steps, None)
        except BaseException:
            steps.close()
            self._end()
            raise
        if self._work is not None:
            self._steps = steps
        elif self._host_part is None:
            self._end()

    def _reduce(self, buffer: GradientBuffer) -> Generator[Work, None, None]:
        """The steps, on the reduce stream. Each yielded work is waited for before the next step."""
        plan, flat = self._plan, buffer.payload
        try:
            if plan.factors.before != 1:
                flat.div_(plan.factors.before)
            shard = self._output(buffer)
            if plan.world_size > 1:
                yield reduce_scatter(shard, flat, plan.group)
            if self._partial is not None:
                shard.add_(self._partial)
                self._partial = None
            if not plan.all_reduce:
                self._result = shard
            else:
                if plan.replica_group is not None:
                    yield all_reduce(shard, plan.replica_group)
                self._deliver(shard)
        finally:
            if buffer.block is not None:
                self._pool.release(buffer.block)
            else:
                # Allocated on the stream of the gradients, which gets it back when the caller drops it.
                self._streams.keep(flat)
        self.event = self._streams.record()

    def _output(self, buffer: GradientBuffer) -> Tensor:
        """Where the sum is written: memory that stays, or the buffer itself if the sum is only passed on from there."""
        plan, flat = self._plan, buffer.payload
        if plan.all_reduce and (flat.dtype is not plan.dtype or flat.device != plan.device):
            return flat.chunk(plan.world_size)[plan.group.rank()]
        if plan.world_size > 1:
            return flat.new_empty(flat.numel() // plan.world_size)
        return flat if buffer.block is None else flat.clone()

    def _deliver(self, shard: Tensor) -> None:
        """Divide, cast and move the sum over all ranks."""
        plan = self._plan
        if plan.factors.after != 1:
            shard.div_(plan.factors.after)
        if shard.device == plan.device:
            self._set_result(shard if shard.dtype is plan.dtype else shard.to(plan.dtype))
        else:
            self._host_part = torch.empty(shard.numel(), dtype=plan.dtype, pin_memory=plan.pin_memory)
            self._host_part.copy_(shard, non_blocking=True)

    def _finish_on_host(self, host_part: Tensor) -> None:
        self._streams.hold_host(self.event)
        self._host_part = None
        self._set_result(host_part)
        self._end()

    def _set_result(self, gradient: Tensor) -> None:
        self._result = gradient
        if self._on_result is not None:
            self._on_result(gradient)

    def _end(self) -> None:
        on_done, self._on_done = self._on_done, None
        if on_done is not None:
            on_done()


class StorageGradients:
    """
    The gradients of one storage: the buffer that collects them, if there is one, and the reduction under way.

    The storage must have its shard. With a replica group, reductions are all-reduced over it after the reduce-scatter.
    """

    def __init__(self, storage: ShardedStorage) -> None:
        self._storage = storage
        self._pool = storage.pool
        world_size, replica_group = storage.layout.world_size, storage.replica_group
        self._plan = ReductionPlan(
            group=storage.group,
            world_size=world_size,
            replica_group=replica_group if storage.num_replicas > 1 else None,
            all_reduce=True,
            factors=divide_factors(world_size * storage.num_replicas, storage.reduce_dtype),
            dtype=storage.dtype,
            device=storage.shard_device,
            pin_memory=storage.pins_memory,
        )
        alone = world_size == 1 and storage.shard_device == self._pool.device
        self.reduces_in_place = alone and storage.reduce_dtype is storage.dtype
        """True if the buffer itself can become the reduced gradient: a group of one rank, and nothing to cast."""
        streams = self._pool.streams
        # True if waiting for a work orders streams instead of blocking the host: then every step is taken at once.
        self._runs_ahead = streams.orders(storage.group) and (replica_group is None or streams.orders(replica_group))
        self._buffer: GradientBuffer | None = None
        self.under_way: Reduction | None = None
        """The reduction whose last step has not been taken."""

    def divide_by(self, factor: float) -> None:
        """Divide sums over all ranks by `factor` instead of the number of ranks, from the next reduction on."""
        self._plan = self._plan._replace(factors=divide_factors(factor, self._storage.reduce_dtype))

    @property
    def is_open(self) -> bool:
        """True if there is a buffer."""
        return self._buffer is not None

    @property
    def tensors_held(self) -> list[Tensor]:
        """The tensors whose memory is held: the buffer's, if there is one."""
        return [] if self._buffer is None else [self._buffer.payload]

    @property
    def buffer(self) -> GradientBuffer:
        """The buffer, opened if there is none."""
        return self.open() if self._buffer is None else self._buffer

    def open(self) -> GradientBuffer:
        """
        Make the buffer, on the current stream: a cached block of the pool, or fresh memory if that can become the
        reduced gradient. Raises ChunkStateError if there is a buffer, PoolExhausted if there is no block.
        """
        if self._buffer is not None:
            raise ChunkStateError(
                "gradients are already open: reduce or discard them first", where=f"open_gradients of {self._storage!r}"
            )
        layout, dtype = self._storage.layout, self._storage.reduce_dtype
        if self.reduces_in_place:
            # Fresh memory: a block would go back to the pool while the optimizer still reads the gradient in it.
            payload = torch.empty(layout.numel, dtype=dtype, device=self._pool.device)
            self._buffer = GradientBuffer(layout, payload)
        else:
            block = self._pool.lease_cached(layout.numel, dtype)
            self._buffer = GradientBuffer(layout, block.payload, block=block)
        return self._buffer

    def discard(self) -> None:
        """Drop the buffer, as zero_grad between two reductions does."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None and buffer.block is not None:
            self._pool.release(buffer.block)

    def take(self, partial: Tensor | None = None) -> GradientBuffer:
        """
        The complete buffer, for `start`: afterwards there is none. A tensor without a gradient counts as zero.

        `partial`: what `start` will be given. Raises TensorRefused if it does not match the shard.
        """
        self._check_partial(partial)
        if self.under_way is not None:
            # One at a time: `reset` can only wait for a reduction that it knows.
            self.under_way.wait()
        buffer = self.buffer
        buffer.complete()
        self._buffer = None
        return buffer

    def start(
        self,
        buffer: GradientBuffer,
        *,
        partial: Tensor | None = None,
        all_reduce: bool = True,
        on_result: Callable[[Tensor], None] | None = None,
    ) -> Reduction:
        """
        Begin to average a buffer over all ranks; each rank keeps its shard.

        With `all_reduce=False` the replicas are left for later: pass the result to a later reduction as `partial`.
        `on_result` is called with the average, on the stream that made it.
        """
        reduction = self.under_way = Reduction(
            self._plan if all_reduce else self._plan._replace(all_reduce=False),
            buffer,
            partial=partial,
            pool=self._pool,
            on_result=on_result,
            on_done=self._finish,
        )
        streams = self._pool.streams
        # Autograd wrote the gradients on the current stream: the reduction must not read them before.
        streams.order(streams.reduce, streams.record())
        reduction.start(ahead=self._runs_ahead)
        return reduction

    def reset(self) -> None:
        """Discard the gradients, after an exception. A reduction under way ends first; its handle keeps the result."""
        try:
            if self.under_way is not None:
                self.under_way.wait()
        finally:
            self.discard()

    def _finish(self) -> None:
        self.under_way = None

    def _check_partial(self, partial: Tensor | None) -> None:
        if partial is None:
            return
        numel, dtype, device = self._storage.layout.shard_numel, self._storage.reduce_dtype, self._pool.device
        expected = (torch.Size([numel]), dtype, device.type, True)
        if (partial.shape, partial.dtype, partial.device.type, partial.is_contiguous()) != expected:
            raise TensorRefused(
                f"partial: expected a contiguous ({numel},) of {dtype} on {device}, got {tuple(partial.shape)} of "
                f"{partial.dtype} on {partial.device}",
                where=f"reduce of {self._storage!r}",
            )
