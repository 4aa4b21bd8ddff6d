"""
The base classes of PyTorch's own distributed tests, on our ranks: change only the import.

    from torch.testing._internal.common_fsdp import FSDPTest, MLP          # before
    from fsdp_conformance.harness.torch_compat import FSDPTest, MLP        # after

Every name of torch.testing._internal.common_fsdp, common_distributed, common_utils and common_dtensor can be imported
from here; the base classes and `skip_if_lt_x_gpu` are ours. What upstream skips is skipped here. FSDPTest wants a GPU
for each rank, and so do tests with `skip_if_lt_x_gpu`; on a machine without accelerators, a class can ask for the CPU:

    class TestTraining(FSDPTest):
        cpu_world_size = 2

It then uses gloo, and inside a test's own `world_size`, `device_count()` returns that number, so that the usual
`min(4, device_count())` works.
"""

from __future__ import annotations

import functools
import os
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import distributed
from torch.testing._internal.distributed._tensor import common_dtensor

from fsdp_conformance.harness import devices
from fsdp_conformance.harness.environment import Determinism
from fsdp_conformance.harness.rank import destroy_process_group
from fsdp_conformance.harness.testcase import ShardedTrainingTestCase
from fsdp_conformance.harness.torch_testing import common_distributed, common_fsdp, common_utils
from fsdp_conformance.plan import SIMULATED

__all__ = ["DTensorTestBase", "DistributedTestBase", "FSDPTest", "MultiProcessTestCase", "skip_if_lt_x_gpu"]

#: torch's own, because ours may be put in its place.
_skip_on_accelerators = common_distributed.skip_if_lt_x_gpu

#: Exactly what torch's harness sets in a rank.
_TORCH_SETTINGS = Determinism(seed=common_utils.SEED, algorithms="off")


class MultiProcessTestCase(ShardedTrainingTestCase):
    """torch.testing._internal.common_distributed.MultiProcessTestCase: the test makes its own process group."""

    determinism = _TORCH_SETTINGS

    cpu_world_size: ClassVar[int | None] = None
    """The number of ranks of a test that needs accelerators, on a machine without any; None: the test is skipped."""

    def setUp(self) -> None:
        self.case_timeout_s = float(common_distributed.get_timeout(self.id()))
        super().setUp()

    def init_rank(self) -> None:
        """Set nothing up for the test: it has no launcher that would give it a local rank either."""
        os.environ.pop("LOCAL_RANK", None)
        self.record_if_asked()


class DistributedTestBase(MultiProcessTestCase, common_distributed.DistributedTestBase):
    """torch.testing._internal.common_distributed.DistributedTestBase: starts the ranks, offers `create_pg`."""


class DTensorTestBase(MultiProcessTestCase, common_dtensor.DTensorTestBase):
    """
    torch.testing._internal.distributed._tensor.common_dtensor.DTensorTestBase: `with_comms` makes the process group.

    As upstream, it runs on the CPU where there are fewer accelerators than ranks.
    """

    def setUp(self) -> None:
        enough = common_dtensor.DEVICE_TYPE == "cpu" or int(self.world_size) <= common_dtensor.DEVICE_COUNT
        # With `pytest --simulate-cuda` torch's constant is "cuda", and this is what the ranks are started for.
        self.device_type = torch.device(common_dtensor.DEVICE_TYPE).type if enough else "cpu"
        super().setUp()

    def init_rank(self) -> None:
        """The test compares `device_type` with what its tensors say, which is "cuda" where torch's constant is."""
        super().init_rank()
        if self.device_type != "cpu":
            self.device_type = common_dtensor.DEVICE_TYPE


class FSDPTest(MultiProcessTestCase, common_fsdp.FSDPTest):  # type: ignore[misc]  # torch's classes disagree on _run
    """torch.testing._internal.common_fsdp.FSDPTest: starts the ranks and makes the process group."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own_world_size = cls.__dict__.get("world_size")
        if isinstance(own_world_size, property) and own_world_size.fget is not None:
            cls.world_size = property(_with_emulated_devices(own_world_size.fget))  # type: ignore[assignment,method-assign]

    @property
    def world_size(self) -> int:
        """torch's number, which is one rank per accelerator; `cpu_world_size` without any."""
        if self.device_type == "cpu":
            return self.cpu_world_size or 1
        if self.device_type == common_fsdp.DEVICE_TYPE:
            return int(common_fsdp.DEVICE_COUNT)
        return min(4, devices.device_count(self.device_type))

    def setUp(self) -> None:
        self.device_type = accelerator_or_cpu()
        if self.device_type == "cpu" and self.cpu_world_size is None:
            raise unittest.SkipTest(f"{common_distributed.TEST_SKIPS['multi-gpu-1'].message} (or set cpu_world_size)")
        super().setUp()

    def init_rank(self) -> None:
        """Set up device, process group, barrier and seed, as torch's class does."""
        devices.use_device(self.device)
        self.record_if_asked()
        if self.launch_options.get("fake_pg"):
            from torch.testing._internal.distributed.fake_pg import FakeStore

            distributed.init_process_group("fake", rank=self.rank, world_size=int(self.world_size), store=FakeStore())
        else:
            # As with NCCL, for the device alone: torch's sharded tensors take the device of their group.
            simulated = self.device_type == SIMULATED
            self.start_process_group(devices.SIMULATED_BACKEND.rpartition(":")[2] if simulated else None)
        distributed.barrier(device_ids=None if self.device_type == "cpu" else [self.device.index])
        torch._dynamo.reset()
        common_utils.set_rng_seed(common_utils.SEED)  # type: ignore[no-untyped-call]

    def shutdown_rank(self) -> None:
        """Destroy the group, whatever `destroy_pg_upon_exit` says, as torch's class does in its `_run`."""
        torch._dynamo.reset()
        destroy_process_group()


def accelerator_or_cpu() -> str:
    """The device type that tests of this module run on."""
    accelerator = devices.present_accelerator()
    return accelerator.type if accelerator is not None and devices.device_count(accelerator.type) else "cpu"


def skip_if_lt_x_gpu(x: int, *, allow_cpu: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """
    Skip with fewer than `x` accelerators. Without any, `allow_cpu` or the class's `cpu_world_size` make it run on the
    CPU.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        guarded = _skip_on_accelerators(x)(function)  # type: ignore[no-untyped-call]

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            runs_on_cpu = allow_cpu or getattr(args[0] if args else None, "cpu_world_size", None) is not None
            run = function if runs_on_cpu and accelerator_or_cpu() == "cpu" else guarded
            return run(*args, **kwargs)

        return wrapper

    return decorate


def _with_emulated_devices(getter: Callable[[Any], int]) -> Callable[[Any], int]:
    """Wrap the getter of a test's own `world_size`, so that on the CPU it finds `cpu_world_size` devices, or one."""

    @functools.wraps(getter)
    def emulating(self: FSDPTest) -> int:
        if accelerator_or_cpu() != "cpu":
            return getter(self)
        with _device_count(self.cpu_world_size or 1):
            return getter(self)

    return emulating


@contextmanager
def _device_count(number: int) -> Iterator[None]:
    with (
        mock.patch.object(torch.cpu, "device_count", return_value=number),
        mock.patch.object(torch.accelerator, "device_count", return_value=number),
    ):
        yield


def __getattr__(name: str) -> Any:
    """Return any other name of torch's test modules. Raises AttributeError if none of them has it."""
    for module in (common_fsdp, common_distributed, common_utils, common_dtensor):
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"neither module {__name__!r} nor torch's own test modules have an attribute {name!r}")
