"""
The case that `ci/bench/run simulated` times: the suites' nested parity case in worlds larger than any profile's.

Each rank reads the resource usage of the process it lives in.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.fixtures import probes

WORLD_SIZES = (2, 4, 8, 16, 32, 64, 128, 256)
PROBE = probes.exact_nested


class NestedParity(ConformanceTestCase):
    """Full sharding of nested units, on the exact probe."""

    @conformance_case("R005", "R002", "R003", chapter="A", axes={"world_size": WORLD_SIZES}, timeout_s=900.0)
    def test_nested_parity(self, world_size: int) -> None:
        """Losses, gradients and parameters equal the references', bit for bit, on every rank."""
        workload = PROBE()
        run = self.train(workload)
        self.check_parity(run, workload)
        # No rank exits before all have measured: shared pages are divided among the processes that are alive.
        dist.barrier()
        self.report.measurements[f"process of rank {self.rank}"] = used()
        dist.barrier()


def used() -> dict[str, Any]:
    """
    The resources this process has used: CPU seconds, its largest resident set, and its proportional set now (Linux).

    A page that n processes have counts for 1/n in the proportional set of each.
    """
    usage = resource.getrusage(resource.RUSAGE_SELF)
    rollup = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return {
        "pid": os.getpid(),
        "cpu seconds": usage.ru_utime + usage.ru_stime,
        "peak bytes": usage.ru_maxrss * 1024,
        "proportional bytes": next(int(line.split()[1]) * 1024 for line in rollup if line.startswith("Pss:")),
    }
