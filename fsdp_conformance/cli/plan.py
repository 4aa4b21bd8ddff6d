"""
`fsdp-conformance plan`: how to shard a model over so many ranks, by a cost model.

The words are checked here; the model is built and priced by a process of its own (`planner`), which imports torch.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from fsdp_conformance.cli.plan_order import order_of
from fsdp_conformance.errors import EnvironmentUnavailable

#: Building a model on meta and counting its forward takes seconds; importing what it needs may take longer.
TIMEOUT_S = 900.0


def main(arguments: argparse.Namespace) -> int:
    """Print the plan. Returns 0, or 1 if nothing fits, or the status of the error."""
    order = order_of(arguments)
    command = [sys.executable, "-m", "fsdp_conformance.cli.planner", order.to_json()]
    try:
        return subprocess.run(command, check=False, stdin=subprocess.DEVNULL, timeout=TIMEOUT_S).returncode
    except subprocess.TimeoutExpired:
        raise EnvironmentUnavailable(
            f"the plan of {order.model} took more than {TIMEOUT_S:.0f} s, but should take seconds: "
            "the function that builds the model should only build it"
        ) from None
