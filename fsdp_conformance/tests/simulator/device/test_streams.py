"""Streams and events of the simulated accelerator, and what they order."""

from __future__ import annotations

import math
import threading

import pytest
import torch

from fsdp_conformance.simulator import checker
from fsdp_conformance.simulator.checker.hazard import HazardKind
from fsdp_conformance.simulator.device import build
from fsdp_conformance.simulator.device import torch_sim as sim
from fsdp_conformance.tests.simulator.simulator_process import DEADLINE_S, compiled, in_process_of_its_own

pytestmark = compiled


def kinds() -> list[HazardKind]:
    """The kinds of the hazards so far, which are then cleared."""
    hazard_kinds = [hazard.kind for hazard in checker.hazards()]
    checker.clear_hazards()
    return hazard_kinds


@in_process_of_its_own
def test_streams_are_current_per_device() -> None:
    """`stream` sets the stream of its device, and the device; leaving restores both."""
    side = sim.Stream(device="sim:2", priority=-1)
    assert (2, -1) == (side.device_index, side.priority)

    with sim.stream(side):
        assert side == sim.current_stream() == sim.current_stream("sim:2")
        assert 2 == sim.current_device()
        assert sim.default_stream(0) == sim.current_stream(0)

    assert sim.default_stream() == sim.current_stream()
    assert sim.default_stream(2) == sim.current_stream(2)
    assert 0 == sim.current_device()
    assert isinstance(sim.current_stream(), sim.Stream)
    with sim.stream(None):
        assert sim.default_stream() == sim.current_stream()


@in_process_of_its_own
def test_streams_come_from_a_pool_of_32() -> None:
    """As on CUDA: the 33rd is the first again; high priority has its own pool."""
    streams = [sim.Stream() for _ in range(33)]
    high = sim.Stream(priority=-1)

    assert 32 == len({stream.stream_id for stream in streams})
    assert streams[0] == streams[32]
    assert high not in streams


@pytest.mark.parametrize("wait", ["stream", "event", "event on the other stream", "host", "host, device", "nothing"])
@in_process_of_its_own
def test_what_orders_two_streams(wait: str) -> None:
    """Every kind of wait orders a read after a write on another stream; without one it is a hazard."""
    side = sim.Stream()
    tensor = torch.zeros(3, device="sim")
    side.wait_stream(sim.current_stream())
    event = sim.Event()
    with sim.stream(side):
        tensor.add_(1)
        event.record()

    match wait:
        case "stream":
            sim.current_stream().wait_stream(side)
        case "event":
            sim.current_stream().wait_event(event)
        case "event on the other stream":
            event.wait(sim.current_stream())
        case "host":
            side.synchronize()
        case "host, device":
            sim.synchronize()
    tensor.mul(2)

    assert ([HazardKind.READ_AFTER_WRITE] if wait == "nothing" else []) == kinds()


@in_process_of_its_own
def test_a_hazard_is_raised_where_it_happens() -> None:
    """In the mode "raise": by the operation that does not wait, with both operations; it is not carried out."""
    tensor = torch.zeros(3, device="sim")
    with checker.mode("raise"), sim.stream(sim.Stream()):
        with pytest.raises(RuntimeError, match=r"aten::add_.Tensor on stream 1 does not wait for aten::zero_ on def"):
            tensor.add_(1)
        with checker.suspended():
            assert [0.0, 0.0, 0.0] == tensor.tolist()

    assert [HazardKind.READ_AFTER_WRITE] == kinds()


@in_process_of_its_own
def test_a_hazard_poisons_what_depends_on_it() -> None:
    """In the mode "poison": results and targets become NaN, also when the host asks for them; nothing else does."""
    tensor, other = torch.zeros(3, device="sim"), torch.ones(3, device="sim")
    event = sim.current_stream().record_event()
    with checker.mode("poison"), sim.stream(sim.Stream()):
        result = tensor + 1
        event.wait()
        assert [2.0, 2.0, 2.0] == (other + 1).tolist()
    side = sim.Stream()
    with checker.mode("poison"), sim.stream(side):
        side.wait_event(event)
        written = torch.zeros(2, device="sim")
    with checker.mode("poison"):
        number = written.sum().item()

    with checker.suspended():
        assert result.isnan().all()
        assert [0.0, 0.0, 0.0] == tensor.tolist()
    assert math.isnan(number)
    assert [HazardKind.READ_AFTER_WRITE] * 2 == kinds()


@in_process_of_its_own
def test_an_event_holds_what_it_has_recorded() -> None:
    """Not later work on its stream; recorded again, it covers more."""
    side = sim.Stream()
    tensor = torch.zeros(3, device="sim")
    side.wait_stream(sim.current_stream())
    event = side.record_event()
    with sim.stream(side):
        tensor.add_(1)
    event.wait()
    tensor.mul(2)
    assert [HazardKind.READ_AFTER_WRITE] == kinds()

    with sim.stream(side):
        tensor2 = torch.zeros(3, device="sim")
    side.record_event(event)
    event.wait()
    tensor2.mul(2)
    assert [] == kinds()


@in_process_of_its_own
def test_an_event_that_was_never_recorded_waits_for_nothing() -> None:
    """As on CUDA, waiting for it has no effect, and it counts as complete."""
    event = sim.Event()

    event.wait()
    event.synchronize()

    assert event.query()


@in_process_of_its_own
def test_the_host_carries_what_it_knows() -> None:
    """After a query that is true, and after `item()`, what the host submits is ordered later, on any stream."""
    first, second = sim.Stream(), sim.Stream()
    for know in (lambda tensor: first.query(), lambda tensor: tensor.sum().item()):
        with sim.stream(first):
            tensor = torch.ones(3, device="sim")
            know(tensor)
        with sim.stream(second):
            tensor.add_(1)
        first.wait_stream(second)
        assert [] == kinds()


