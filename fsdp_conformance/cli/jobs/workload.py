"""The job of `cli.own_workload`: examine the workload that the user names."""

from __future__ import annotations

from fsdp_conformance.cli.child import Answer


def run(answer: Answer, spec: str) -> None:
    """Answer with its problems, and with what its model has."""
    from fsdp_conformance.cases.own_model import examined

    answer("workload", **examined(spec))
