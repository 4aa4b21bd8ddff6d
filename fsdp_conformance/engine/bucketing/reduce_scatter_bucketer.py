"""
Coalesces small reduce-scatters: inputs wait in a bucket until it is full, and one collective reduces them all.

    bucketer = ReduceScatterBucketer(bucket_cap_mb=25)
    bucketer.reduce_scatter([big_0, big_1], group, callback)    # over the capacity: started at once
    bucketer.reduce_scatter([a_0, a_1], group, callback)        # waits in the bucket
    bucketer.reduce_scatter([b_0, b_1], group, callback)        # too
    bucketer.flush()                                            # one collective for a and b
    bucketer.wait()                                             # callbacks: big, a, b, each with this rank's sum
    bucketer.teardown()                                         # the buffers are freed; the results stay valid

There is a bucket for each dtype, device and group *object*: two groups with the same members do not share. Sums only;
averaging is the caller's affair.

What a rank calls decides what is sent, so every rank of a group has to call the same with the same shapes.
Collectives are started, and callbacks run, only inside these calls, in an order that does not depend on timing: a
callback may start collectives of its own. `wait` runs callbacks in the order in which their collectives were started,
and within one in the order of the calls; with `max_in_flight` older collectives are waited for when newer ones are
started. On accelerators waiting orders the current stream after the collective, and the host runs on.

Source: fairscale's `ReduceScatterBucketer` (internal/reduce_scatter_bucketer.py), whose order and capacity these are.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from fsdp_conformance.engine.errors import BucketerError, DataPending, InputMismatch
from fsdp_conformance.engine.flat_collectives import reduce_scatter, resolve_group
from fsdp_conformance.engine.streams import Streams

#: Called with this rank's sum, in the shape of one input.
Callback = Callable[[Tensor], object]

_Key = tuple[torch.dtype, torch.device, int]


class Pending:
    """What `reduce_scatter` returns: whether one input has been reduced, and its result."""

    def __init__(self, shape: torch.Size, callback: Callback | None) -> None:
        self.shape = shape
        self.callback = callback
        self.result: Tensor | None = None
        """This rank's sum, once `wait` has come to it: a view of what was reduced with it."""

    @property
    def done(self) -> bool:
        """Whether it is reduced: its callback has run, or is running."""
        return self.result is not None


class _Input(NamedTuple):
    """One input, checked."""

    rows: list[Tensor]
    """One tensor for each rank."""
    flat: Tensor | None
    """The same as one contiguous 1D tensor, where it is one."""
    pending: Pending

    @property
    def row_numel(self) -> int:
        return self.rows[0].numel()


class _Launch(NamedTuple):
    """A collective on its way."""

    work: Work | None
    output: Tensor  # 1D: this rank's sums, one after the other
    pending: list[Pending]
    source: Tensor  # kept until the collective has read it
    stream: Any
    streams: Streams


