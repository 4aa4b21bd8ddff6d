"""The job of `run` that checks the adapter before any case runs."""

from __future__ import annotations

from fsdp_conformance import codec
from fsdp_conformance.cli.child import Answer


def run(answer: Answer, implementation: str, device: str) -> None:
    """Answer with the result of each check."""
    from fsdp_conformance.driver.smoke import smoke

    for result in smoke(implementation, device=device):
        answer("check", **codec.plain(result))
