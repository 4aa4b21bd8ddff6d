"""
`fsdp-conformance plan`: how to shard a model over a number of ranks, according to a cost model.

The options are checked here; a child process (`planner`), which imports torch, builds and prices the model.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from fsdp_conformance.cli.plan_order import order_of
from fsdp_conformance.errors import EnvironmentUnavailable

#: Building a model on the meta device and counting its forward takes seconds; its imports may take longer.
TIMEOUT_S = 900.0


def main(arguments: argparse.Namespace) -> int:
    """Print the plan. Returns 0, or 1 if nothing fits, or the status of the error."""
    order = order_of(arguments)
    command = [sys.executable, "-m", "fsdp_conformance.cli.planner", order.to_json()]
    try:
        return subprocess.run(command, check=False, stdin=subprocess.DEVNULL, timeout=TIMEOUT_S).returncode
    except subprocess.TimeoutExpired:
        raise EnvironmentUnavailable(
            f"planning {order.model} took more than {TIMEOUT_S:.0f} s; it should take seconds. "
            "The function that builds the model must not do anything else."
        ) from None
