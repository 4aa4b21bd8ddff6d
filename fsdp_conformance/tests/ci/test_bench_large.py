"""ci/bench/run large: the CPU and the simulated accelerator are measured."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from fsdp_conformance.simulator.device import build
from fsdp_conformance.tests.guards import checkout
from fsdp_conformance.tests.guards.checkout import ROOT

pytestmark = [
    checkout.required,
    pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable())),
]


@pytest.mark.nightly
def test_both_devices() -> None:
    """A row for the model, and the ratio as the last line."""
    command = [sys.executable, "ci/bench/large.py", "--rounds", "1", "--model", "ten matrices"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)

    assert done.returncode == 0, done.stderr
    row = re.search(r"^ten matrices +([0-9.]+) +([0-9.]+) +([0-9.]+)$", done.stdout, re.MULTILINE)
    assert row is not None, done.stdout
    assert re.fullmatch(rf"large: {row[3]}", done.stdout.splitlines()[-1])
