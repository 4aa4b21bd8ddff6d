"""ci/bench/run profile: which cases it takes, and what it counts."""

from __future__ import annotations

import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fsdp_conformance.tests.guards import checkout
from fsdp_conformance.tests.guards.checkout import ROOT

pytestmark = [checkout.required, pytest.mark.nightly]


@pytest.fixture
def script() -> dict[str, Any]:
    """The names that the script defines."""
    return runpy.run_path(str(ROOT / "ci/bench/profile"))


def test_selection_is_spread_over_the_profile(script: dict[str, Any]) -> None:
    assert script["spread"]([str(number) for number in range(10)], 4) == ["2", "6"]
    assert script["spread"](["a", "b"], 1) == ["a", "b"]
    assert script["spread"](["a"], 4) == []


def test_what_a_run_pays_once_is_not_counted(script: dict[str, Any]) -> None:
    used = script["Used"]
    rest = used(11, 20.0, 5.0) - used(1, 10.0, 1.0)
    assert (rest.cases, rest.user_s, rest.system_s, rest.cpu_s) == (10, 10.0, 4.0, 14.0)


def test_a_run_that_ends_early_is_not_measured(
    script: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 4, "the suite itself failed")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(SystemExit, match=r"^profile: the run ended with status 4:\nthe suite itself failed$"):
        script["used_by"](["R001/x"], "torch-fsdp2", tmp_path, "off")
