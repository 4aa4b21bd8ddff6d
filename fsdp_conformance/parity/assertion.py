"""The comparison for a test: `assert_same_training`."""

from __future__ import annotations

import os
from pathlib import Path

from fsdp_conformance.parity.comparison import compare
from fsdp_conformance.parity.result import Comparison
from fsdp_conformance.parity.text import lines_of
from fsdp_conformance.recordings import files


def assert_same_training(
    run: str | os.PathLike[str],
    reference: str | os.PathLike[str],
    *,
    nudged: str | os.PathLike[str] | None = None,
    bitwise: bool = False,
) -> Comparison:
    """
    Fail if two recordings differ by more than rounding, with what differs first.

    `nudged`: a recording of the reference whose parameters were changed by a rounding error; without it, only
    differences of a few rounding errors are allowed. `bitwise`: no difference is allowed at all. Raises ConfigError for
    directories that are no intact recordings, and AssertionError if no step was recorded.
    """
    comparison = compare(
        files.read(Path(run)), files.read(Path(reference)), files.read(Path(nudged)) if nudged is not None else None
    )
    if comparison.differs or not comparison.steps or (bitwise and not comparison.is_bitwise):
        text = "\n".join(line for line, _ in lines_of(comparison))
        raise AssertionError(f"the trainings are not the same:\n{text}")
    return comparison
