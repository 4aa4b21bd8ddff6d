"""The job that compiles the simulated accelerator."""

from __future__ import annotations

from fsdp_conformance.cli.child import Answer


def run(answer: Answer) -> None:
    """Answer with the reason why it cannot be built, which is empty if it has been."""
    from fsdp_conformance.cases import places

    answer("built", problem=places.build_problem())
