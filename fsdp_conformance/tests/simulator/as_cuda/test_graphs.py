"""CUDA graphs: what a replay computes, that a capture computes nothing, what is refused, and races with replays."""

from __future__ import annotations

import threading
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

from fsdp_conformance.simulated_cuda import simulated_cuda
from fsdp_conformance.simulator import checker
from fsdp_conformance.simulator.as_cuda.names import NotSimulated
from fsdp_conformance.simulator.checker.hazard import HazardKind
from fsdp_conformance.tests.simulator.simulator_process import compiled, in_process_of_its_own

pytestmark = [compiled, pytest.mark.slow]


def captured(body: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph, and what its body returned."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = body()
    return graph, result


@in_process_of_its_own
def test_a_training_step_is_replayed() -> None:
    """As in torch's documentation: forward, backward and optimizer in one graph equal the same steps without it."""
    with simulated_cuda(1):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)).cuda()
        other = deepcopy(model)
        x, target = torch.randn(5, 8).cuda(), torch.randn(5, 4).cuda()
        batches = [(torch.randn(5, 8).cuda(), torch.randn(5, 4).cuda()) for _ in range(3)]
        optimizer, plain = (torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, other))

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, target: Tensor) -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.mse_loss(model(x), target)
            loss.backward()
            optimizer.step()
            return loss.detach()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step(model, optimizer, x, target)
        torch.cuda.current_stream().wait_stream(side)
        step(other, plain, x, target)
        graph, loss = captured(lambda: step(model, optimizer, x, target))
        for batch in batches:
            x.copy_(batch[0])
            target.copy_(batch[1])
            graph.replay()
            assert torch.equal(loss, step(other, plain, *batch))
        assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))
        assert not checker.hazards()


@in_process_of_its_own
def test_a_capture_computes_nothing() -> None:
    """Memory from before it, and the state of random numbers, are as they were; its own memory holds no numbers."""
    with simulated_cuda(1):
        x, out = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
        state = torch.cuda.get_rng_state()
        graph, new = captured(lambda: torch.dropout(torch.add(x.mul_(3), 1, out=out), 0.5, train=True))
        assert (x.tolist(), out.tolist()) == ([1.0] * 4, [0.0] * 4)
        assert bool(new.isnan().all())
        assert torch.equal(state, torch.cuda.get_rng_state())
        graph.replay()
        graph.replay()
        assert (x.tolist(), out.tolist()) == ([9.0] * 4, [10.0] * 4)
        assert {*new.tolist()} <= {0.0, 20.0}


@in_process_of_its_own
def test_functions_are_graphed() -> None:
    """torch.cuda.make_graphed_callables makes two graphs of a module, and autograd runs them."""
    with simulated_cuda(1):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).cuda()
        other = deepcopy(model)
        graphed: Any = torch.cuda.make_graphed_callables(model, (torch.randn(5, 8).cuda(),))
        for _ in range(3):
            x = torch.randn(5, 8).cuda()
            outputs: list[Tensor] = [each(x) for each in (graphed, other)]
            for each, output in zip((model, other), outputs, strict=True):
                each.zero_grad()
                output.sum().backward()
            assert torch.equal(*outputs)
            grads = [[parameter.grad for parameter in each.parameters()] for each in (model, other)]
            assert all(torch.equal(one, two) for one, two in zip(*grads, strict=True) if one is not None)
        assert not checker.hazards()


@in_process_of_its_own
def test_streams_fork_and_join() -> None:
    """Waits between streams are replayed, and another graph may be captured on the same streams."""
    with simulated_cuda(1):
        x, side = torch.ones(4, device="cuda"), torch.cuda.Stream()

        def body() -> Tensor:
            twice = x * 2
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                more = twice + 1
                done = side.record_event()
            thrice = twice * 3
            torch.cuda.current_stream().wait_event(done)
            return more + thrice

        for _ in range(2):
            graph, result = captured(body)
            x.fill_(2)
            graph.replay()
            assert result.tolist() == [17.0] * 4
        assert not checker.hazards()


@in_process_of_its_own
def test_a_missing_wait_in_a_graph_is_a_race() -> None:
    """Each replay has it: the side stream is joined, but reads before what it needs is written."""
    with simulated_cuda(1):
        x, side = torch.ones(4, device="cuda"), torch.cuda.Stream()

        def body() -> None:
            side.wait_stream(torch.cuda.current_stream())
            twice = x * 2
            with torch.cuda.stream(side):
                twice + 1
            torch.cuda.current_stream().wait_stream(side)

        graph, _ = captured(body)
        assert not checker.hazards()
        graph.replay()
        (hazard,) = checker.hazards()
        assert hazard.kind is HazardKind.READ_AFTER_WRITE
        checker.clear()
        assert hazard.now.site.label.startswith("aten::add of the graph captured at ")


@in_process_of_its_own
def test_a_static_input_is_overwritten_while_a_replay_runs() -> None:
    """The common mistake: the next batch is copied on a stream that does not wait for the replay."""
    for waits in (True, False):
        with simulated_cuda(1):
            x, batch = torch.zeros(64, device="cuda"), torch.ones(64).pin_memory()
            graph, _ = captured(lambda x=x: (x * 2).sum())  # type: ignore[misc]
            copies = torch.cuda.Stream()
            torch.cuda.synchronize()
            graph.replay()
            if waits:
                copies.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(copies):
                x.copy_(batch, non_blocking=True)
            torch.cuda.synchronize()
            kinds = [hazard.kind for hazard in checker.hazards()]
            checker.clear()
            assert kinds == ([] if waits else [HazardKind.WRITE_AFTER_READ])


