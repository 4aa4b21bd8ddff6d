"""The reduce-scatter bucketer on the simulated accelerator: inputs from one stream, results used on another."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_conformance.engine.bucketing.reduce_scatter_bucketer import ReduceScatterBucketer
from fsdp_conformance.plan import SIMULATED
from fsdp_conformance.simulator import checker
from fsdp_conformance.simulator.checker.hazard import Hazard
from fsdp_conformance.simulator.device import build
from fsdp_conformance.tests.engine.engine_sites import watching_engine
from fsdp_conformance.tests.simulator.simulator_ranks import SimulatedRanks

pytestmark = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))

#: Two ranks, float32: 16 elements for each rank.
CAP_MB = 128 / 2**20


class SimulatedBucketerTest(SimulatedRanks):
    """Two ranks with a simulated device each."""

    def reduce(self, *, dropped: Collection[str] = ()) -> tuple[list[Tensor], tuple[Hazard, ...], set[str]]:
        """
        Inputs of 3, 9, 20 and 6 elements, alternately on two streams that wait only for their inputs. Results are used
        on a third stream, and freed. The memory that the device allocates next is written at once.
        """
        module: Any = torch.get_device_module(SIMULATED)
        streams = [module.Stream(), module.Stream()]
        results: list[Tensor] = []
        module.synchronize()
        checker.clear()
        bucketer = ReduceScatterBucketer(CAP_MB)
        sites: set[str] = set()
        with watching_engine(sites, dropped):
            for turn in range(3):
                for index, numel in enumerate((3, 9, 20, 6)):
                    with module.stream(streams[(index + turn) % 2]):
                        rows = [torch.full((numel,), 10.0 * index + rank, device=self.device) for rank in range(2)]
                        bucketer.reduce_scatter(rows, callback=lambda result: results.append(result * 2))
                        del rows
                with module.stream(streams[(turn + 1) % 2]):
                    bucketer.flush()
                bucketer.wait()
                for numel in (20, 24, 40):
                    for stream in (*streams, module.current_stream()):
                        with module.stream(stream):
                            torch.empty(2 * numel, device=self.device).fill_(-1)
        hazards = checker.hazards()
        with checker.suspended():
            return [result.to("cpu") for result in results], hazards, sites

    @pytest.mark.nightly
    @pytest.mark.slow
    def test_clean_and_right(self) -> None:
        """Each result is this rank's sum, nothing races, and something does without waits."""
        results, hazards, sites = self.reduce()
        self.assertEqual(0, len(hazards), msg="\n".join(hazard.explain() for hazard in hazards))
        self.assertTrue(sites)
        expected = [
            torch.full((numel,), 2 * 2 * (10.0 * index + self.rank))
            for _ in range(3)
            for index, numel in ((2, 20), (0, 3), (1, 9), (3, 6))
        ]
        self.assertEqual(sorted(map(str, expected)), sorted(map(str, results)))
        with checker.without_waits():
            self.assertNotEqual((), self.reduce()[1])

    @pytest.mark.slow
    def test_each_wait_is_needed(self) -> None:
        """Every wait of the bucketer, dropped alone, is a hazard."""
        _, _, sites = self.reduce()
        flagged = set()
        for site in sorted(sites):
            dist.barrier()
            if self.reduce(dropped={site})[1]:
                flagged.add(site)

        self.assertEqual("", ", ".join(sorted(sites - flagged)))
