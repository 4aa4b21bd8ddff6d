"""
`fsdp-conformance plan`: how to shard a model over a number of ranks, according to a cost model.

The options are checked here; a child process imports torch, and builds and prices the model.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

from fsdp_conformance.cli.child import answers
from fsdp_conformance.cli.plan_order import order_of
from fsdp_conformance.errors import SuiteError

#: Building a model on the meta device and counting its forward takes seconds; its imports may take longer.
TIMEOUT_S = 900.0


def main(arguments: argparse.Namespace) -> int:
    """Print the plan. Returns 0, or 1 if nothing fits. Raises SuiteError if the child dies."""
    with answers("plan", timeout_s=TIMEOUT_S, order=asdict(order_of(arguments))) as replies:
        for answer in replies:
            if answer["what"] == "plan":
                print(answer["text"])
                return int(answer["status"])
            raise SuiteError(f"the child process {answer['how']}. Its output ends with:\n{answer['output'].rstrip()}")
    raise SuiteError("the child process ended without a result")
