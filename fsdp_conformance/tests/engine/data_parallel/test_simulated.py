"""
The reducer on the simulated accelerator: bitwise equal to the CPU, without a hazard and without an unneeded wait.

Forwards that spread over streams, and iterations on separate streams, put the gradients of one bucket on different
streams. The reference uses the default stream.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.distributed_c10d import _get_default_group

from fsdp_conformance.engine.data_parallel.data_parallel import DataParallel
from fsdp_conformance.plan import SIMULATED
from fsdp_conformance.simulator import checker
from fsdp_conformance.simulator.checker import Wait
from fsdp_conformance.simulator.device import build
from fsdp_conformance.tests.engine.engine_sites import noting_sites, site_in_program
from fsdp_conformance.tests.simulator.simulator_ranks import SimulatedRanks

pytestmark = [pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable())), pytest.mark.slow]

WIDTH = 4
ROWS = 8
LAYERS = 6
NUM_STEPS = 6


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The options of one training."""

    options: dict[str, Any] = field(default_factory=dict)
    """Of the wrapper."""
    divergent: bool = False
    """Rank and step decide whether a layer is used."""
    deferred: bool = False
    """A micro-batch under no_sync before each synchronised one."""
    in_place: bool = False
    """Gradients are zeroed, not dropped."""
    hook: bool = False
    spread: bool = False
    """Layers run on two streams in turn, and memory of these streams is used again between iterations."""
    parallel: bool = False
    """Layers are branches that do not depend on each other, rather than a chain."""
    moving: bool = False
    """Each iteration runs on another stream of the caller's."""
    joined: bool = False
    """Rank 0 has inputs for two steps only."""


FIND = {"find_unused_parameters": True}
VIEW = {"gradient_as_bucket_view": True}
SCHEDULES = {
    "plain": Schedule(),
    "views": Schedule(options=VIEW, deferred=True),
    "a bucket for each": Schedule(options={"bucket_cap_mb": 0}, in_place=True),
    "unused": Schedule(options=FIND, divergent=True),
    "unused, views": Schedule(options={**FIND, **VIEW}, divergent=True, deferred=True),
    "static": Schedule(options={"static_graph": True}),
    "hook": Schedule(hook=True, deferred=True),
    "spread over streams": Schedule(spread=True, moving=True),
    "spread over streams, views": Schedule(options=VIEW, spread=True, moving=True),
    "spread over streams, in place": Schedule(spread=True, moving=True, in_place=True),
    "spread over streams, unused": Schedule(options={**FIND, "bucket_cap_mb": 0}, spread=True, divergent=True),
    "branches on streams": Schedule(spread=True, parallel=True),
    "branches on streams, views": Schedule(options=VIEW, spread=True, parallel=True, moving=True),
    # Two layers per bucket, which fit blocks of the allocator.
    "branches in small buckets": Schedule(options={"bucket_cap_mb": 100 / 2**20}, spread=True, parallel=True),
    "joined": Schedule(joined=True),
}

#: Waits that torch asks for, by module, kind and function.
_TORCHS: set[tuple[str, ...]] = {
    # A collective records an event when it is issued.
    ("distributed_c10d.py", Wait.EVENT_RECORD),
    ("communication.py", Wait.EVENT_RECORD),
    # A hook's future records its tensors on the stream that waits, as the bucket does too.
    ("data_parallel/gradient_buckets.py", Wait.RECORD_STREAM, "_await"),
}


