"""Ranks on the simulated accelerator, with a process group for it and one for the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fsdp_conformance.harness.testcase import ShardedTrainingTestCase
from fsdp_conformance.plan import SIMULATED
from fsdp_conformance.simulator import checker
from fsdp_conformance.simulator.checker.hazard import HazardKind
from fsdp_conformance.simulator.device import build
from fsdp_conformance.tests.simulator.simulator_collectives import Outputs, Values, differences

compiled = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))


class SimulatedRanks(ShardedTrainingTestCase):
    """Ranks with a simulated device each, and a group for both devices: gloo for the CPU, ours for sim."""

    device_type = SIMULATED
    world_size = 2
    case_timeout_s = 300.0

    def setUp(self) -> None:
        super().setUp()
        build.require()  # not in the ranks, whose deadline does not allow for compiling
        self._spawn_processes()

    def init_rank(self) -> None:
        super().init_rank()
        torch.set_num_threads(1)
        self.start_process_group()


class OnSim(SimulatedRanks):
    """Ranks that compare collectives, with what FSDP2 imports imported before."""

    case_timeout_s = 120.0
    preload = (
        "fsdp_conformance.tests.simulator.simulator_collectives",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "torch._dynamo",
    )

    def values(self, *numbers: float) -> Tensor:
        return torch.tensor(numbers, device=self.device)

    def found(self) -> list[str]:
        """The hazards so far, which are then cleared."""
        hazards = [f"{hazard.kind.value}: {hazard.sentence()}" for hazard in checker.hazards()]
        checker.clear()
        return hazards

    def assert_kinds(self, expected: list[HazardKind]) -> None:
        kinds = [hazard.kind for hazard in checker.hazards()]
        texts = [hazard.sentence() for hazard in checker.hazards()]
        checker.clear()
        self.assertEqual(expected, kinds, msg=str(texts))

    def assert_same_as_gloo(self, program: Callable[[Values], Outputs], dtype: torch.dtype = torch.float32) -> None:
        expected = program(Values("cpu", dtype))
        got = program(Values("sim", dtype))
        with checker.suspended():
            different = differences(expected, got)
        self.assertEqual([], different)
        self.assertEqual([], self.found())
