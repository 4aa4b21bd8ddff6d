"""
A reduction in flight: the gradients of one chunk on their way from the gradient buffer into this rank's shard.

What happens, in this order, where it applies:

    divide by `factors.before`              in the reduce dtype, on the whole buffer
    reduce-scatter over the shard group
    add `partial`                           what was reduce-scattered, and not yet all-reduced, before
    all-reduce over the replica group       hybrid sharding
    divide by `factors.after`               in the reduce dtype, on the shard
    cast to the dtype of the shard, copy to the shard's device
    add to `into`                           what was accumulated before

A step that needs a collective yields its work, and goes on when somebody has waited for it. With streams every step is
enqueued at once, on the reduce stream, and `wait` makes the current stream wait; without, the steps after a collective
are taken when `advance` or `wait` is called, always in the same order on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from fsdp_conformance.engine.chunks.gradient_buffer import GradientBuffer
from fsdp_conformance.engine.chunks.memory_pool import MemoryPool
from fsdp_conformance.engine.flat_collectives import all_reduce, reduce_scatter


class DivideFactors(NamedTuple):
    """What gradients are divided by before the first collective, and after the last."""

    before: float
    after: float


def divide_factors(num_ranks: int, dtype: torch.dtype) -> DivideFactors:
    """
    The factors for an average over `num_ranks` ranks in `dtype`.

    float16 is divided before: a mean of finite values then never overflows on the way. Dividing by about the square
    root before and the rest after, as torch's FSDP does, does: 4 ranks with 2**15 each, halved, add up to 2**16, which
    is no float16. What has a wider exponent is divided after: one pass over a shard instead of the whole chunk.
    """
    return DivideFactors(num_ranks, 1) if dtype is torch.float16 else DivideFactors(1, num_ranks)


class ReductionPlan(NamedTuple):
    """What a reduction does; all that it needs of its chunk."""

    group: ProcessGroup
    world_size: int
    replica_group: ProcessGroup | None
    """None: there is one replica."""
    all_reduce: bool
    """False: the all-reduce, and what comes after it, is left for later. The result is the sum over the shard group, in
    the reduce dtype and on the device of the buffer."""
    factors: DivideFactors
    dtype: torch.dtype
    """Of the result."""
    device: torch.device
    """Of the result."""
    pin_memory: bool


class ShardStatistics(NamedTuple):
    """0-dimensional tensors on the device of the gradient; reading them on the host is the caller's affair."""

    squared_norm: Tensor
    """Sum of squares of this rank's valid elements, in float32 (float64 for float64)."""
    overflow: Tensor
    """bool: whether one of them is infinite or not a number."""


def shard_statistics(gradient: Tensor) -> ShardStatistics:
    """The statistics of the valid elements of a shard: 1D. No other rank is asked, and the host does not wait."""
    if gradient.numel() == 0:
        zero = torch.zeros((), device=gradient.device)
        return ShardStatistics(zero, zero > 0)
    wide = torch.promote_types(gradient.dtype, torch.float32)
    norm = torch.linalg.vector_norm(gradient, dtype=wide)
    # The largest magnitude is finite if and only if all are; the norm of finite values may overflow.
    largest = torch.linalg.vector_norm(gradient, math.inf)
    return ShardStatistics(norm * norm, ~torch.isfinite(largest))


