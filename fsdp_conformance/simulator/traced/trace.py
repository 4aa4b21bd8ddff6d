"""
The events of torch's tracing hooks, as lanes, waits and accesses of the checker.

The hooks name streams, events and memory by number. `Trace` has a method for each hook of `torch.cuda._gpu_trace`, and
`operation` for the operators that a dispatch mode sees. Everything else is the checker's: its clocks, its findings.

An operation is submitted to its stream before it is called, so that a wait inside the call (`item()`, a copy that
blocks) is one for the operation itself. What it reads and writes is noted when it has returned its results.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from fsdp_conformance.simulator.checker import HOST, Mode, Wait
from fsdp_conformance.simulator.checker.hazard import hazard_from_json
from fsdp_conformance.simulator.device import build

__all__ = ["Operation", "Trace", "TracedDevice"]

#: How many of the lines that have made a stream are kept: streams come from a pool.
_KEPT_LINES = 2


class TracedDevice(Protocol):
    """Where this thread of the program is."""

    type: str
    """"cuda"."""

    def current(self) -> int:
        """The index of the current device."""

    def stream(self, index: int) -> int:
        """The number of a device's current stream; 0 for the default stream."""


@dataclass(slots=True)
class Operation:
    """A call of an operator that runs in this thread."""

    site: Any
    lane: int | None
    """None for a collective whose stream is not known yet."""
    host_waited: bool = False


