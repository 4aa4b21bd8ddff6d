"""A finding names the wait that was meant to order the two accesses, and does not; other waits it does not name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch

from fsdp_conformance.simulator import checker
from fsdp_conformance.simulator.checker.hazard import Hazard, Useless
from fsdp_conformance.simulator.device import torch_sim as sim
from fsdp_conformance.tests.simulator.simulator_process import compiled, in_process_of_its_own

pytestmark = compiled


class Program:
    """Data that a side stream doubles, and that the default stream reads afterwards, with a wait that does not help."""

    def __init__(self) -> None:
        self.data = torch.ones(4, device="sim:0")
        self.side, self.other = sim.Stream(device="sim:0"), sim.Stream(device="sim:0")
        self.side.wait_stream(sim.current_stream())

    def write(self) -> None:
        with sim.stream(self.side):
            self.data.mul_(2)

    def read(self) -> None:
        self.data.add(1)

    def hazards(self) -> tuple[Hazard, ...]:
        """Those found so far, which are then cleared."""
        found = checker.hazards()
        checker.clear_hazards()
        return found


def event_recorded_too_early(program: Program) -> None:
    event = program.side.record_event()
    program.write()
    sim.current_stream().wait_event(event)
    program.read()


def event_of_another_stream(program: Program) -> None:
    program.write()
    event = program.other.record_event()
    event.synchronize()
    program.read()


def earlier_event_of_another_stream(program: Program) -> None:
    event = program.other.record_event()
    program.write()
    sim.current_stream().wait_event(event)
    program.read()


def another_stream(program: Program) -> None:
    program.write()
    sim.current_stream().wait_stream(program.other)
    program.read()


def synchronize_of_another_stream(program: Program) -> None:
    program.write()
    program.other.synchronize()
    program.read()


def synchronize_of_another_device(program: Program) -> None:
    program.write()
    sim.synchronize(1)
    program.read()


def wait_that_stands_too_early(program: Program) -> None:
    sim.current_stream().wait_stream(program.side)
    program.write()
    program.read()


def synchronize_that_stands_too_early(program: Program) -> None:
    program.side.synchronize()
    program.write()
    program.read()


def synchronize_of_the_device_that_stands_too_early(program: Program) -> None:
    sim.synchronize(0)
    program.write()
    program.read()


def wait_of_a_third_stream(program: Program) -> None:
    program.write()
    program.other.wait_stream(program.side)
    program.read()


def wait_of_a_stream_for_the_host(program: Program) -> None:
    pinned = torch.zeros(4, pin_memory=True)
    with sim.stream(program.side):
        pinned.copy_(program.data, non_blocking=True)
        event = program.side.record_event()
    event.wait()
    pinned.tolist()


_DEFAULT, _HOST = "the default stream", "the host"

#: By program: the reason, what it waits for, and what waits.
USELESS: Mapping[Callable[[Program], None], tuple[Useless, str, str]] = {
    event_recorded_too_early: (
        Useless.RECORDED_TOO_EARLY,
        "an event that was recorded on stream 1",
        "the default stream",
    ),
    event_of_another_stream: (Useless.OTHER_STREAM, "an event that was recorded on stream 2", _HOST),
    earlier_event_of_another_stream: (
        Useless.OTHER_EVENT,
        "an event that was recorded on stream 2",
        "the default stream",
    ),
    another_stream: (Useless.OTHER_STREAM, "stream 2", _DEFAULT),
    synchronize_of_another_stream: (Useless.OTHER_STREAM, "stream 2", _HOST),
    synchronize_of_another_device: (Useless.OTHER_DEVICE, "sim:1", _HOST),
    wait_that_stands_too_early: (Useless.WAITS_TOO_EARLY, "stream 1", _DEFAULT),
    synchronize_that_stands_too_early: (Useless.WAITS_TOO_EARLY, "stream 1", _HOST),
    synchronize_of_the_device_that_stands_too_early: (Useless.WAITS_TOO_EARLY, "sim:0", _HOST),
    wait_of_a_third_stream: (Useless.OTHER_WAITER, "stream 1", "stream 2"),
    wait_of_a_stream_for_the_host: (
        Useless.OTHER_WAITER,
        "an event that was recorded on stream 1",
        "the default stream",
    ),
}


@pytest.mark.daily(4)
@pytest.mark.parametrize("name", [program.__name__ for program in USELESS])
@in_process_of_its_own
def test_the_wait_is_named(name: str) -> None:
    """With its line, what it is for, and why that does not help."""
    run, (why, what, waiter) = next((run, expected) for run, expected in USELESS.items() if run.__name__ == name)
    program = Program()
    run(program)
    (hazard,) = program.hazards()
    wait = hazard.useless_wait
    assert wait is not None
    assert wait.waited is not None
    frame = wait.waited.innermost()
    assert frame is not None

    assert (wait.why, frame.function) == (why, name)
    lines = hazard.explain().splitlines()
    (line,) = (line for line in lines if f" waits for {what}" in line)
    assert line.startswith(f"  at {frame} {waiter} waits for {what}"), line
    assert "which does not order the two" in line


@in_process_of_its_own
def test_nothing_is_named_without_a_wait() -> None:
    """Neither what the host reads, nor a wait that was right for what came before."""
    program = Program()
    program.write()
    torch.ones(1, device="sim:0").item()
    program.read()
    (hazard,) = program.hazards()
    assert hazard.useless_waits == ()
    assert "does not order" not in hazard.explain()


@in_process_of_its_own
def test_a_wait_that_helps_is_none() -> None:
    """Right programs have no finding, whatever other waits they have."""
    program = Program()
    sim.synchronize(1)
    program.other.synchronize()
    program.write()
    sim.synchronize(1)
    sim.current_stream().wait_stream(program.side)
    program.read()
    assert program.hazards() == ()


@in_process_of_its_own
def test_suspended_waits_are_not_named() -> None:
    """An onlooker's waits are not the program's."""
    program = Program()
    program.write()
    with checker.suspended():
        program.other.synchronize()
        sim.synchronize(1)
    program.read()
    (hazard,) = program.hazards()
    assert hazard.useless_waits == ()