class _Bucket:
    """What waits for one (dtype, device, group)."""

    def __init__(self, dtype: torch.dtype, device: torch.device, group: ProcessGroup) -> None:
        self.group = group
        self.dtype = dtype
        self.device = device
        self.streams = Streams(device)
        self.world_size = dist.get_world_size(group)
        self.offset = 0
        self.pending: list[Pending] = []
        self._buffer: Tensor | None = None  # (world_size, row_numel): row r is what rank r will get the sum of
        self._stream: Any = None
        """The stream that wrote the buffer last."""

    @property
    def nbytes(self) -> int:
        """Bytes of its buffer."""
        return 0 if self._buffer is None else self._buffer.untyped_storage().nbytes()

    def place(self, given: _Input, capacity: int) -> None:
        """Copy an input in; the caller may use its memory again."""
        end = self.offset + given.row_numel
        buffer = self._grown(end, capacity)
        if given.row_numel:
            rows = buffer[:, self.offset : end]
            if given.flat is not None:
                rows.copy_(given.flat.view(self.world_size, -1))
            else:
                torch._foreach_copy_(list(rows.unbind(0)), [row.reshape(-1) for row in given.rows])
        self.pending.append(given.pending)
        self.offset = end

    def take(self) -> tuple[Tensor, list[Pending]]:
        """What waits, as one contiguous 1D tensor, rank after rank. The bucket is empty then."""
        buffer, end, pending = self._buffer, self.offset, self.pending
        assert buffer is not None, "something was placed"
        self._follow(buffer)
        if end == buffer.size(1):
            flat, self._buffer = buffer.view(-1), None  # It goes with the collective.
        else:
            flat = buffer[:, :end].contiguous().view(-1)
        self.offset, self.pending = 0, []
        return flat, pending

    def free(self) -> None:
        """Free the buffer. Nothing must wait."""
        self._buffer = self._stream = None

    def _grown(self, end: int, capacity: int) -> Tensor:
        """The buffer, with room for `end` elements in a row: at least doubled, at most the capacity."""
        old = self._buffer
        if old is not None:
            self._follow(old)
            if end <= old.size(1):
                return old
        row_numel = max(end, min(2 * (0 if old is None else old.size(1)), capacity))
        grown = torch.empty((self.world_size, row_numel), dtype=self.dtype, device=self.device)
        if old is not None:
            grown[:, : self.offset].copy_(old[:, : self.offset])
        self._buffer, self._stream = grown, self.streams.current()
        return grown

    def _follow(self, buffer: Tensor) -> None:
        """The current stream goes on with the buffer, after the one that wrote it last."""
        self.streams.follow([self._stream])
        self.streams.keep(buffer, self._stream)
        self._stream = self.streams.current()