class Trace:
    """Passes the events of the hooks on to a checker."""

    def __init__(self, checker: Any, device: TracedDevice) -> None:
        self.checker = checker
        self.device = device
        self.waits: Counter[str] = Counter()
        """The number of waits by kind."""
        self._extension = build.active()
        self._lanes: dict[tuple[int, int], int] = {}
        self._made: defaultdict[tuple[int, int], list[Any]] = defaultdict(list)
        self._events: dict[int, tuple[list[int], Any]] = {}
        self._blocks: dict[int, int] = {}
        """By address. A block stays when its memory is freed: a later tenant at this address must wait for it."""
        self._without_size: set[int] = set()
        """Blocks that have a new tenant: hooks do not say how large it is."""
        self._running = threading.local()

    # Streams and events.

    def stream_made(self, stream: int) -> None:
        """The program has asked for a stream."""
        key = (self.device.current(), stream)
        self._made[key] = [*self._made[key], self._extension.here("stream")][-_KEPT_LINES:]
        if key in self._lanes:
            self.checker.set_lane_made(self._lanes[key], self._made[key])

    def event_deleted(self, event: int) -> None:
        """Its number may be given to another event."""
        self._events.pop(event, None)

    def event_recorded(self, event: int, stream: int) -> None:
        """An event holds what its stream was given so far."""
        lane = self._lane(stream)
        operation = self._operation
        is_end = operation is not None and operation.lane == lane
        site = operation.site if operation is not None and is_end else self._extension.here("event")
        self._events[event] = (self.checker.record(lane), self.checker.mark(lane, site))
        self.waits[Wait.EVENT_RECORD] += 1

    def event_waited(self, event: int, stream: int) -> None:
        """A stream waits for an event. As on CUDA, one that was never recorded orders nothing."""
        lane = self._lane(stream)
        if event in self._events:
            clock, mark = self._events[event]
            self.checker.wait(lane, clock)
            self.checker.note_wait(lane, clock, mark, self._extension.here("wait"))
            self.waits[Wait.STREAM_WAITS_EVENT] += 1
        operation = self._operation
        if operation is not None and operation.lane is None:
            # A process group lets its own stream wait for the current one, and runs the collective there.
            self.checker.rename_lane(lane, "NCCL")
            self._submit(operation, lane)

    def event_synchronized(self, event: int) -> None:
        """The host waits for an event, or learns that it has happened."""
        if event in self._events:
            clock, mark = self._events[event]
            self.checker.host_wait(clock)
            self.checker.note_wait(HOST, clock, mark, self._extension.here("wait"))
            self.waits[Wait.HOST_WAITS_EVENT] += 1

    def stream_synchronized(self, stream: int) -> None:
        """The host waits for a stream: because the program asks for it, or because an operator needs it."""
        lane, operation = self._lane(stream), self._operation
        self.waits[Wait.HOST_WAITS_STREAM] += 1
        if operation is not None:
            operation.host_waited = True
            self.checker.host_wait_lane(lane, operation.site)
            return
        clock = self.checker.snapshot(lane)
        self.checker.host_wait_lane(lane)
        self.checker.note_wait(HOST, clock, self.checker.mark(lane), self._extension.here("wait"))

    def device_synchronized(self) -> None:
        """The host waits for all streams of the current device."""
        index = self.device.current()
        self.checker.host_wait_device(index)
        self.checker.note_wait(HOST, [], self.checker.mark(HOST, None, index), self._extension.here("wait"))
        self.waits[Wait.HOST_WAITS_DEVICE] += 1

    # Memory.

    def allocated(self, address: int) -> None:
        """The caching allocator hands out memory on the current stream."""
        operation, index = self._operation, self.device.current()
        site = operation.site if operation is not None else self._extension.here("allocate")
        block = self._blocks.get(address)
        if block is None:
            block = self._blocks[address] = self.checker.add_block(0, index)
        self._without_size.add(block)
        self.checker.allocated(block, self._lane(self.device.stream(index)), site)

    def freed(self, address: int) -> None:
        """Memory goes back to the caching allocator."""
        if address in self._blocks:
            self.checker.freed(self._blocks[address], self._extension.here("free"))

    def record_stream(self, tensor: Tensor, stream: int) -> None:
        """`Tensor.record_stream`."""
        self.checker.record_stream(self._block(tensor), self._lane(stream, tensor.device.index))
        self.waits[Wait.RECORD_STREAM] += 1

    # Operators.

    @contextmanager
    def operation(self, op: str, index: int | None, *, is_collective: bool = False) -> Iterator[Operation]:
        """
        The call of an operator, to be followed by its `accesses`.

        `index` is the device on which it runs; None if it runs on none, as far as is known before the call.
        """
        operation = Operation(self._extension.here(op), None)
        outer, self._running.operation = self._operation, operation
        if index is not None and not is_collective:
            self._submit(operation, self._lane(self.device.stream(index), index))
        elif index is None:
            operation.lane = HOST
        try:
            yield operation
        finally:
            self._running.operation = outer

    def accesses(self, operation: Operation, used: Iterable[tuple[Tensor, bool, bool]]) -> None:
        """Note what an operation has read and written: tensors with memory on the device."""
        for tensor, reads, writes in used:
            index = tensor.device.index
            if operation.lane in (None, HOST):
                self._submit(operation, self._lane(self.device.stream(index), index))
            for kind, happens in (("read", reads), ("write", writes)):
                if happens:
                    self._access(operation, tensor, kind)

    def _access(self, operation: Operation, tensor: Tensor, kind: str) -> None:
        offset, run, repeats = self._extension.extent_of(tensor)
        block = self._block(tensor)
        hazard = self.checker.access(
            block, kind, operation.lane, offset, run, repeats, operation.site, operation.host_waited
        )
        if hazard is not None and self.checker.mode == Mode.RAISE:
            raise RuntimeError(hazard_from_json({**hazard, "device_type": self.device.type}).sentence())

    def _submit(self, operation: Operation, lane: int) -> None:
        operation.lane = lane
        self.checker.submit(lane)

    @property
    def _operation(self) -> Operation | None:
        operation: Operation | None = getattr(self._running, "operation", None)
        return operation

    def _lane(self, stream: int, index: int | None = None) -> int:
        """The lane of a stream of a device, by default the current one: the default streams of all have one number."""
        key = (self.device.current() if index is None else index, stream)
        if key not in self._lanes:
            if stream:
                self._lane(0, key[0])  # lanes are numbered in this order, and the default stream has number 0
            lane = self.checker.add_lane("stream" if stream else "default stream", key[0])
            self.checker.set_lane_made(lane, self._made[key])
            self._lanes[key] = lane
        return self._lanes[key]

    def _block(self, tensor: Tensor) -> int:
        """The block of a tensor's memory. Memory that the hooks never reported gets a new block."""
        storage = tensor.untyped_storage()
        address, index = storage.data_ptr(), tensor.device.index
        if address not in self._blocks:
            block = self._blocks[address] = self.checker.add_block(storage.nbytes(), index)
            self.checker.allocated(block, self._lane(self.device.stream(index), index))
        block = self._blocks[address]
        if block in self._without_size:
            self._without_size.remove(block)
            self.checker.resize_block(block, storage.nbytes())
        return block
