"""
Coalesces small reduce-scatters: inputs wait in a bucket until it is full, then one collective reduces them all.

    bucketer = ReduceScatterBucketer(bucket_cap_mb=25)
    bucketer.reduce_scatter([big_0, big_1], group, callback)    # over the capacity: started at once
    bucketer.reduce_scatter([a_0, a_1], group, callback)        # waits in the bucket
    bucketer.reduce_scatter([b_0, b_1], group, callback)        # so does this
    bucketer.flush()                                            # one collective for a and b
    bucketer.wait()                                             # callbacks: big, a, b, each with this rank's sum
    bucketer.teardown()                                         # frees the buffers; results stay valid

There is a bucket for each dtype, device and group *object*: two groups with the same members do not share one. Results
are sums; the caller averages.

Every rank of a group must make the same calls with the same shapes. Collectives are started and callbacks run only
inside these calls, in an order that does not depend on timing, so a callback may start collectives itself. `wait` runs
callbacks in the order in which their collectives were started, and within one collective in the order of the calls. On
accelerators, waiting orders the current stream after the collective; the host does not wait.

Source: fairscale's `ReduceScatterBucketer` (internal/reduce_scatter_bucketer.py), which has the same order and
capacity.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from fsdp_conformance.engine.communication import Streams, reduce_scatter, resolve_group
from fsdp_conformance.engine.errors import BucketerError, DataPending, InputMismatch

#: Called with this rank's sum, in the shape of one input.
Callback = Callable[[Tensor], object]

_Key = tuple[torch.dtype, torch.device, int]


class Pending:
    """The handle that `reduce_scatter` returns: whether the input has been reduced, and the result."""

    def __init__(self, shape: torch.Size, callback: Callback | None) -> None:
        self.shape = shape
        self.callback = callback
        self.result: Tensor | None = None
        """This rank's sum, once `wait` has reached it: a view of the output of its collective."""

    @property
    def done(self) -> bool:
        """True if the input is reduced: its callback has run or is running."""
        return self.result is not None


class _Input(NamedTuple):
    """One checked input."""

    rows: list[Tensor]
    """One tensor for each rank."""
    flat: Tensor | None
    """The same memory as one contiguous 1D tensor, if it is contiguous."""
    pending: Pending

    @property
    def row_numel(self) -> int:
        return self.rows[0].numel()


class _Launch(NamedTuple):
    """A collective in progress."""

    work: Work | None
    output: Tensor  # 1D: this rank's sums, one after the other
    pending: list[Pending]
    source: Tensor  # kept until the collective has read it
    stream: torch.Stream | None
    streams: Streams


class _Bucket:
    """The inputs that wait for one (dtype, device, group)."""

    def __init__(self, dtype: torch.dtype, device: torch.device, group: ProcessGroup) -> None:
        self.group = group
        self.dtype = dtype
        self.device = device
        self.streams = Streams(device)
        self.world_size = dist.get_world_size(group)
        self.offset = 0
        self.pending: list[Pending] = []
        self._buffer: Tensor | None = None  # (world_size, row_numel): rank r will get the sum of row r
        self._stream: torch.Stream | None = None
        """The stream that wrote the buffer last."""

    def place(self, item: _Input, capacity: int) -> None:
        """Copy an input into the buffer. The caller may then reuse its memory."""
        end = self.offset + item.row_numel
        buffer = self._grown(end, capacity)
        if item.row_numel:
            rows = buffer[:, self.offset : end]
            if item.flat is not None:
                rows.copy_(item.flat.view(self.world_size, -1))
            else:
                torch._foreach_copy_(list(rows.unbind(0)), [row.reshape(-1) for row in item.rows])
        self.pending.append(item.pending)
        self.offset = end

    def take(self) -> tuple[Tensor, list[Pending]]:
        """Empty the bucket: return what waits, as one contiguous 1D tensor, rank after rank."""
        buffer, end, pending = self._buffer, self.offset, self.pending
        assert buffer is not None, "something was placed"
        self._follow(buffer)
        if end == buffer.size(1):
            flat, self._buffer = buffer.view(-1), None  # the collective keeps it
        else:
            flat = buffer[:, :end].contiguous().view(-1)
        self.offset, self.pending = 0, []
        return flat, pending

    def free(self) -> None:
        """Free the buffer. Nothing may be waiting."""
        self._buffer = self._stream = None

    def _grown(self, end: int, capacity: int) -> Tensor:
        """The buffer, with room for `end` elements per row. It grows by doubling, up to the capacity."""
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
        """Order the current stream after the one that wrote the buffer last."""
        self.streams.follow([self._stream])
        self.streams.keep(buffer, self._stream)
        self._stream = self.streams.current()


