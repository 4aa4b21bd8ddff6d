"""
The child process of `doctor`: `python -m fsdp_conformance.cli.examine DEVICE [shared]` launches ranks, and prints each
finding as a line of JSON.

The warm process is started first: it imports torch for the ranks while this process imports it for itself.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from typing import Any

from fsdp_conformance.cli.examination import SHARED
from fsdp_conformance.cli.surveyor import machine_here
from fsdp_conformance.errors import ConformanceError
from fsdp_conformance.harness.processes.forkserver import server_for

#: World sizes for trying collectives, as far as there are devices.
WORLD_SIZES = (2, 4)


def main(device: str, *, shared: bool = False) -> None:
    """Find out what this machine can do; with `shared`, ranks share devices. Stops at the first thing that fails."""
    began = time.monotonic()
    server_for(("fsdp_conformance.harness.exact_collectives",)).ensure_running()
    machine = machine_here(device)
    say("machine", **machine.to_json())
    if machine.num_ranks == 0 or not machine.backend:
        return
    from fsdp_conformance.harness.exact_collectives import OPERATIONS, check_collectives

    most = max(WORLD_SIZES) if shared or machine.num_ranks is None else machine.num_ranks
    sizes = [size for size in WORLD_SIZES if size <= most] or [1]
    try:
        first = check_collectives(device, sizes[0], shared=shared)
        say("warm", seconds=time.monotonic() - began - first.seconds)
        # The first launch waited for the warm process; the second is what a case pays.
        for size in sizes:
            checked = check_collectives(device, size, shared=shared)
            say("collectives", operations=OPERATIONS, **asdict(checked))
    except ConformanceError as error:
        say("unlaunched", problem=str(error))


def say(what: str, **content: Any) -> None:
    """Print one finding immediately."""
    print(json.dumps({"what": what, **content}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], shared=SHARED in sys.argv[2:])
