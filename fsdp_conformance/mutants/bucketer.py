"""Wrong bucketers: what waits, what is coalesced with what, and who gets which result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_conformance.adapters.components import Bucketer
from fsdp_conformance.adapters.vendors.reference_components import ReferenceComponents
from fsdp_conformance.engine.bucketing.bucket_assignment import MIB
from fsdp_conformance.engine.bucketing.reduce_scatter_bucketer import Callback, Pending, ReduceScatterBucketer, _Bucket
from fsdp_conformance.mutants.mutant import known_wrong

Inputs = Sequence[Tensor] | Tensor


class _SeamBucketer(ReduceScatterBucketer):
    """The engine's bucketer with seams to override."""

    def reduce_scatter(
        self, inputs: Inputs, group: ProcessGroup | None = None, callback: Callback | None = None
    ) -> Pending:
        inputs, callback = self.changed(inputs, callback)
        self.before(inputs, group)
        pending = super().reduce_scatter(inputs, group, callback)
        self.behind(inputs, group)
        return pending

    def changed(self, inputs: Inputs, callback: Callback | None) -> tuple[Inputs, Callback | None]:
        """Return what is passed on instead."""
        return inputs, callback

    def before(self, inputs: Inputs, group: ProcessGroup | None) -> None:
        """Called before an input is handled."""

    def behind(self, inputs: Inputs, group: ProcessGroup | None) -> None:
        """Called after the input was placed or sent."""

    def bucket_of(self, inputs: Inputs, group: ProcessGroup | None) -> _Bucket:
        """The bucket for an input."""
        return self._bucket(inputs[0].dtype, inputs[0].device, group or dist.group.WORLD)  # type: ignore[arg-type]

    def is_large(self, inputs: Inputs) -> bool:
        """True if an input is reduced at once."""
        return inputs[0].numel() > self.shard_capacity(inputs[0].dtype)


class SeamBucketer(ReferenceComponents):
    """An adapter for the engine's bucketer or a subclass of it."""

    bucketer: ClassVar[type[_SeamBucketer]] = _SeamBucketer

    def reduce_scatter_bucketer(self, cap_bytes: float) -> Bucketer:
        return self.bucketer(cap_bytes / MIB)


# --- capacity --------------------------------------------------------------------------------------------------------


@known_wrong("R172")
class CapacityForOneRank(SeamBucketer):
    """The capacity is taken as the size of one rank's row."""

    def reduce_scatter_bucketer(self, cap_bytes: float) -> Bucketer:
        return super().reduce_scatter_bucketer(cap_bytes * dist.get_world_size())


class _RoundingUp(_SeamBucketer):
    def before(self, inputs: Inputs, group: ProcessGroup | None) -> None:
        unit = dist.get_world_size(group) * inputs[0].element_size()
        self.bucket_cap_mb = math.ceil(self.bucket_cap_mb * MIB / unit) * unit / MIB


@known_wrong("R172")
class CapacityRoundsUp(SeamBucketer):
    """The capacity is rounded up to the next element."""

    bucketer = _RoundingUp


class _SendingAtCapacity(_SeamBucketer):
    def before(self, inputs: Inputs, group: ProcessGroup | None) -> None:
        self.fills = inputs[0].numel() == self.shard_capacity(inputs[0].dtype, group)

    def behind(self, inputs: Inputs, group: ProcessGroup | None) -> None:
        if self.fills:
            self.flush()


@known_wrong("R172")
class ReducesAtCapacity(SeamBucketer):
    """An input of exactly the capacity is reduced at once instead of waiting."""

    bucketer = _SendingAtCapacity


@known_wrong("R172")
class NoCapForZero(SeamBucketer):
    """A capacity of zero is treated as no limit."""

    def reduce_scatter_bucketer(self, cap_bytes: float) -> Bucketer:
        nothing = cap_bytes < 4 * dist.get_world_size()
        return super().reduce_scatter_bucketer(math.inf if nothing else cap_bytes)


# --- order -----------------------------------------------------------------------------------------------------------


class _FlushingBefore(_SeamBucketer):
    def before(self, inputs: Inputs, group: ProcessGroup | None) -> None:
        if self.is_large(inputs):
            self.flush()


