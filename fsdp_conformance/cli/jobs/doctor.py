"""
The job of `doctor`: launch ranks, and let them communicate as in a case.

The warm process is started first: it imports torch for the ranks while this process imports it for itself.
"""

from __future__ import annotations

import time
from dataclasses import asdict

from fsdp_conformance.cli.child import Answer
from fsdp_conformance.cli.jobs.survey import machine_here
from fsdp_conformance.errors import ConformanceError
from fsdp_conformance.harness.processes.forkserver import server_for

#: World sizes for trying collectives, as far as there are devices.
WORLD_SIZES = (2, 4)


def run(answer: Answer, device: str, *, shared: bool) -> None:
    """Answer with the machine, then with each launch, up to the first failure. With `shared`, ranks share devices."""
    began = time.monotonic()
    server_for(("fsdp_conformance.harness.exact_collectives",)).ensure_running()
    machine = machine_here(device)
    answer("machine", **machine.to_json())
    if machine.num_ranks == 0 or not machine.backend:
        return
    from fsdp_conformance.harness.exact_collectives import OPERATIONS, check_collectives

    most = max(WORLD_SIZES) if shared or machine.num_ranks is None else machine.num_ranks
    sizes = [size for size in WORLD_SIZES if size <= most] or [1]
    try:
        first = check_collectives(device, sizes[0], shared=shared)
        answer("warm", seconds=time.monotonic() - began - first.seconds)
        # The first launch waited for the warm process; the second is what a case pays.
        for size in sizes:
            checked = check_collectives(device, size, shared=shared)
            answer("collectives", operations=OPERATIONS, **asdict(checked))
    except ConformanceError as error:
        answer("unlaunched", problem=str(error))