class ReduceScatterBucketer:
    """
    Reduce-scatters of which small ones are coalesced. See the module's docstring.

    `bucket_cap_mb`: the capacity of a bucket for all ranks together, in MiB. It may be a fraction; inf is no cap, and
    with 0 or less nothing waits. It may be changed at any time.
    """

    def __init__(self, bucket_cap_mb: float = 25.0) -> None:
        self.bucket_cap_mb = bucket_cap_mb
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
            raise BucketerError("bucket_cap_mb must be a number, got nan", where="ReduceScatterBucketer")
        self._bucket_cap_mb = value

    @property
    def num_pending(self) -> int:
        """The number of inputs that wait in buckets."""
        return sum(len(bucket.pending) for bucket in self._buckets.values())

    def shard_capacity(self, dtype: torch.dtype, group: ProcessGroup | None = None) -> int:
        """The number of elements that a bucket holds for each rank: floor(cap / element size / group size)."""
        return _capacity(self.bucket_cap_mb, dtype, dist.get_world_size(resolve_group(group)))

    @torch.no_grad()
    def reduce_scatter(
        self,
        inputs: Sequence[Tensor] | Tensor,
        group: ProcessGroup | None = None,
        callback: Callback | None = None,
    ) -> Pending:
        """
        Sum `inputs` over the ranks of `group`; each rank keeps its part.

        inputs: one tensor for each rank, all of one shape, with any strides; or one tensor whose first dimension is
        split evenly over the ranks. If they have strictly more elements per rank than a bucket holds, the collective
        starts at once, ahead of inputs that wait. It reads the caller's memory if that is contiguous, which must then
        not change until the callback. Otherwise they are copied into the bucket, which is flushed first if they do not
        fit. Raises InputMismatch with every problem.
        """
        group = resolve_group(group)
        checked = _checked(inputs, dist.get_world_size(group), callback)
        bucket = self._bucket(checked.rows[0].dtype, checked.rows[0].device, group)
        capacity = _capacity(self.bucket_cap_mb, bucket.dtype, bucket.world_size)
        # If the capacity is 0, not even an empty input waits.
        if checked.row_numel > capacity or capacity == 0:
            self._launch(bucket, _as_flat(checked), [checked.pending])
            return checked.pending
        if checked.row_numel > capacity - bucket.offset:
            self._flush(bucket)
        bucket.place(checked, capacity)
        return checked.pending

    @torch.no_grad()
    def flush(self) -> None:
        """
        Start a collective for each bucket that is not empty, in the order in which the buckets were made.

        If a collective cannot be started, its inputs are dropped and the exception is raised.
        """
        for bucket in list(self._buckets.values()):
            self._flush(bucket)

    def wait(self) -> None:
        """
        Wait for every collective that was started, and run the callbacks.

        That includes collectives that callbacks start; what they put into a bucket stays there until the next flush. If
        callbacks raise, the others still run before the exception is raised (several as an ExceptionGroup).
        """
        failures: list[Exception] = []
        while self._reduced or self._in_flight:
            if not self._reduced:
                self._reduced.extend(_finished(self._in_flight.popleft()))
            # Removed first: a callback that calls wait() runs those behind it, and none runs twice.
            pending = self._reduced.popleft()
            if pending.callback is not None:
                callback, pending.callback = pending.callback, None
                assert pending.result is not None, "_finished sets it"
                try:
                    callback(pending.result)
                except Exception as error:  # noqa: BLE001 - raised below, after the callbacks of others
                    failures.append(error)
        if len(failures) == 1:
            raise failures[0]
        if failures:
            raise ExceptionGroup(f"{len(failures)} callbacks of a ReduceScatterBucketer raised", failures)

    def setup(self) -> None:
        """Required of bucketers. Here buckets make their buffers when they need them, also after `teardown`."""

    def teardown(self) -> None:
        """
        Wait for collectives in progress and free every buffer. Results that were handed out stay valid.

        Raises DataPending if inputs wait in a bucket, including those that a callback has put there. They are not lost:
        call flush().
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
                [f"{number} inputs of {key[0]} on {key[1]} are still waiting" for key, number in waiting.items()],
                where="ReduceScatterBucketer.teardown",
                hint="Call flush() and wait() first",
            )

    def _bucket(self, dtype: torch.dtype, device: torch.device, group: ProcessGroup) -> _Bucket:
        key = (dtype, device, id(group))  # the bucket keeps the group alive, so the id stays unique
        if key not in self._buckets:
            self._buckets[key] = _Bucket(dtype, device, group)
        return self._buckets[key]

    def _flush(self, bucket: _Bucket) -> None:
        if bucket.pending:
            self._launch(bucket, *bucket.take())

    def _launch(self, bucket: _Bucket, flat: Tensor, pending: list[Pending]) -> None:
        """Start a collective. Nothing is sent for empty inputs or in a group of one."""
        if bucket.world_size == 1:
            output, work = flat.clone(), None
        else:
            output = flat.new_empty(flat.numel() // bucket.world_size)
            work = reduce_scatter(output, flat, bucket.group) if flat.numel() else None
        stream = bucket.streams.current()
        self._in_flight.append(_Launch(work, output, pending, flat, stream, bucket.streams))


def _finished(launch: _Launch) -> list[Pending]:
    """Wait for a collective, on the current stream, and give each input its part of the result."""
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
    """The elements in one rank's row. The cap is for the rows of all ranks together."""
    if cap_mb == math.inf:
        return sys.maxsize
    return max(int(cap_mb * 2**20 // dtype.itemsize // world_size), 0)


def _checked(inputs: Sequence[Tensor] | Tensor, world_size: int, callback: Callback | None) -> _Input:
    """The inputs as one tensor for each rank. Raises InputMismatch with every problem."""
    where = "ReduceScatterBucketer.reduce_scatter"
    if isinstance(inputs, Tensor):
        if inputs.dim() == 0 or inputs.size(0) % world_size or inputs.layout is not torch.strided:
            raise InputMismatch(
                f"inputs must be strided, with a first dimension divisible by the group size {world_size}, got shape "
                f"{tuple(inputs.shape)}, {inputs.layout}",
                where=where,
            )
        flat = inputs.view(-1) if inputs.is_contiguous() else None
        rows = list(inputs.chunk(world_size)) if inputs.size(0) else [inputs] * world_size
        return _Input(rows, flat, Pending(rows[0].shape, callback))
    if len(inputs) != world_size:
        raise InputMismatch(f"inputs must be {world_size} tensors, one for each rank, got {len(inputs)}", where=where)
    first = inputs[0]
    expected = (first.shape, first.dtype, first.device, torch.strided)
    problems = [
        f"inputs[{index}]: expected {tuple(first.shape)} of {first.dtype} on {first.device}, torch.strided, got "
        f"{tuple(row.shape)} of {row.dtype} on {row.device}, {row.layout}"
        for index, row in enumerate(inputs)
        if (row.shape, row.dtype, row.device, row.layout) != expected
    ]
    if problems:
        raise InputMismatch(problems, where=where)
    return _Input(list(inputs), _joined(inputs), Pending(first.shape, callback))


def _joined(rows: Sequence[Tensor]) -> Tensor | None:
    """The rows as one 1D view, if they are adjacent in memory."""
    first, numel = rows[0], rows[0].numel()
    storage = first.untyped_storage().data_ptr()
    for rank, row in enumerate(rows):
        neighbour = row.storage_offset() == first.storage_offset() + rank * numel
        if not (neighbour and row.is_contiguous() and row.untyped_storage().data_ptr() == storage):
            return None
    return first.detach().as_strided((numel * len(rows),), (1,))


def _as_flat(item: _Input) -> Tensor:
    """The input as one contiguous 1D tensor, rank after rank: the caller's memory if possible."""
    if item.flat is not None:
        return item.flat.detach()
    return torch.cat([row.reshape(-1) for row in item.rows])