class Net(nn.Module):
    """Linear layers, in a chain or in parallel, which run on `streams` in turn if there are any."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.streams: Sequence[Any] = ()
        self.parallel = False

    def forward(self, x: Tensor, *, skipped: int | None = None) -> Tensor:
        """The last layer's output, or the sum of all."""
        layers = [(index, layer) for index, layer in enumerate(self.layers) if index != skipped]
        if self.parallel:
            return torch.stack([self._run(layer, x, index) for index, layer in layers]).sum(0)
        for index, layer in layers:
            x = self._run(layer, x, index)
        return x

    def _run(self, layer: nn.Module, x: Tensor, index: int) -> Tensor:
        if not self.streams:
            return torch.tanh(layer(x))
        here, there = _module().current_stream(), self.streams[index % 2]
        there.wait_stream(here)
        with _module().stream(there):
            y = torch.tanh(layer(x))
        here.wait_stream(there)
        x.record_stream(there)
        y.record_stream(here)
        return y


def _module() -> Any:
    return torch.get_device_module(SIMULATED)


class Simulated(SimulatedRanks):
    """Two ranks with a simulated device each."""

    def train(
        self, schedule: Schedule, device: torch.device, *, dropped: Collection[str] = ()
    ) -> tuple[list[Tensor], list[str], set[str]]:
        """The parameters at the end, the checker's findings, and the engine's waits that were executed."""
        on_device = device.type != "cpu"
        net = Net().to(device)
        net.parallel = schedule.parallel
        model = DataParallel(net, **schedule.options)
        if schedule.hook:
            model.register_comm_hook(_get_default_group(), default_hooks.fp16_compress_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
        draw = torch.Generator().manual_seed(self.rank)
        batches = [torch.randn(ROWS, WIDTH, generator=draw).to(device) for _ in range(2 * NUM_STEPS)]
        callers: list[Any] = []
        if on_device:
            net.streams = [_module().Stream(device) for _ in range(2)] if schedule.spread else ()
            callers = [_module().Stream(device) for _ in range(2)] if schedule.moving else []
            _module().synchronize()
            checker.clear()
        sites: set[str] = set()
        with noting_sites(sites, dropped, _site) if on_device else nullcontext(), _joined(model, schedule):
            for step in range(2 if schedule.joined and self.rank == 0 else NUM_STEPS):
                caller = callers[step % 2] if callers else None
                if caller is not None:
                    caller.wait_stream(callers[1 - step % 2])
                with _module().stream(caller) if caller is not None else nullcontext():
                    self._step(model, optimizer, schedule, batches[2 * step : 2 * step + 2], step)
                for stream in net.streams:
                    with _module().stream(stream):
                        _use_freed_memory(device)
        hazards = [hazard.explain() for hazard in checker.hazards()] if on_device else []
        with checker.suspended() if on_device else nullcontext():
            return [parameter.detach().to("cpu", copy=True) for parameter in net.parameters()], hazards, sites

    def _step(
        self,
        model: DataParallel,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        batches: list[Tensor],
        step: int,
    ) -> None:
        skipped = step % LAYERS if schedule.divergent and step % 2 == self.rank else None
        if schedule.deferred:
            with model.no_sync():
                model(batches[0], skipped=skipped).square().mean().backward()
        model(batches[1], skipped=skipped).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=not schedule.in_place)

    @pytest.mark.nightly
    def test_clean_and_equal_to_the_cpu(self) -> None:
        """Every schedule: parameters bitwise equal to the CPU, no hazard; without any waits there are hazards."""
        self.assert_clean_and_equal(checker.Reuse.WORST_CASE)

    @pytest.mark.nightly
    def test_clean_and_equal_to_the_cpu_with_exact_reuse(self) -> None:
        """Fewer accesses race."""
        self.assert_clean_and_equal(checker.Reuse.EXACT)

    def assert_clean_and_equal(self, reuse: checker.Reuse) -> None:
        checker.set_reuse(reuse)
        for name, schedule in SCHEDULES.items():
            expected, _, _ = self.train(schedule, torch.device("cpu"))
            got, hazards, sites = self.train(schedule, self.device)
            self.assertEqual("", "\n".join(hazards), name)
            self.assertTrue(sites, msg=name)
            for parameter, on_cpu in zip(got, expected, strict=True):
                self.assertTrue(torch.equal(on_cpu, parameter), msg=f"{name}: expected {on_cpu}, got {parameter}")
            if not schedule.joined:
                with checker.without_waits():
                    _, hazards, _ = self.train(schedule, self.device)
                self.assertNotEqual([], hazards, msg=name)

    def test_inputs_to_the_cpu(self) -> None:
        """Inputs from the device have arrived when a module on the CPU reads them."""
        model = DataParallel(nn.Linear(WIDTH, 2), device_id=torch.device("cpu"))
        inputs = torch.full((ROWS, WIDTH), 1.0 + self.rank)
        got, expected = model(inputs.to(self.device)), model(inputs)
        self.assertTrue(torch.equal(expected, got), msg=f"expected {expected}, got {got}")
        self.assertEqual([], checker.hazards())

    def test_after_an_exception(self) -> None:
        """Raised in autograd's thread, on both ranks: the next iteration equals that of the CPU."""
        results = []
        for device in (torch.device("cpu"), self.device):
            net = Net().to(device)
            model = DataParallel(net, bucket_cap_mb=0)
            x = torch.full((ROWS, WIDTH), 1.0 + self.rank, device=device)
            for _ in range(5):
                handle = net.layers[2].get_parameter("weight").register_hook(_raise)
                with self.assertRaisesRegex(RuntimeError, "on purpose"):
                    model(x).square().mean().backward()
                handle.remove()
                model.zero_grad()
            model(x).square().mean().backward()
            with checker.suspended():
                results.append([p.grad.cpu() for p in net.parameters() if p.grad is not None])

        self.assertEqual([2 * LAYERS] * 2, [len(grads) for grads in results])
        self.assertEqual("", "\n".join(hazard.explain() for hazard in checker.hazards()))
        for mine, on_cpu in zip(*results, strict=True):
            self.assertTrue(torch.equal(mine, on_cpu))

    @pytest.mark.nightly
    @pytest.mark.slow
    def test_each_wait_is_needed(self) -> None:
        """Every wait and every event of the engine, dropped alone, is a hazard in at least one schedule."""
        executed: set[str] = set()
        flagged: set[str] = set()
        checker.set_reuse(checker.Reuse.WORST_CASE)
        for schedule in SCHEDULES.values():
            _, _, sites = self.train(schedule, self.device)
            executed |= sites
            # The first rank decides which waits are tried, because all ranks must train equally often.
            candidates = [sorted(sites - flagged)]
            dist.broadcast_object_list(candidates, device=torch.device("cpu"))
            for site in candidates[0]:
                _, hazards, _ = self.train(schedule, self.device, dropped={site})
                is_found: list[Any] = [None, None]
                dist.all_gather_object(is_found, bool(hazards))
                flagged |= {site} if any(is_found) else set()

        self.assertGreater(len(executed), 4)
        self.assertEqual("", "\n".join(sorted(executed - flagged)))


def _raise(grad: Tensor) -> Tensor:
    raise RuntimeError("on purpose")


def _use_freed_memory(device: torch.device) -> None:
    """Write into memory of the sizes of one, some and all parameters that was freed on the current stream."""
    layer = WIDTH * (WIDTH + 1)
    tensors = [
        torch.zeros(numel, device=device) for numel in (WIDTH, WIDTH**2, layer, LAYERS * layer) for _ in range(3)
    ]
    for tensor in tensors:
        tensor.add_(1)


@contextmanager
def _joined(model: DataParallel, schedule: Schedule) -> Iterator[None]:
    """The wrapper's context for uneven inputs, if the schedule has them."""
    with model.join() if schedule.joined else nullcontext():
        yield


_site = partial(
    site_in_program,
    is_others=lambda name, kind, function: (
        bool({(name, kind), (name, kind, function)} & _TORCHS) or name == "data_parallel/communication_hook.py"
    ),
)
"""Also None for the waits of a hook."""
