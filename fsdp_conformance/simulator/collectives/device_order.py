"""
Finds ranks whose devices would wait for each other forever, although their hosts do not.

A kernel of a collective, or of a message, runs until its peers run theirs. It holds up what comes after it: the later
calls on its communicator, which NCCL runs in the order in which they are issued, and whatever runs on a stream that has
waited for it. So the devices of several ranks can be in a deadlock while every host has issued all of its calls. Here
the calls of all ranks are run in that way, without data; those that remain wait for each other.

The simulated accelerator does not stand still in such a program: its host waits for a result where the program touches
it, not where the next kernel begins (device/csrc/deliveries.h). Standard library only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from fsdp_conformance.simulator.collectives.calls import Call, Channel, IssuedCall, numbered


@dataclass(slots=True, eq=False)
class _Operation:
    """A collective or a message, as the ranks that have called it share it."""

    kernels: list[_Kernel] = field(default_factory=list)
    """One for each rank that has called it."""
    num_idle: int = 0
    """How many of them have not begun."""


@dataclass(slots=True, eq=False)
class _Kernel:
    """One rank's part in the operations that run together: those of a batch, or a single one."""

    rank: int
    number: int
    """In the order in which the rank has issued them."""
    waits_for: int
    """It begins when all kernels of its rank with smaller numbers have ended."""
    parts: list[tuple[Call, _Operation]] = field(default_factory=list)
    num_open: int = 0
    """How many of its operations have not ended."""
    has_begun: bool = False

    @property
    def has_ended(self) -> bool:
        return self.has_begun and self.num_open == 0


class _Device:
    """The kernels of one rank."""

    def __init__(self) -> None:
        self._kernels: list[_Kernel] = []
        self._num_ended = 0
        """How many of the first kernels have ended."""
        self._communicators: dict[Hashable, deque[_Kernel]] = {}
        """The kernels that have not ended, in order; at most the first one has begun."""

    def kernel_of(self, rank: int, issued: IssuedCall) -> _Kernel:
        """The kernel of the call that was issued last: a new one, or that of the batch that it belongs to."""
        if self._kernels and self._kernels[-1].number == issued.number:
            return self._kernels[-1]
        kernel = _Kernel(rank, issued.number, min(issued.waits_for, issued.number))
        self._kernels.append(kernel)
        self._communicators.setdefault(issued.call.communicator, deque()).append(kernel)
        return kernel

    def begin(self) -> Iterator[_Kernel]:
        """Begin the kernels that can begin."""
        for queue in self._communicators.values():
            while queue and queue[0].has_ended:
                queue.popleft()
            if queue and not queue[0].has_begun and self._before(queue[0]) is None:
                queue[0].has_begun = True
                yield queue[0]

    def first(self) -> _Kernel | None:
        """The first kernel that has not ended."""
        while self._num_ended < len(self._kernels) and self._kernels[self._num_ended].has_ended:
            self._num_ended += 1
        return self._kernels[self._num_ended] if self._num_ended < len(self._kernels) else None

    def running_before(self, kernel: _Kernel) -> _Kernel:
        """The kernel that runs, and must end before this one can begin."""
        while not kernel.has_begun:
            ahead = next(queue[0] for queue in self._communicators.values() if kernel in queue)
            before = ahead if ahead is not kernel else self._before(kernel)
            assert before is not None, "begin() has begun the others"
            kernel = before
        return kernel

    def _before(self, kernel: _Kernel) -> _Kernel | None:
        """A kernel that has not ended, and for which the stream of this one has waited."""
        first = self.first()
        return first if first is not None and first.number < kernel.waits_for else None


def device_deadlocks(logs: Sequence[Sequence[IssuedCall]]) -> Iterator[dict[int, Call]]:
    """
    The ranks that wait for each other on their devices, with the call of each that the others hold up.

    `logs` are the calls of each rank. A rank that has not made a call of its group holds up no other rank here: that is
    another finding. After each deadlock its calls count as finished.
    """
    devices = [_Device() for _ in logs]
    _add_kernels(devices, logs)
    ranks = deque(range(len(logs)))
    while True:
        while ranks:
            for kernel in devices[ranks.popleft()].begin():
                ranks.extend(_begin(kernel))
        circle = _circle(devices)
        if not circle:
            return
        yield {kernel.rank: call for kernel, call, _ in sorted(circle, key=lambda part: part[0].rank)}
        for _, _, operation in circle:
            ranks.extend(_end(operation))


def _add_kernels(devices: Sequence[_Device], logs: Sequence[Sequence[IssuedCall]]) -> None:
    operations: dict[tuple[Channel, int], _Operation] = {}
    for rank, log in enumerate(logs):
        for (key, call), issued in zip(numbered([one.call for one in log]), log, strict=True):
            if call.channel.device == "cpu":
                continue
            kernel = devices[rank].kernel_of(rank, issued)
            operation = operations.setdefault(key, _Operation())
            operation.kernels.append(kernel)
            operation.num_idle += 1
            kernel.parts.append((call, operation))
            kernel.num_open += 1


def _begin(kernel: _Kernel) -> Iterator[int]:
    """A kernel has begun. Yields the ranks of which a kernel has ended."""
    for _, operation in kernel.parts:
        if operation.num_idle > 0:
            operation.num_idle -= 1
            if operation.num_idle == 0:
                yield from _end(operation)
    if kernel.has_ended:  # its operations counted as finished before
        yield kernel.rank


def _end(operation: _Operation) -> Iterator[int]:
    """An operation has ended. Yields the ranks of which a kernel has ended."""
    operation.num_idle = 0
    for kernel in operation.kernels:
        kernel.num_open -= 1
        if kernel.has_ended:
            yield kernel.rank


def _circle(devices: Sequence[_Device]) -> list[tuple[_Kernel, Call, _Operation]]:
    """The calls that wait for each other when nothing can begin; empty if everything has ended."""
    kernel = next((first for device in devices if (first := device.first()) is not None), None)
    if kernel is None:
        return []
    path: list[tuple[_Kernel, Call, _Operation]] = []
    while not any(kernel is earlier for earlier, _, _ in path):
        kernel = devices[kernel.rank].running_before(kernel)
        call, operation = next(part for part in kernel.parts if part[1].num_idle)
        path.append((kernel, call, operation))
        kernel = next(peer for peer in operation.kernels if not peer.has_begun)
        kernel = devices[kernel.rank].running_before(kernel)
    start = next(index for index, (earlier, _, _) in enumerate(path) if earlier is kernel)
    return path[start:]