@in_process_of_its_own
def test_devices_are_ordered_by_copies_between_them() -> None:
    """A copy between devices waits on both current streams."""
    a = torch.ones(3, device="sim:0")
    b = a.to("sim:1")
    b.add_(1)
    a.add_(b.to("sim:0"))

    assert [3.0, 3.0, 3.0] == a.tolist()
    assert [] == kinds()


@in_process_of_its_own
def test_strided_accesses_are_exact() -> None:
    """Two streams that write the even and the odd columns do not meet; overlapping ones do."""
    side = sim.Stream()
    tensor = torch.zeros(4, 6, device="sim")
    side.wait_stream(sim.current_stream())
    with sim.stream(side):
        tensor[:, ::2] += 1

    tensor[:, 1::2] += 1
    assert [] == kinds()
    tensor[2, 4] = 5
    assert [HazardKind.WRITE_AFTER_WRITE] == kinds()


@in_process_of_its_own
def test_elapsed_time_asks_for_timing() -> None:
    """Milliseconds between two events that were created for timing; an error for others."""
    begin, end = sim.Event(enable_timing=True), sim.Event(enable_timing=True)
    begin.record()
    end.record()

    assert begin.elapsed_time(end) >= 0
    untimed = sim.Event()
    untimed.record()
    with pytest.raises(RuntimeError, match="enable_timing"):
        untimed.elapsed_time(end)


@in_process_of_its_own
def test_backward_runs_on_the_streams_of_forward() -> None:
    """Autograd orders them itself, and the hazards that it does not forbid are found."""
    side = sim.Stream()
    weight = torch.ones(3, 3, device="sim", requires_grad=True)
    side.wait_stream(sim.current_stream())
    with sim.stream(side):
        y = (weight @ weight).relu()
    sim.current_stream().wait_stream(side)
    (y * 2).sum().backward()
    assert [] == kinds()

    assert weight.grad is not None
    with sim.stream(sim.Stream()):
        weight.grad.mul(2)
    (hazard,) = checker.hazards()
    assert HazardKind.READ_AFTER_WRITE == hazard.kind
    assert "AccumulateGrad" in hazard.then.site.label or "Mm" in hazard.then.site.label
    checker.clear_hazards()


@in_process_of_its_own
def test_labels_and_names_are_in_sites() -> None:
    """The label of a thread reaches autograd's; the name of a tensor is that of its memory, until it is freed."""
    extension = build.load()
    weight = torch.ones(3, 3, device="sim", requires_grad=True)
    extension.name_tensor(weight, "layers.0.weight")
    with checker.label("training"):
        weight.square().sum().backward()
    with sim.stream(sim.Stream()):
        weight.detach()[1:].add_(1)
        assert weight.grad is not None
        weight.grad.add_(1)

    of_weight = [hazard for hazard in checker.hazards() if hazard.now.site.tensor == "layers.0.weight"]
    of_grad = [hazard for hazard in checker.hazards() if not hazard.now.site.tensor]
    assert of_weight
    assert any(frame.function == "test_labels_and_names_are_in_sites" for frame in of_weight[0].now.site.stack)
    assert of_grad[0].then.site.label.startswith("training, ")
    checker.clear_hazards()


@in_process_of_its_own
def test_tracing_can_be_switched_off() -> None:
    """Without tracing, sites have no stacks."""
    build.load().set_tracing(False)
    tensor = torch.ones(3, device="sim")
    with sim.stream(sim.Stream()):
        tensor.add_(1)

    (hazard,) = checker.hazards()
    assert () == hazard.now.site.stack
    checker.clear_hazards()


@in_process_of_its_own
def test_waits_can_be_dropped() -> None:
    """The filter is told the kind of each wait, the stream and the device, outside of every lock."""
    seen: list[tuple[str, int, int]] = []

    def drop(kind: str, stream: int, device: int) -> bool:
        seen.append((kind, stream, device))
        sim.current_stream()  # takes the locks that a wait takes
        return False

    side = sim.Stream(device="sim:1")
    with sim.stream(side):
        tensor = torch.ones(3, device="sim:1")
    build.load().set_wait_filter(drop)
    sim.current_stream(1).wait_stream(side)
    tensor.record_stream(side)
    sim.synchronize(1)
    build.load().set_wait_filter(None)
    tensor.add_(1)

    waits = [entry for entry in seen if entry[0] != "event_record"]
    assert [("stream_waits_event", 0, 1), ("record_stream", side.stream_id, 1), ("host_waits_device", 0, 1)] == waits
    assert [HazardKind.READ_AFTER_WRITE] == [hazard.kind for hazard in checker.hazards()][:1]
    checker.clear_hazards()


@in_process_of_its_own
def test_threads_have_streams_and_devices_of_their_own() -> None:
    """A thread begins on device 0 and its default stream; 16 of them compute at the same time."""
    sim.set_device(1)
    sim.set_stream(sim.Stream())
    results: list[tuple[int, int, float]] = []

    def compute(index: int) -> None:
        before = (sim.current_device(), sim.current_stream().stream_id)
        sim.set_device(index % 8)
        x = torch.ones(16, 16, device="sim", requires_grad=True)
        for _ in range(20):
            y = (x @ x).relu().sum()
            (grad,) = torch.autograd.grad(y, x)
        results.append((*before, grad.sum().item()))

    threads = [threading.Thread(target=compute, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)

    assert [(0, 0, 2 * 16.0**3)] * 16 == results