class Reduction:
    """
    The handle of a reduction.

    `wait` gives the gradient of this rank's shard: 1D, as long as the shard, padding included. The handle alone keeps
    it: the chunk does not. `on_done` is called once, after the last step or an exception.
    """

    def __init__(
        self,
        plan: ReductionPlan,
        buffer: GradientBuffer,
        *,
        into: Tensor | None,
        partial: Tensor | None,
        valid_numel: int | None,
        pool: MemoryPool,
        on_done: Callable[[Reduction], None],
    ) -> None:
        self._plan = plan
        self._pool = pool
        self._streams = pool.streams
        self._into = into
        self._partial = partial
        self._valid_numel = valid_numel
        self._on_done: Callable[[Reduction], None] | None = on_done
        self._work: Work | None = None
        self._steps: Generator[Work, None, None] | None = self._reduce(buffer)
        self._host_part: Tensor | None = None
        self.in_payload = buffer.in_payload
        """Whether it reads the block that the chunk was unsharded in."""
        self.event: Any = None
        """What the current stream has to wait for; None before the last step is enqueued, and without streams."""
        self.statistics: ShardStatistics | None = None
        """Of the valid part of the result; None if nobody asked for them, or before the last step."""
        self._result: Tensor | None = None

    def start(self, *, ahead: bool) -> None:
        """Take the first step; all of them if `ahead`, that is where waiting for a work does not hold the host."""
        with torch.no_grad(), self._streams.on(self._streams.reduce):
            self._step()
            while ahead and self._steps is not None:
                self._step()

    @property
    def done(self) -> bool:
        """Whether every step has been taken, or enqueued."""
        return self._steps is None

    @property
    def result(self) -> Tensor | None:
        """What `wait` returns, without ordering the current stream after it; None before the last step."""
        return self._result

    def advance(self) -> None:
        """
        Take the next step, waiting for the collective before it.

        It starts the all-reduce of hybrid sharding without waiting for that. To be called at the same points on all
        ranks.
        """
        if self._steps is not None:
            with torch.no_grad(), self._streams.on(self._streams.reduce):
                self._step()

    def wait(self) -> Tensor:
        """
        The reduced gradient, ready for the current stream; for the host, if it is offloaded.

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
        """The steps, on the reduce stream. What is yielded is waited for before the next one."""
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
            elif buffer.owned:
                # Allocated on the stream of the gradients, which gets it back when the caller drops it.
                self._streams.keep(flat)
        self.event = self._streams.record()

    def _output(self, buffer: GradientBuffer) -> Tensor:
        """Where the sum is written: into memory that stays, or in place if it is only passed on from there."""
        plan, flat = self._plan, buffer.payload
        passed_on = self._into is not None or flat.dtype is not plan.dtype or flat.device != plan.device
        if plan.all_reduce and passed_on:
            return flat.chunk(plan.world_size)[plan.group.rank()]
        if plan.world_size > 1:
            return flat.new_empty(flat.numel() // plan.world_size)
        return flat if buffer.owned else flat.clone()

    def _deliver(self, shard: Tensor) -> None:
        """Divide, cast, move and accumulate the sum over all ranks."""
        plan, into, after = self._plan, self._into, self._plan.factors.after
        alpha = 1 / after if into is not None and math.frexp(after)[0] == 0.5 else None
        if alpha is None and after != 1:
            shard.div_(after)
        if shard.device != plan.device:
            if alpha is not None:
                shard.mul_(alpha)
            self._host_part = torch.empty(shard.numel(), dtype=plan.dtype, pin_memory=plan.pin_memory)
            self._host_part.copy_(shard, non_blocking=True)
            return
        if into is not None:
            # By a power of two the product is exact: dividing and adding are one pass.
            into.add_(shard, alpha=1 if alpha is None else alpha)
            self._result, self._into = into, None
        elif shard.dtype is not plan.dtype:
            self._result = shard.to(plan.dtype)
        else:
            self._result = shard
        self._measure()

    def _finish_on_host(self, host_part: Tensor) -> None:
        self._streams.hold_host(self.event)
        self._host_part = None
        self._result = host_part if self._into is None else self._into.add_(host_part)
        self._into = None
        self._measure()
        self._end()

    def _end(self) -> None:
        on_done, self._on_done = self._on_done, None
        if on_done is not None:
            on_done(self)

    def _measure(self) -> None:
        if self._valid_numel is not None and self._result is not None:
            self.statistics = shard_statistics(self._result[: self._valid_numel])
