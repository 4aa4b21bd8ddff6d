"""Torch's tracing hooks lead to the findings of the simulated accelerator, where they see as much."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.cuda import _gpu_trace
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_conformance.simulator import checker
from fsdp_conformance.simulator.as_cuda.stream_handles import handle_of
from fsdp_conformance.simulator.checker.hazard import hazard_from_json
from fsdp_conformance.simulator.device import build, torch_sim
from fsdp_conformance.simulator.traced.hooks import tracing
from fsdp_conformance.simulator.traced.trace import Trace
from fsdp_conformance.tests.simulator.simulator_process import compiled, in_process_of_its_own
from fsdp_conformance.tests.simulator.traced.traced_programs import SimulatedGpu, answers, traced

pytestmark = compiled

sim = "sim"


def _ones(count: int = 4) -> torch.Tensor:
    return torch.ones(count, device=sim)


def _group() -> None:
    """A process group with one rank, whose collectives still run on their own stream."""
    dist.init_process_group("cpu:gloo,sim:simccl", store=HashStore(), rank=0, world_size=1)


# Programs without a wait that they need.


def unwaited() -> None:
    data, side = _ones(), torch_sim.Stream()
    with torch_sim.stream(side):
        data.mul_(2)


def unwaited_view() -> None:
    data, side = torch.zeros(4, 4, device=sim), torch_sim.Stream()
    with torch_sim.stream(side):
        data[:, 2].mul_(2)


def overwritten_while_read() -> None:
    data, side = _ones(), torch_sim.Stream()
    side.wait_stream(torch_sim.current_stream())
    with torch_sim.stream(side):
        data.sum()
    data.fill_(3)


def recorded_too_early() -> None:
    data, side = _ones(), torch_sim.Stream()
    event = torch_sim.current_stream().record_event()
    data.add_(1)
    side.wait_event(event)
    with torch_sim.stream(side):
        data.mul_(2)


def prefetched() -> None:
    side = torch_sim.Stream()
    with torch_sim.stream(side):
        batch = torch.ones(4).pin_memory().to(sim, non_blocking=True)
    batch.add_(1)


def freed_too_early() -> None:
    data, side = _ones(), torch_sim.Stream()
    side.wait_stream(torch_sim.current_stream())
    with torch_sim.stream(side):
        data.mul_(2)
    del data
    _ones()


def unwaited_gradient() -> None:
    model, side = nn.Linear(8, 8, device=sim), torch_sim.Stream()
    model(torch.ones(4, 8, device=sim)).sum().backward()
    gradient = model.weight.grad
    assert gradient is not None
    with torch_sim.stream(side):
        gradient.mul_(2)


def waits_for_another_stream() -> None:
    data, side, other = _ones(), torch_sim.Stream(), torch_sim.Stream()
    side.wait_stream(other)
    with torch_sim.stream(side):
        data.mul_(2)


def unwaited_list() -> None:
    data, side = [_ones(), _ones(8)], torch_sim.Stream()
    with torch_sim.stream(side):
        torch._foreach_mul_(data, 2.0)


def copied_to_the_host() -> None:
    data, side = _ones(), torch_sim.Stream()
    with torch_sim.stream(side):
        data.cpu()


def unwaited_collective() -> None:
    data = _ones()
    dist.all_reduce(data, async_op=True)
    data.add_(1)


def unwaited_gather() -> None:
    data, parts = _ones(), _ones()
    dist.all_gather_into_tensor(parts, data, async_op=True)
    parts.sum()


def changed_while_reduced() -> None:
    data, result = _ones(), torch.empty(4, device=sim)
    dist.reduce_scatter_tensor(result, data, async_op=True)
    data.zero_()


# The same with it.


def waited() -> None:
    data, side = _ones(), torch_sim.Stream()
    side.wait_stream(torch_sim.current_stream())
    with torch_sim.stream(side):
        data.mul_(2)
    torch_sim.current_stream().wait_stream(side)
    data.add_(1)


def waited_by_event() -> None:
    data, side = _ones(), torch_sim.Stream()
    event = torch_sim.current_stream().record_event()
    side.wait_event(event)
    with torch_sim.stream(side):
        data.mul_(2)
        done = side.record_event()
    done.synchronize()
    data.add_(1)


def host_waits_for_the_device() -> None:
    data, side = _ones(), torch_sim.Stream()
    torch_sim.synchronize()
    with torch_sim.stream(side):
        data.mul_(2)
    side.synchronize()
    data.add_(1)


def host_asks_for_an_event() -> None:
    data, side = _ones(), torch_sim.Stream()
    assert torch_sim.current_stream().record_event().query()
    with torch_sim.stream(side):
        data.mul_(2)
    assert side.query()
    data.add_(1)


def host_reads_a_value() -> None:
    data, side = _ones(), torch_sim.Stream()
    data.sum().item()
    with torch_sim.stream(side):
        data.mul_(2)


def copy_that_blocks() -> None:
    data, side = torch.ones(4).to(sim), torch_sim.Stream()
    with torch_sim.stream(side):
        data.mul_(2)


def copy_to_the_host_that_blocks() -> None:
    data, side = _ones(), torch_sim.Stream()
    data.cpu()
    with torch_sim.stream(side):
        data.mul_(2)


def stream_recorded() -> None:
    data, side = _ones(), torch_sim.Stream()
    side.wait_stream(torch_sim.current_stream())
    with torch_sim.stream(side):
        data.mul_(2)
    data.record_stream(side)
    del data
    _ones()


def views_and_shapes() -> None:
    data, side = _ones(16), torch_sim.Stream()
    with torch_sim.stream(side):  # nothing here touches the memory of data
        view = data.view(4, 4).t()[1:].detach()
        assert torch.empty_like(view).shape == torch.zeros_like(view).shape == view.shape


def halves() -> None:
    data, side = torch.empty(8, device=sim), torch_sim.Stream()
    data[:4].fill_(1)
    with torch_sim.stream(side):
        data[4:].fill_(2)


def trained() -> None:
    model, side = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)).to(sim), torch_sim.Stream()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        side.wait_stream(torch_sim.current_stream())
        with torch_sim.stream(side):  # backward runs here, too
            loss = model(torch.ones(4, 8, device=sim)).square().mean()
        torch_sim.current_stream().wait_stream(side)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def waited_collectives() -> None:
    data, parts = _ones(), _ones()
    dist.all_gather_into_tensor(parts, data, async_op=True).wait()
    dist.all_reduce(parts)
    parts.add_(1)
    dist.barrier()


def fully_sharded() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)).to(sim)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=init_device_mesh(sim, (1,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(4, 8, device=sim)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


RACY = [
    unwaited, unwaited_view, overwritten_while_read, recorded_too_early, prefetched, freed_too_early,
    unwaited_gradient, waits_for_another_stream, unwaited_list, copied_to_the_host, unwaited_collective,
    unwaited_gather, changed_while_reduced,
]  # fmt: skip
RIGHT = [
    waited, waited_by_event, host_waits_for_the_device, host_asks_for_an_event, host_reads_a_value, copy_that_blocks,
    copy_to_the_host_that_blocks,
    stream_recorded, views_and_shapes, halves, trained, waited_collectives, fully_sharded,
]  # fmt: skip


@pytest.mark.daily(5)
@pytest.mark.parametrize("program", RACY, ids=lambda program: program.__name__)
@in_process_of_its_own
def test_a_missing_wait_is_the_same_finding(program: Callable[[], None]) -> None:
    """Kind, lines, streams, bytes, the missing wait, and the waits that do not help."""
    _group()
    simulated, of_hooks = answers(program)

    assert simulated
    assert of_hooks == simulated


@pytest.mark.daily(5)
@pytest.mark.parametrize("program", RIGHT, ids=lambda program: program.__name__)
@in_process_of_its_own
def test_a_right_program_is_clean(program: Callable[[], None]) -> None:
    """Accesses are checked, and nothing is found by either."""
    _group()
    trace = traced(program)

    assert trace.checker.accesses() > 0
    assert trace.checker.hazards() == []
    assert checker.hazards() == ()


@pytest.mark.parametrize(("program", "count"), [(host_reads_a_value, 2), (copy_that_blocks, 0)], ids=["value", "copy"])
@in_process_of_its_own
def test_implicit_waits_can_be_ignored(program: Callable[[], None], count: int) -> None:
    """Then they order nothing but what they are there for."""
    simulated, of_hooks = answers(program, waits="explicit")

    assert len(simulated) == count
    assert of_hooks == simulated


@in_process_of_its_own
def test_a_hazard_can_be_raised() -> None:
    """At the operator that does not wait, in the words of the finding."""
    with pytest.raises(RuntimeError, match=r"aten::mul_.Tensor on stream 1 .* reads what aten::ones .* writes"):
        traced(unwaited, mode="raise")
    checker.clear()


@in_process_of_its_own
def test_default_streams_of_two_devices_are_two_streams() -> None:
    """The hooks call both 0."""

    def program() -> None:
        data = torch.ones(4, device="sim:1")
        with torch_sim.device(0):
            torch_sim.synchronize()  # of the wrong device
        with torch_sim.device(1), torch_sim.stream(torch_sim.Stream(device="sim:1")):
            data.mul_(2)

    simulated, of_hooks = answers(program)

    assert len(simulated) == 1
    assert of_hooks == simulated


@in_process_of_its_own
def test_a_mistake_of_this_program_is_not_swallowed() -> None:
    """torch only logs what a callback raises."""

    class Mistaken(Trace):
        def stream_synchronized(self, stream: int) -> None:
            raise LookupError(stream)

    trace = Mistaken(build.active().Checker(), SimulatedGpu())

    with tracing(trace, handle_of):
        torch_sim.current_stream().synchronize()
        with pytest.raises(LookupError):
            _ones()


@in_process_of_its_own
def test_hooks_fired_by_hand() -> None:
    """As torch's own tests of its sanitizer do: an event orders a stream that waits for it, and nothing else."""
    trace = Trace(build.active().Checker(), SimulatedGpu())
    trace.checker.mode = "record"
    side, other = torch_sim.Stream(), torch_sim.Stream()
    with tracing(trace, handle_of):
        data = _ones()
        _gpu_trace.EventRecordCallbacks.fire_callbacks(7, 0)
        _gpu_trace.EventWaitCallbacks.fire_callbacks(7, handle_of(side))
        with torch_sim.stream(side):
            data.mul_(2)
        assert trace.checker.hazards() == []
        _gpu_trace.EventDeletionCallbacks.fire_callbacks(7)
        _gpu_trace.EventWaitCallbacks.fire_callbacks(7, handle_of(other))
        with torch_sim.stream(other):
            data.mul_(2)
    checker.clear()

    kinds = [hazard_from_json(one).kind.value for one in trace.checker.hazards()]
    assert kinds == ["read_after_write"]
    assert _gpu_trace.EventRecordCallbacks.callback_list == []
