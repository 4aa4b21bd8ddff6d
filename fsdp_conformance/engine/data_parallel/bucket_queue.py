"""
The buckets of a reducer in the order of reduction: filled in whatever order, issued strictly in theirs.

    begin   every bucket expects every one of its parameters
    take    a gradient is ready; buckets that are full are issued, up to the first that is not
    finish  every reduction is awaited

So every rank issues the same collectives, although gradients are ready in another order on each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from fsdp_conformance.engine.bucketing.bucket_assignment import NO_LIMIT, BucketAssignment, bucket_assignment
from fsdp_conformance.engine.data_parallel.gradient_bucket import (
    Bucket,
    BucketParameter,
    DenseBucket,
    SparseBucket,
    Transport,
)
from fsdp_conformance.engine.data_parallel.reducer_config import ReducerConfig
from fsdp_conformance.engine.errors import ReductionError
from fsdp_conformance.engine.mesh.collectives import mesh_broadcast

_MISSING = -1


class BucketQueue:
    """
    Buckets of `entries`, which are known by their indices: 0, 1, 2, ...

    They stand in the reverse order at first: backward goes from the last to the first. `sparse_flags` says whose
    gradients are sparse.
    """

    def __init__(
        self,
        entries: Sequence[BucketParameter],
        *,
        sparse_flags: Sequence[bool],
        config: ReducerConfig,
        transport: Transport,
        device: torch.device,
    ) -> None:
        self.transport = transport
        self._entries = entries
        self._sparse_flags = sparse_flags
        self._config = config
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
        """The limit in bytes that each bucket was filled under."""
        return self._assignment.limits

    @property
    def nbytes(self) -> list[int]:
        """The bytes of each bucket."""
        return [bucket.nbytes for bucket in self._buckets]

    @property
    def is_issued(self) -> bool:
        """Whether every bucket is on its way."""
        return self._next == len(self._buckets)

    # --- a reduction -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Expect every gradient anew."""
        self._next = 0
        for bucket in self._buckets:
            bucket.begin()

    def expect_fresh(self) -> None:
        """Called before a backward has given any gradient: what is None now will be a gradient of this backward."""
        for bucket in self._buckets:
            bucket.expect_fresh()

    def take(self, index: int, scale: Tensor | None, *, used: bool) -> bool:
        """
        The gradient of parameter `index` is ready: put it into its bucket, and issue what is full then.

        True if that was the last: every bucket is on its way. `scale` and `used` are those of `Bucket.take`.
        """
        bucket, place = self._places[index]
        bucket.take(place, scale, self.transport, used=used)
        if bucket.pending:
            return False
        self._issue()
        return self.is_issued

    def finish(self, used_anywhere: Callable[[int], bool] | None) -> None:
        """Await every bucket, and hand the averages over; `used_anywhere` is that of `Bucket.finish`."""
        for bucket in self._buckets:
            bucket.finish(self.transport, used_anywhere)

    def start_empty(self) -> None:
        """Issue what the other ranks issue, without gradients of one's own. Collective."""
        for bucket in self._buckets:
            bucket.start_empty(self.transport)

    def finish_empty(self) -> None:
        """Await what `start_empty` issued. Collective."""
        for bucket in self._buckets:
            bucket.finish_empty(self.transport)

    def abandon(self) -> None:
        """Await what is under way, and forget it."""
        for bucket in self._buckets:
            # A collective that failed says so to whoever issues the next one.
            with contextlib.suppress(RuntimeError):
                bucket.abandon(self.transport)

    def _issue(self) -> None:
        """Issue the buckets that are full, up to the first that is not."""
        while self._next < len(self._buckets) and not self._buckets[self._next].pending:
            bucket = self._buckets[self._next]
            with record_function(f"Reducer::reduce {bucket.index} of {bucket.count}"):
                bucket.start(self.transport)
            self._next += 1

    # --- between reductions ------------------------------------------------------------------------------------------

    def rebuild(self, mine: Sequence[int]) -> None:
        """
        Put the parameters into buckets in the order of the group's first rank; this one's own is `mine`. Collective.

        Raises ReductionError, on every rank, for an order that does not name each parameter once.
        """
        order = self._order_of_first_rank(mine)
        if sorted(order) != list(range(len(self._entries))):
            ready = len(order) - order.count(_MISSING)
            raise ReductionError(
                f"{ready} gradients were ready in the first backward, but should be {len(self._entries)}",
                where="Reducer.rebuild",
            )
        self._lay_out(order)

    def _order_of_first_rank(self, mine: Sequence[int]) -> list[int]:
        """The first rank's order. Collective."""
        group = self.transport.group
        if group.size() == 1:
            return list(mine)
        # The same number of elements on every rank, so that a wrong order is an error and no mismatched collective.
        count = len(self._entries)
        padded = [*mine, *[_MISSING] * count][:count]
        order = torch.tensor(padded, dtype=torch.int64).to(self._device)
        return [int(index) for index in mesh_broadcast(order, group).wait().tolist()]

    def _lay_out(self, order: Sequence[int]) -> None:
        """Put the parameters into buckets, in this order. What the buckets before held goes first."""
        self._buckets: list[Bucket] = []
        self._places: dict[int, tuple[Bucket, int]] = {}
        self._assignment = BucketAssignment((), ())
        self._next = 0  # the bucket to be issued next
        if order:
            tensors = [self._entries[index].parameter for index in order]
            self._assignment = bucket_assignment(tensors, self._config.bucket_limits, self._sparse_flags, order)
        for number, indices in enumerate(self._assignment.buckets):
            entries = [self._entries[index] for index in indices]
            bucket = self._new_bucket(number, entries, sparse=self._assignment.limits[number] == NO_LIMIT)
            self._buckets.append(bucket)
            self._places.update({entry.index: (bucket, place) for place, entry in enumerate(entries)})

    def _new_bucket(self, number: int, entries: Sequence[BucketParameter], *, sparse: bool) -> Bucket:
        count = len(self._assignment.buckets)
        if sparse and self._sparse_flags[entries[0].index]:
            return SparseBucket(number, count, entries)
        return DenseBucket(number, count, entries, gradient_as_view=self._config.gradient_as_bucket_view)
