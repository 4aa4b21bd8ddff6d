"""Pinned buffers that are used again and again: copies follow one another through the same memory of the host."""

from __future__ import annotations

import linecache
import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fsdp_conformance.simulator import checker
from fsdp_conformance.simulator.checker.hazard import HazardKind
from fsdp_conformance.simulator.device import torch_sim as sim
from fsdp_conformance.tests.simulator.simulator_process import compiled, in_process_of_its_own

pytestmark = compiled


def _pinned(*shape: int) -> torch.Tensor:
    return torch.ones(*shape).pin_memory()


def _round_trip() -> None:
    """To the device and back into the same memory, in one stream."""
    buffer = _pinned(4)
    on_device = buffer.to("sim", non_blocking=True)
    on_device += 1
    buffer.copy_(on_device, non_blocking=True)
    sim.synchronize()
    assert buffer.tolist() == [2.0] * 4


def _back_there_and_back() -> None:
    buffer = _pinned(4)
    first = torch.full((4,), 2.0, device="sim")
    buffer.copy_(first, non_blocking=True)
    second = buffer.to("sim", non_blocking=True) + 1
    buffer.copy_(second, non_blocking=True)
    sim.synchronize()
    assert buffer.tolist() == [3.0] * 4


def _part_of_a_source() -> None:
    """The device overwrites two of the elements that it has read."""
    buffer = _pinned(6)
    on_device = buffer.to("sim", non_blocking=True)
    buffer[2:4].copy_(on_device[2:4] * 5, non_blocking=True)
    sim.synchronize()
    assert buffer.tolist() == [1.0, 1.0, 5.0, 5.0, 1.0, 1.0]


def _columns() -> None:
    """Sources and targets with gaps between their elements."""
    buffer = _pinned(3, 4)
    on_device = buffer[:, 1:3].to("sim", non_blocking=True)
    buffer[:, 2:].copy_(on_device * 7, non_blocking=True)
    sim.synchronize()
    assert buffer.tolist() == [[1.0, 1.0, 7.0, 7.0]] * 3


def _two_streams() -> None:
    """An event orders the copies of two streams; the host waits for the second stream alone."""
    buffer, other = _pinned(4), sim.Stream()
    on_device = buffer.to("sim", non_blocking=True)
    copied = sim.Event()
    copied.record()
    with sim.stream(other):
        other.wait_event(copied)
        buffer.copy_(torch.full((4,), 3.0, device="sim"), non_blocking=True)
    other.synchronize()
    assert buffer.tolist() == [3.0] * 4
    assert on_device.tolist() == [1.0] * 4


def _several_readers() -> None:
    """Three copies out of the same memory are in flight when the device overwrites it, and then two more."""
    buffer = _pinned(4)
    copies = [buffer.to("sim", non_blocking=True) for _ in range(3)]
    buffer.copy_(copies[0] * 2, non_blocking=True)
    copies += [buffer.to("sim", non_blocking=True) for _ in range(2)]
    buffer.copy_(copies[-1] * 2, non_blocking=True)
    sim.synchronize()
    assert [copy[0].item() for copy in copies] == [1.0, 1.0, 1.0, 2.0, 2.0]
    assert buffer.tolist() == [4.0] * 4


def _offloaded_state() -> None:
    """The state of an optimizer lives in one pinned buffer, and visits the device in every step."""
    state = _pinned(2, 8)
    for _ in range(4):
        for row in state:
            on_device = row.to("sim", non_blocking=True)
            on_device.mul_(2)
            row.copy_(on_device, non_blocking=True)
    sim.synchronize()
    assert state.tolist() == [[16.0] * 8] * 2


def _staging_between_devices() -> None:
    """Two buffers in turn, from one device to another; the host never touches them."""
    source, streams = torch.ones(8, device="sim:0"), (sim.Stream("sim:0"), sim.Stream("sim:1"))
    streams[0].wait_stream(sim.current_stream("sim:0"))
    stages, received = [_pinned(8), _pinned(8)], []
    read: list[Any] = [None, None]
    for number in range(5):
        slot = number % 2
        with sim.stream(streams[0]):
            if read[slot] is not None:
                streams[0].wait_event(read[slot])
            stages[slot].copy_(source * number, non_blocking=True)
            written = sim.Event()
            written.record(streams[0])
        with sim.stream(streams[1]):
            streams[1].wait_event(written)
            received.append(stages[slot].to("sim:1", non_blocking=True))
            read[slot] = sim.Event()
            read[slot].record(streams[1])
    sim.synchronize("sim:0")
    sim.synchronize("sim:1")
    assert [tensor[0].item() for tensor in received] == [0.0, 1.0, 2.0, 3.0, 4.0]


def _numpy_after_the_event() -> None:
    buffer = _pinned(4)
    on_device = buffer.to("sim", non_blocking=True)
    copied = sim.Event()
    copied.record()
    copied.synchronize()
    buffer.numpy()[:] = 9
    sim.synchronize()
    assert on_device.tolist() == [1.0] * 4