@known_wrong("R173")
class LargeInputFlushes(SeamBucketer):
    """A large input flushes the inputs that are waiting."""

    bucketer = _FlushingBefore


class _Dropping(_SeamBucketer):
    def before(self, inputs: Inputs, group: ProcessGroup | None) -> None:
        bucket = self.bucket_of(inputs, group)
        if self.is_large(inputs) and bucket.pending:
            bucket.take()


@known_wrong("R173")
class LargeInputDropsPending(SeamBucketer):
    """Pending inputs are lost when a large input arrives."""

    bucketer = _Dropping


class _Waiting(_SeamBucketer):
    def before(self, inputs: Inputs, group: ProcessGroup | None) -> None:
        if self.is_large(inputs):
            self.bucket_cap_mb = math.inf


@known_wrong("R173")
class LargeInputWaits(SeamBucketer):
    """A large input waits in a bucket beyond its capacity."""

    bucketer = _Waiting


class _FlushingWhenFull(_SeamBucketer):
    def behind(self, inputs: Inputs, group: ProcessGroup | None) -> None:
        if self.bucket_of(inputs, group).offset >= self.shard_capacity(inputs[0].dtype, group):
            self.flush()


@known_wrong("R174")
class FlushesWhenFull(SeamBucketer):
    """A bucket is flushed as soon as it is full."""

    bucketer = _FlushingWhenFull


class _PlacingFirst(_SeamBucketer):
    def before(self, inputs: Inputs, group: ProcessGroup | None) -> None:
        self.cap = self.bucket_cap_mb
        if not self.is_large(inputs):
            self.bucket_cap_mb = math.inf

    def behind(self, inputs: Inputs, group: ProcessGroup | None) -> None:
        self.bucket_cap_mb = self.cap
        if self.bucket_of(inputs, group).offset > self.shard_capacity(inputs[0].dtype, group):
            self.flush()


@known_wrong("R174")
class PlacesThenFlushes(SeamBucketer):
    """An input that does not fit is flushed together with the pending ones."""

    bucketer = _PlacingFirst


# --- separation ------------------------------------------------------------------------------------------------------


class _SharedByMembers(_SeamBucketer):
    def _bucket(self, dtype: torch.dtype, device: torch.device, group: ProcessGroup) -> _Bucket:
        alike = [
            bucket
            for bucket in self._buckets.values()
            if (bucket.dtype, bucket.device, bucket.world_size) == (dtype, device, group.size())
        ]
        return alike[0] if alike else super()._bucket(dtype, device, group)


@known_wrong("R175")
class OneBucketForEqualGroups(SeamBucketer):
    """Groups of the same size share a bucket."""

    bucketer = _SharedByMembers


class _SharedByDtypes(_SeamBucketer):
    def changed(self, inputs: Inputs, callback: Callback | None) -> tuple[Inputs, Callback | None]:
        dtype = inputs[0].dtype

        def cast(result: Tensor) -> None:
            if callback is not None:
                callback(result.to(dtype))

        return [row.float() for row in inputs], cast


@known_wrong("R175")
class OneBucketForDtypes(SeamBucketer):
    """Wide inputs are rounded so that they share a bucket with others."""

    bucketer = _SharedByDtypes


class _Reversed(_SeamBucketer):
    def flush(self) -> None:
        for bucket in self._buckets.values():
            callbacks = [pending.callback for pending in bucket.pending]
            for pending, callback in zip(bucket.pending, reversed(callbacks), strict=True):
                pending.callback = callback
        super().flush()


@known_wrong("R175")
class CallbacksReversed(SeamBucketer):
    """The callbacks of a bucket run in reverse order, each with the wrong result."""

    bucketer = _Reversed


class _Rotated(_SeamBucketer):
    def changed(self, inputs: Inputs, callback: Callback | None) -> tuple[Inputs, Callback | None]:
        return [*inputs[1:], inputs[0]], callback


@known_wrong("R175")
class NextRanksShard(SeamBucketer):
    """Each rank gets the next rank's shard."""

    bucketer = _Rotated


