"""Findings that a file suppresses, in runs of `sanitize`."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_conformance.tests.simulator.sanitize.sanitize_runs import needs_simulator, sanitize, written

pytestmark = [pytest.mark.slow, needs_simulator]

#: Two races, one in a function.
SCRIPT = """
import torch


def copied(data):
    with torch.cuda.stream(torch.cuda.Stream()):
        data.mul_(2)


data = torch.ones(4, device="cuda")
copied(data)
other = torch.ones(4, device="cuda")
with torch.cuda.stream(torch.cuda.Stream()):
    other.add_(1)
"""


@pytest.mark.parametrize(
    ("lines", "status", "words"),
    [
        ("race:copied", 1, ("1 hazard in 1 place", "suppressed: 1 finding", "known.supp:1 race:copied]")),
        ("race:train.py", 0, ("clean: ", "2 suppressed [exit 0]")),
        ("race:train.py\nrace:old", 1, ("nothing new, but 1 suppression", "matched nothing: known.supp:2 race:old")),
    ],
)
def test_suppressed_races(lines: str, status: int, words: tuple[str, ...], tmp_path: Path) -> None:
    """The others are still reported, and a line that matches nothing fails the run if asked."""
    written(tmp_path, lines, "known.supp")
    typed = ("--as-cuda", "--world-size", "1", "--suppressions", "known.supp", "--strict-suppressions")
    run = sanitize(*typed, written(tmp_path, SCRIPT), cwd=tmp_path)

    assert run.status == status, run.out
    assert all(word in run.out for word in words), run.out
