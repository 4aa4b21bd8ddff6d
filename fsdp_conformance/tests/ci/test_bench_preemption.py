"""ci/bench/run preemption: both ways are measured."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from fsdp_conformance.tests.guards import checkout
from fsdp_conformance.tests.guards.checkout import ROOT

pytestmark = checkout.required


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="the policy is Linux's")
def test_both_ways() -> None:
    """A row for the world size, and the ratio as the last line."""
    command = [sys.executable, "ci/bench/preemption.py", "--ranks", "2", "--calls", "3", "--rounds", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)

    assert done.returncode == 0, done.stderr
    row = re.search(r"^ +2 +(\S+) +(\S+) +(\S+) +(\S+) +(\S+)$", done.stdout, re.MULTILINE)
    assert row is not None, done.stdout
    assert all(float(cell) >= 0 for cell in row.groups())
    assert re.fullmatch(r"preemption: [0-9.]+", done.stdout.splitlines()[-1])