class _Reusing(_SeamBucketer):
    memory: Tensor | None = None

    def changed(self, inputs: Inputs, callback: Callback | None) -> tuple[Inputs, Callback | None]:
        def reusing(result: Tensor) -> None:
            if self.memory is None:
                self.memory = result.new_zeros(64)
            view = self.memory[: result.numel()].view(result.shape)
            view.copy_(result)
            if callback is not None:
                callback(view)

        return inputs, reusing


@known_wrong("R175")
class ResultBufferReused(SeamBucketer):
    """Every result is written into the same memory."""

    bucketer = _Reusing


class _Twice(_SeamBucketer):
    def changed(self, inputs: Inputs, callback: Callback | None) -> tuple[Inputs, Callback | None]:
        def twice(result: Tensor) -> None:
            if callback is not None:
                callback(result)
                callback(result)

        return inputs, twice


@known_wrong("R175")
class CalledTwice(SeamBucketer):
    """Every callback is called twice."""

    bucketer = _Twice


class _Flat(_SeamBucketer):
    def changed(self, inputs: Inputs, callback: Callback | None) -> tuple[Inputs, Callback | None]:
        return [row.reshape(-1) for row in inputs], callback


@known_wrong("R175")
class FlatResults(SeamBucketer):
    """Results are flat, whatever the shape of the inputs."""

    bucketer = _Flat


class _ByMemory(_SeamBucketer):
    def changed(self, inputs: Inputs, callback: Callback | None) -> tuple[Inputs, Callback | None]:
        return [row.as_strided((row.numel(),), (1,)).view(row.shape) for row in inputs], callback


@known_wrong("R175")
class RowsFlattenedByMemory(SeamBucketer):
    """Inputs are sent in memory order, ignoring their strides."""

    bucketer = _ByMemory


# --- edges -----------------------------------------------------------------------------------------------------------


class _AnyLength(_SeamBucketer):
    def changed(self, inputs: Inputs, callback: Callback | None) -> tuple[Inputs, Callback | None]:
        size = dist.get_world_size()
        return [*inputs, *[inputs[0]] * size][:size], callback


@known_wrong("R176")
class AnyLengthAccepted(SeamBucketer):
    """A list of the wrong length is padded or truncated."""

    bucketer = _AnyLength


class _DroppingAtTeardown(_SeamBucketer):
    def teardown(self) -> None:
        for bucket in self._buckets.values():
            if bucket.pending:
                bucket.take()
        super().teardown()


@known_wrong("R176")
class TeardownDropsPending(SeamBucketer):
    """Teardown drops pending inputs."""

    bucketer = _DroppingAtTeardown


class _AlwaysFlushing(_SeamBucketer):
    def flush(self) -> None:
        if not self.num_pending:
            nothing = torch.zeros(dist.get_world_size())
            super().reduce_scatter(list(nothing.unbind()))
        super().flush()


@known_wrong("R176")
class EmptyFlushCommunicates(SeamBucketer):
    """Flushing an empty bucketer issues a collective."""

    bucketer = _AlwaysFlushing


class _Final(_SeamBucketer):
    down = False

    def teardown(self) -> None:
        super().teardown()
        self.down = True

    def changed(self, inputs: Inputs, callback: Callback | None) -> tuple[Inputs, Callback | None]:
        return inputs, None if self.down else callback


@known_wrong("R176")
class TeardownIsFinal(SeamBucketer):
    """After teardown no callback ever runs, even after a new setup."""

    bucketer = _Final


class _Forgetting(_SeamBucketer):
    def changed(self, inputs: Inputs, callback: Callback | None) -> tuple[Inputs, Callback | None]:
        return inputs, callback if inputs[0].numel() else None


@known_wrong("R176")
class EmptyInputForgotten(SeamBucketer):
    """The callback of an input without elements never runs."""

    bucketer = _Forgetting


class _LosingFromCallbacks(_SeamBucketer):
    def wait(self) -> None:
        before = {id(pending) for bucket in self._buckets.values() for pending in bucket.pending}
        super().wait()
        for bucket in self._buckets.values():
            if any(id(pending) not in before for pending in bucket.pending):
                bucket.take()


@known_wrong("R176")
class LostFromCallbacks(SeamBucketer):
    """Inputs that a callback submits are lost."""

    bucketer = _LosingFromCallbacks