def _shared_with_a_library() -> None:
    """A library has the memory through DLPack, and writes to it when the stream is done."""
    buffer = _pinned(4)
    library = np.from_dlpack(buffer)
    on_device = buffer.to("sim", non_blocking=True)
    buffer.copy_(on_device * 2, non_blocking=True)
    sim.current_stream().synchronize()
    np.asarray(torch.from_numpy(library.copy()))
    buffer.numpy()[1] = 5
    sim.synchronize()
    assert library.tolist() == [2.0, 5.0, 2.0, 2.0]


def _another_part_by_the_host() -> None:
    """The host fills the part that no copy in flight reads."""
    buffer = _pinned(8)
    on_device = buffer[:4].to("sim", non_blocking=True)
    buffer.numpy()[4:] = 3
    buffer[:4].copy_(on_device * 2, non_blocking=True)
    sim.synchronize()
    assert buffer.tolist() == [2.0] * 4 + [3.0] * 4


def _another_thread_after_a_wait() -> None:
    """A thread fills the buffer when the main thread has waited for the copy."""
    buffer, is_free = _pinned(4), queue.Queue[None]()

    def fill() -> None:
        is_free.get()
        buffer.numpy()[:] = 6

    thread = threading.Thread(target=fill)
    thread.start()
    on_device = buffer.to("sim", non_blocking=True)
    buffer.copy_(on_device + 1, non_blocking=True)
    sim.synchronize()
    is_free.put(None)
    thread.join()
    sim.synchronize()
    assert buffer.tolist() == [6.0] * 4


def _freed_and_allocated_again() -> None:
    """The next buffer may lie where one was that a copy still reads: torch's allocator sees to that."""
    first = _pinned(4)
    on_device = first.to("sim", non_blocking=True)
    del first
    second = _pinned(4)
    second.numpy()[:] = 8
    sim.synchronize()
    assert on_device.tolist() == [1.0] * 4


CORRECT = (
    _round_trip, _back_there_and_back, _part_of_a_source, _columns, _two_streams, _several_readers, _offloaded_state,
    _staging_between_devices, _numpy_after_the_event, _shared_with_a_library, _another_part_by_the_host,
    _another_thread_after_a_wait, _freed_and_allocated_again,
)  # fmt: skip


def _then_overwritten_by_the_device() -> None:
    """The host writes too early, and the device's own copy hides that."""
    buffer = _pinned(4)
    on_device = buffer.to("sim", non_blocking=True)
    buffer.numpy()[:] = 5
    buffer.copy_(on_device, non_blocking=True)
    sim.synchronize()


def _beside_what_the_device_overwrites() -> None:
    buffer = _pinned(4)
    on_device = buffer.to("sim", non_blocking=True)
    buffer[:2].copy_(on_device[:2] + 1, non_blocking=True)
    buffer.numpy()[3] = 5
    sim.synchronize()


def _before_another_reader() -> None:
    """The later copy reads what the host has written; the earlier one may, too."""
    buffer = _pinned(4)
    first = buffer.to("sim", non_blocking=True)
    buffer.numpy()[0] = 5
    buffer.to("sim", non_blocking=True)
    buffer.copy_(first, non_blocking=True)
    sim.synchronize()


WRONG = (_then_overwritten_by_the_device, _beside_what_the_device_overwrites, _before_another_reader)


@pytest.mark.parametrize("program", CORRECT, ids=lambda program: program.__name__[1:])
@in_process_of_its_own
def test_a_correct_program_is_clean(program: Callable[[], None]) -> None:
    program()

    assert not checker.hazards()


@in_process_of_its_own
def test_a_write_between_two_copies_is_noticed_at_the_second() -> None:
    """It may have happened anywhere in between, so no line is given for it, and the wait belongs before it."""
    staging, device = torch.zeros(8, pin_memory=True), torch.empty(8, device="sim")
    view = staging.numpy()
    for step in range(3):
        view[:] = step
        device.copy_(staging, non_blocking=True)
    sim.synchronize()
    (hazard,) = checker.hazards()
    checker.clear_hazards()

    frame = hazard.now.site.innermost()
    assert hazard.count == 2
    assert frame is not None
    assert hazard.sentence().endswith(f"without having waited for it, some time before {frame}")
    assert "device.copy_(" in linecache.getline(frame.file, frame.line)
    assert "# before the host writes: the first write after that" in hazard.missing()


@pytest.mark.parametrize("program", WRONG, ids=lambda program: program.__name__[1:])
@in_process_of_its_own
def test_a_write_of_the_host_that_comes_too_early_is_found(program: Callable[[], None]) -> None:
    program()
    hazards = checker.hazards()
    checker.clear_hazards()

    assert [HazardKind.HOST_WRITE_IN_FLIGHT] == [hazard.kind for hazard in hazards]
    # A later copy of the same memory notices it, or a wait.
    assert hazards[0].now.site.op.startswith("code outside torch (noticed at this ")