class ReduceScatterBucketer:
    """
    Reduce-scatters, small ones coalesced. See the module's docstring.

    `bucket_cap_mb`: what a bucket may hold for all ranks together, in MiB; a fraction is fine, inf is no cap, 0 or less
    means that nothing waits. It is read when it is used, and may be changed at any time. `max_in_flight`: how many
    collectives may be on their way before the oldest is waited for, and its callbacks run; None: any number.
    """

    def __init__(self, bucket_cap_mb: float = 25.0, *, max_in_flight: int | None = None) -> None:
        self.bucket_cap_mb = bucket_cap_mb
        if max_in_flight is not None and max_in_flight < 0:
            raise BucketerError(
                f"max_in_flight={max_in_flight}, but should be at least 0, or None", where="ReduceScatterBucketer"
            )
        self.max_in_flight = max_in_flight
        self._buckets: dict[_Key, _Bucket] = {}
        self._in_flight: deque[_Launch] = deque()
        self._reduced: deque[Pending] = deque()

    @property
    def bucket_cap_mb(self) -> float:
        """The cap in MiB."""
        return self._bucket_cap_mb

    @bucket_cap_mb.setter
    def bucket_cap_mb(self, value: float) -> None:
        if math.isnan(value):
            raise BucketerError("bucket_cap_mb=nan, but should be a number", where="ReduceScatterBucketer")
        self._bucket_cap_mb = value

    @property
    def num_pending(self) -> int:
        """Inputs that wait in buckets."""
        return sum(len(bucket.pending) for bucket in self._buckets.values())

    @property
    def num_in_flight(self) -> int:
        """Inputs whose collective was started, and whose callback has not run."""
        return sum(len(launch.pending) for launch in self._in_flight) + len(self._reduced)

    @property
    def buffer_nbytes(self) -> int:
        """Bytes of the buffers that buckets hold now."""
        return sum(bucket.nbytes for bucket in self._buckets.values())

    def shard_capacity(self, dtype: torch.dtype, group: ProcessGroup | None = None) -> int:
        """How many elements for one rank a bucket holds: floor(cap / element size / group size)."""
        return _capacity(self.bucket_cap_mb, dtype, dist.get_world_size(resolve_group(group)))

    @torch.no_grad()
    def reduce_scatter(
        self,
        inputs: Sequence[Tensor] | Tensor,
        group: ProcessGroup | None = None,
        callback: Callback | None = None,
    ) -> Pending:
        """
        Sum `inputs` over the ranks of `group`, each keeping its own part.

        inputs: one tensor for each rank, of one shape, any strides; or one tensor whose first dimension is split evenly
        over the ranks. Strictly more elements for one rank than a bucket holds: started at once, past what waits, from
        the caller's memory if that is contiguous; it must then stay as it is until the callback. Else it is copied into
        the bucket, which is flushed first if there is not room enough. Raises InputMismatch naming all that is wrong.
        """
        group = resolve_group(group)
        given = _checked(inputs, dist.get_world_size(group), callback)
        bucket = self._bucket(given.rows[0].dtype, given.rows[0].device, group)
        capacity = _capacity(self.bucket_cap_mb, bucket.dtype, bucket.world_size)
        # Where nothing may wait, an empty input does not either.
        if given.row_numel > capacity or capacity == 0:
            self._launch(bucket, _as_flat(given), [given.pending])
            return given.pending
        if given.row_numel > capacity - bucket.offset:
            self._flush(bucket)
        bucket.place(given, capacity)
        return given.pending

    @torch.no_grad()
    def flush(self) -> None:
        """
        Start a collective for each bucket in which something waits, in the order in which the buckets were made.

        What belongs to a collective that cannot be started is dropped, and the exception is raised.
        """
        for bucket in list(self._buckets.values()):
            self._flush(bucket)

    def wait(self) -> None:
        """
        Wait for every collective that was started, and run the callbacks.

        What callbacks start is waited for too; what they put into a bucket stays there until the next flush. If
        callbacks raise, the others run all the same; then the exception is raised, several as an ExceptionGroup.
        """
        self._drain(0)

    def setup(self) -> None:
        """Nothing has to be set up: buckets make their buffers when they need them, after `teardown` too."""

    def teardown(self) -> None:
        """
        Wait for what is on its way, and free every buffer. Results that were handed out stay valid.

        Raises DataPending if inputs wait in a bucket, also such as a callback has put there; they are not lost: flush.
        """
        self._check_nothing_waits()
        self.wait()
        self._check_nothing_waits()
        for bucket in self._buckets.values():
            bucket.free()
        self._buckets.clear()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _check_nothing_waits(self) -> None:
        waiting = {key: len(bucket.pending) for key, bucket in self._buckets.items() if bucket.pending}
        if waiting:
            raise DataPending(
                [
                    f"{number} inputs of {key[0]} on {key[1]} wait, but should be none"
                    for key, number in waiting.items()
                ],
                where="ReduceScatterBucketer.teardown",
                hint="Call flush() and wait() first",
            )

    def _bucket(self, dtype: torch.dtype, device: torch.device, group: ProcessGroup) -> _Bucket:
        key = (dtype, device, id(group))  # The bucket keeps the group, so that its id stays its own.
        if key not in self._buckets:
            self._buckets[key] = _Bucket(dtype, device, group)
        return self._buckets[key]

    def _flush(self, bucket: _Bucket) -> None:
        if bucket.pending:
            self._launch(bucket, *bucket.take())

    def _launch(self, bucket: _Bucket, flat: Tensor, pending: list[Pending]) -> None:
        """Start a collective; nothing is sent where there is nothing to sum, or nobody to sum with."""
        if bucket.world_size == 1:
            output, work = flat.clone(), None
        else:
            output = flat.new_empty(flat.numel() // bucket.world_size)
            work = reduce_scatter(output, flat, bucket.group) if flat.numel() else None
        stream = bucket.streams.current()
        self._in_flight.append(_Launch(work, output, pending, flat, stream, bucket.streams))
        if self.max_in_flight is not None:
            self._drain(self.max_in_flight)

    def _drain(self, num_left: int) -> None:
        """Wait for the oldest collectives until `num_left` are on their way, running their callbacks."""
        failures: list[Exception] = []
        while self._reduced or len(self._in_flight) > num_left:
            if not self._reduced:
                self._reduced.extend(_finished(self._in_flight.popleft()))
            # Taken off the queue first: a callback that waits itself runs those behind it, and none runs twice.
            pending = self._reduced.popleft()
            if pending.callback is not None:
                callback, pending.callback = pending.callback, None
                assert pending.result is not None, "what is in the queue has been reduced"
                try:
                    callback(pending.result)
                except Exception as error:  # noqa: BLE001 - raised below, after the callbacks of others
                    failures.append(error)
        if len(failures) == 1:
            raise failures[0]
        if failures:
            raise ExceptionGroup(f"{len(failures)} callbacks of a ReduceScatterBucketer raised", failures)


def _finished(launch: _Launch) -> list[Pending]:
    """Wait for a collective, and give each input its part of the result, for the current stream."""
    if launch.work is not None:
        launch.work.wait()
    for tensor in (launch.output, launch.source):
        launch.streams.keep(tensor, launch.stream)
    offset = 0
    for pending in launch.pending:
        end = offset + pending.shape.numel()
        pending.result = launch.output[offset:end].view(pending.shape)
        offset = end
    return launch.pending


def _capacity(cap_mb: float, dtype: torch.dtype, world_size: int) -> int:
    """Elements of one rank's row: the cap is for the rows of all ranks together."""
    if cap_mb == math.inf:
        return sys.maxsize
    return max(int(cap_mb * 2**20 // dtype.itemsize // world_size), 0)


def _checked(inputs: Sequence[Tensor] | Tensor, world_size: int, callback: Callback | None) -> _Input:
    """The inputs as one tensor for each rank. Raises InputMismatch naming all that is wrong."""
    where = "ReduceScatterBucketer.reduce_scatter"
    if isinstance(inputs, Tensor):
        if inputs.dim() == 0 or inputs.size(0) % world_size or inputs.layout is not torch.strided:
            raise InputMismatch(
                f"inputs={tuple(inputs.shape)}, {inputs.layout}, but should be strided, and have a first dimension "
                f"that the group size {world_size} divides",
                where=where,
            )
        flat = inputs.view(-1) if inputs.is_contiguous() else None
        rows = list(inputs.chunk(world_size)) if inputs.size(0) else [inputs] * world_size
        return _Input(rows, flat, Pending(rows[0].shape, callback))
    if len(inputs) != world_size:
        raise InputMismatch(f"{len(inputs)} inputs, but should be {world_size}, one for each rank", where=where)
    first = inputs[0]
    expected = (first.shape, first.dtype, first.device, torch.strided)
    problems = [
        f"inputs[{index}]={tuple(row.shape)} of {row.dtype} on {row.device}, {row.layout}, but should be "
        f"{tuple(first.shape)} of {first.dtype} on {first.device}, torch.strided"
        for index, row in enumerate(inputs)
        if (row.shape, row.dtype, row.device, row.layout) != expected
    ]
    if problems:
        raise InputMismatch(problems, where=where)
    return _Input(list(inputs), _joined(inputs), Pending(first.shape, callback))


def _joined(rows: Sequence[Tensor]) -> Tensor | None:
    """The rows as one 1D view of their memory, if they lie one behind the other in it."""
    first, numel = rows[0], rows[0].numel()
    storage = first.untyped_storage().data_ptr()
    for rank, row in enumerate(rows):
        neighbour = row.storage_offset() == first.storage_offset() + rank * numel
        if not (neighbour and row.is_contiguous() and row.untyped_storage().data_ptr() == storage):
            return None
    return first.detach().as_strided((numel * len(rows),), (1,))


def _as_flat(given: _Input) -> Tensor:
    """The input as one contiguous 1D tensor, rank after rank: the caller's memory where it can be."""
    if given.flat is not None:
        return given.flat.detach()
    return torch.cat([row.reshape(-1) for row in given.rows])