@pytest.mark.daily(3)
@in_process_of_its_own
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (lambda x: x.sum().item(), "the host waits for the device in aten::_local_scalar_dense"),
        (lambda x: x.cpu(), "the host waits for the device in aten::_to_copy"),
        (lambda x: x.nonzero(), "the host waits for the device in aten::nonzero"),
        (lambda x: x.copy_(torch.zeros(4)), "the host waits for the device in aten::copy_"),
        (lambda x: torch.cuda.synchronize(), "the host waits for the device"),
        (lambda x: torch.cuda.current_stream().synchronize(), "the host waits for the device"),
        (
            lambda x: torch.cuda.current_stream().wait_stream(torch.cuda.default_stream()),
            "waits for a stream that is not captured",
        ),
    ],
    ids=["item", "cpu", "nonzero", "pageable", "synchronize", "stream", "outside"],
)
def test_what_cannot_be_captured_raises(body: Callable[[Tensor], Any], reason: str) -> None:
    """As on CUDA, and with the reason. The next capture works."""
    with simulated_cuda(1):
        x = torch.ones(4, device="cuda")
        stream = torch.cuda.current_stream()
        with pytest.raises(RuntimeError, match="operation failed due to a previous error during capture") as caught:
            captured(lambda: body(x.add_(1)))
        assert reason in str(caught.value)
        torch.cuda.set_stream(stream)
        assert x.tolist() == [1.0] * 4
        graph, _ = captured(lambda: x.add_(1))
        graph.replay()
        assert x.tolist() == [2.0] * 4


@in_process_of_its_own
@pytest.mark.parametrize(
    ("mode", "own", "others"), [("global", False, False), ("thread_local", False, True), ("relaxed", True, True)]
)
def test_the_error_mode_says_whose_waits_are_errors(mode: str, own: bool, others: bool) -> None:
    """Waits for work that is not captured. A wait for a captured event is an error in any mode."""

    def may(wait: Callable[[], object], *, thread: bool) -> bool:
        graph, errors = torch.cuda.CUDAGraph(), []

        def attempt() -> None:
            try:
                wait()
            except RuntimeError as error:
                errors.append(str(error))

        with torch.cuda.stream(torch.cuda.Stream()):
            graph.capture_begin(capture_error_mode=mode)
            inside.record()
            if thread:
                waiter = threading.Thread(target=attempt)
                waiter.start()
                waiter.join()
            else:
                attempt()
            if errors:
                with pytest.raises(RuntimeError, match="due to a previous error during capture"):
                    graph.capture_end()
            else:
                graph.capture_end()
        return not errors

    with simulated_cuda(1):
        before, inside, other = torch.cuda.Event(), torch.cuda.Event(), torch.cuda.Stream()
        before.record()
        for wait in (before.query, before.synchronize, other.query, other.synchronize):
            assert (may(wait, thread=False), may(wait, thread=True)) == (own, others), wait
        for wait in (inside.query, inside.synchronize, torch.cuda.synchronize):
            assert (may(wait, thread=False), may(wait, thread=True)) == (False, False), wait
        with torch.cuda.stream(other), pytest.raises(RuntimeError, match="Unknown capture error mode"):
            torch.cuda.CUDAGraph().capture_begin(capture_error_mode=mode.upper())


@in_process_of_its_own
def test_wrong_usage_raises() -> None:
    """A capture on the default stream, one in another, work that is not joined, a replay without a capture."""
    with simulated_cuda(1):
        graph, x, side = torch.cuda.CUDAGraph(), torch.ones(4, device="cuda"), torch.cuda.Stream()
        with pytest.raises(RuntimeError, match="without a preceding successful capture"):
            graph.replay()
        with pytest.raises(RuntimeError, match="must be captured on a non-default stream"):
            graph.capture_begin()
        with pytest.raises(NotSimulated, match="check_input_liveness"):
            graph.capture_begin(check_input_liveness=True)
        with torch.cuda.stream(torch.cuda.Stream()):
            assert not torch.cuda.is_current_stream_capturing()
            graph.capture_begin()
            assert torch.cuda.is_current_stream_capturing()
            with pytest.raises(RuntimeError, match=r"another capture, which began at .*test_graphs.py"):
                torch.cuda.CUDAGraph().capture_begin()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                x.add_(1)
            with pytest.raises(RuntimeError, match="capturing stream has unjoined work"):
                graph.capture_end()
        with pytest.raises(NotSimulated, match="debug_dump"):
            graph.debug_dump("graph.dot")


@in_process_of_its_own
def test_collectives_are_replayed() -> None:
    """A capture sends nothing; each replay does, also with a Work that the capture waited for."""
    with simulated_cuda(1):
        dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
        x = torch.ones(4, device="cuda")
        before = len(checker.hazards())

        def body() -> Tensor:
            total = x * 2
            dist.all_reduce(total)
            parts = torch.empty(4, device="cuda")
            work = dist.all_gather_into_tensor(parts, total, async_op=True)
            assert work is not None
            work.wait()
            return parts + 1

        graph, result = captured(body)
        for value in (3, 4):
            x.fill_(value)
            graph.replay()
            assert result.tolist() == [2.0 * value + 1] * 4
        assert len(checker.hazards()) == before
        dist.destroy_process_group()
