"""The memory of the fully sharded module over many steps: live tensors on the CPU, the allocator on the device."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from fsdp_conformance.engine.fully_sharded.wrapper import FullyShardedDataParallel
from fsdp_conformance.engine.sharding_strategy import CPUOffload, MixedPrecision, ShardingStrategy
from fsdp_conformance.harness.recording import process_group
from fsdp_conformance.tests.engine.fully_sharded.sharded_ranks import (
    LEARNING_RATE,
    ShardedTestCase,
    batch,
    chain,
    sharded,
)
from fsdp_conformance.tests.engine.gloo_release import one_gloo_thread, wait_for_release
from fsdp_conformance.tests.simulator.simulator_ranks import OnSim, compiled

Count = TypeVar("Count")

#: Steps in which optimizers make their state, pools their blocks, and orders of units are learnt.
WARM_UP = 4

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "full, offloaded, low": {
        "cpu_offload": CPUOffload(offload_params=True),
        "forward_prefetch": True,
        "mixed_precision": MixedPrecision(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, full_precision_in_eval=True
        ),
    },
    "kept": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "replicated": {"sharding_strategy": ShardingStrategy.NO_SHARD},
}


def train(
    subject: FullyShardedDataParallel, inputs: list[Tensor], *, steps: int, count: Callable[[], Count]
) -> list[Count]:
    """
    The counts after the first two steps that follow the warm-up, and after the last two.

    A step has a deferred and a reduced micro-batch, and every other one is in eval mode.
    """
    optimizer = torch.optim.SGD(subject.parameters(), lr=LEARNING_RATE, momentum=0.5)
    counts = []
    for step in range(steps):
        subject.train(step % 2 == 0)
        with subject.no_sync():
            subject(inputs[0]).float().sum().backward()
        subject(inputs[1]).float().sum().backward()
        subject.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        process_group.log().clear()
        if step in (WARM_UP, WARM_UP + 1, steps - 2, steps - 1):
            counts.append(count())
    return counts


def live_bytes() -> int:
    """The bytes of all tensors that exist in this process. Collective; the group has one gloo thread."""
    wait_for_release()
    gc.collect()
    storages = [each.untyped_storage() for each in gc.get_objects() if isinstance(each, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class TestOnTheCPU(ShardedTestCase):
    """Tensors that are alive after a step."""

    def init_rank(self) -> None:
        with one_gloo_thread():
            super().init_rank()

    @pytest.mark.slow
    @pytest.mark.nightly
    def test_two_hundred_steps(self) -> None:
        """Exactly as many bytes are alive after the last steps as after the first ones."""
        for name, options in CONFIGURATIONS.items():
            subject = sharded(chain(1), **options)
            counts = train(subject, _inputs(self.rank, "cpu"), steps=200, count=live_bytes)
            self.assertEqual(counts[:2], counts[2:], msg=name)

    def test_a_leak_is_seen(self) -> None:
        """One small tensor that is kept in each step shows in both figures."""
        leaked = []

        def count() -> int:
            leaked.append(torch.zeros(3))
            return live_bytes()

        counts = train(sharded(chain(1)), _inputs(self.rank, "cpu"), steps=WARM_UP + 4, count=count)
        before, *_, after = counts
        self.assertEqual(after - before, 3 * 3 * 4)


@compiled
class TestOnTheDevice(OnSim):
    """The bytes that the allocator of the simulated device has given out."""

    case_timeout_s = 300.0

    @pytest.mark.slow
    def test_deferred_gradients(self) -> None:
        """A second deferred micro-batch adds to the gradients in place: besides them there are two gathered units."""
        device = torch.device(self.device)
        memory: Any = torch.get_device_module("sim")
        layers, width = 4, 64
        model = nn.Sequential(*(nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))) for _ in range(3)))
        subject = FullyShardedDataParallel(model, auto_wrap_policy=choose_sequential, device_id=device)
        unit = 4 * layers * width * (width + 1)
        inputs = torch.ones(1, width, device=device)
        with subject.no_sync():
            subject(inputs).sum().backward()
            gc.collect()
            before = memory.memory_allocated(device)
            memory.reset_peak_memory_stats(device)
            subject(inputs).sum().backward()
        self.assertLess(memory.max_memory_allocated(device) - before, 2.6 * unit)
        subject(inputs).sum().backward()
        self.assertEqual([], self.found())

    @pytest.mark.slow
    @pytest.mark.nightly
    def test_two_hundred_steps(self) -> None:
        """The bytes in use after the last steps, and their peak, are those of the first ones."""
        device = torch.device(self.device)
        memory: Any = torch.get_device_module("sim")

        def count() -> tuple[int, int]:
            gc.collect()
            figures = memory.memory_allocated(device), memory.max_memory_allocated(device)
            memory.reset_peak_memory_stats(device)
            return figures

        for name, options in CONFIGURATIONS.items():
            subject = sharded(chain(1), device_id=device, **options)
            counts = train(subject, _inputs(self.rank, device), steps=200, count=count)
            self.assertEqual(counts[:2], counts[2:], msg=name)
            self.assertTrue(all(figures[0] > 0 for figures in counts), msg=name)
        self.assertEqual([], self.found())


def choose_sequential(module: nn.Module, numel: int) -> bool:
    """Each nn.Sequential is a unit."""
    return isinstance(module, nn.Sequential)


def _inputs(rank: int, device: torch.device | str) -> list[Tensor]:
    return [batch(rank, number).to(device) for number in range(2)]
