"""The job of `parity` for tensors that both runs have kept: the first wrong element, and its cause."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from fsdp_conformance import codec
from fsdp_conformance.cli.child import Answer


def run(answer: Answer, run: str, reference: str, keep: dict[str, Any]) -> None:
    """Answer with the first wrong element, or with none."""
    from fsdp_conformance.checks.recorded_values import first_wrong
    from fsdp_conformance.recordings import files
    from fsdp_conformance.recordings.events import Keep

    element = first_wrong(files.read(Path(run)), files.read(Path(reference)), codec.typed(Keep, keep))
    answer("values", element=None if element is None else asdict(element))
