"""The reduce-scatter bucketer: what waits, what goes with what, and who gets what."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_conformance.adapters.components import Bucketer
from fsdp_conformance.adapters.reference_components import ReferenceComponents
from fsdp_conformance.engine.bucketing.bucket_assignment import MIB
from fsdp_conformance.engine.bucketing.reduce_scatter_bucketer import Callback, Pending, ReduceScatterBucketer, _Bucket
from fsdp_conformance.mutants.mutant import known_wrong

Inputs = Sequence[Tensor] | Tensor


class _SeamBucketer(ReduceScatterBucketer):
    """The engine's, with places to be wrong at."""

    def reduce_scatter(
        self, inputs: Inputs, group: ProcessGroup | None = None, callback: Callback | None = None
    ) -> Pending:
        inputs, callback = self.changed(inputs, callback)
        self.before(inputs, group)
        pending = super().reduce_scatter(inputs, group, callback)
        self.behind(inputs, group)
        return pending

    def changed(self, inputs: Inputs, callback: Callback | None) -> tuple[Inputs, Callback | None]:
        """What is given instead."""
        return inputs, callback

    def before(self, inputs: Inputs, group: ProcessGroup | None) -> None:
        """Called before an input is looked at."""

    def behind(self, inputs: Inputs, group: ProcessGroup | None) -> None:
        """Called when it has been placed, or sent."""

    def bucket_of(self, inputs: Inputs, group: ProcessGroup | None) -> _Bucket:
        """The bucket that the input belongs into."""
        return self._bucket(inputs[0].dtype, inputs[0].device, group or dist.group.WORLD)  # type: ignore[arg-type]

    def is_large(self, inputs: Inputs) -> bool:
        """Whether it does not wait."""
        return inputs[0].numel() > self.shard_capacity(inputs[0].dtype)


class SeamBucketer(ReferenceComponents):
    """The engine's bucketer, or a subclass of it."""

    bucketer: ClassVar[type[_SeamBucketer]] = _SeamBucketer

    def reduce_scatter_bucketer(self, cap_bytes: float) -> Bucketer:
        return self.bucketer(cap_bytes / MIB)


# --- capacity --------------------------------------------------------------------------------------------------------


@known_wrong("R172")
class CapacityForOneRank(SeamBucketer):
    """The cap is taken for that of one rank's row."""

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
    """An input of exactly the capacity does not wait."""

    bucketer = _SendingAtCapacity


@known_wrong("R172")
class NoCapForZero(SeamBucketer):
    """A cap of nothing is taken for no cap."""

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
    """A large input flushes what waits before it."""

    bucketer = _FlushingBefore


class _Dropping(_SeamBucketer):
    def before(self, inputs: Inputs, group: ProcessGroup | None) -> None:
        bucket = self.bucket_of(inputs, group)
        if self.is_large(inputs) and bucket.pending:
            bucket.take()


@known_wrong("R173")
class LargeInputDropsPending(SeamBucketer):
    """What waits is lost when a large input comes."""

    bucketer = _Dropping


class _Waiting(_SeamBucketer):
    def before(self, inputs: Inputs, group: ProcessGroup | None) -> None:
        if self.is_large(inputs):
            self.bucket_cap_mb = math.inf


@known_wrong("R173")
class LargeInputWaits(SeamBucketer):
    """A large input waits like others, beyond the capacity."""

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
    """An input that does not fit is flushed together with what waits."""

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
    """Wide inputs are rounded and share a bucket with others."""

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
    """The callbacks of a bucket are called in reverse, each with another one's result."""

    bucketer = _Reversed


class _Rotated(_SeamBucketer):
    def changed(self, inputs: Inputs, callback: Callback | None) -> tuple[Inputs, Callback | None]:
        return [*inputs[1:], inputs[0]], callback


@known_wrong("R175")
class NextRanksShard(SeamBucketer):
    """Each rank gets the shard of the next one."""

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
    """Results are flat, whatever the shape of the inputs is."""

    bucketer = _Flat


class _ByMemory(_SeamBucketer):
    def changed(self, inputs: Inputs, callback: Callback | None) -> tuple[Inputs, Callback | None]:
        return [row.as_strided((row.numel(),), (1,)).view(row.shape) for row in inputs], callback


@known_wrong("R175")
class RowsFlattenedByMemory(SeamBucketer):
    """Inputs are sent as they lie in memory, whatever their strides are."""

    bucketer = _ByMemory


# --- edges -----------------------------------------------------------------------------------------------------------


class _AnyLength(_SeamBucketer):
    def changed(self, inputs: Inputs, callback: Callback | None) -> tuple[Inputs, Callback | None]:
        size = dist.get_world_size()
        return [*inputs, *[inputs[0]] * size][:size], callback


@known_wrong("R176")
class AnyLengthAccepted(SeamBucketer):
    """A list of the wrong length is filled up, or cut."""

    bucketer = _AnyLength


class _DroppingAtTeardown(_SeamBucketer):
    def teardown(self) -> None:
        for bucket in self._buckets.values():
            if bucket.pending:
                bucket.take()
        super().teardown()


@known_wrong("R176")
class TeardownDropsPending(SeamBucketer):
    """Teardown drops what is pending."""

    bucketer = _DroppingAtTeardown


class _AlwaysFlushing(_SeamBucketer):
    def flush(self) -> None:
        if not self.num_pending:
            nothing = torch.zeros(dist.get_world_size())
            super().reduce_scatter(list(nothing.unbind()))
        super().flush()


@known_wrong("R176")
class EmptyFlushCommunicates(SeamBucketer):
    """A flush of nothing sends something."""

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
    """After teardown nothing calls back, set up or not."""

    bucketer = _Final


class _Forgetting(_SeamBucketer):
    def changed(self, inputs: Inputs, callback: Callback | None) -> tuple[Inputs, Callback | None]:
        return inputs, callback if inputs[0].numel() else None


@known_wrong("R176")
class EmptyInputForgotten(SeamBucketer):
    """An input without elements never calls back."""

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
    """What a callback gives to the bucketer is lost."""

    bucketer = _LosingFromCallbacks
