"""A saved failure is a test: pytest collects it, judges it like a case, and writes no run file for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_conformance.contract.case import case_of
from fsdp_conformance.errors import EnvironmentUnavailable
from fsdp_conformance.explore import saved
from fsdp_conformance.explore.summary import script
from fsdp_conformance.scenarios.scenario import Scenario

_SCENARIO = Scenario.of({"rows": "uneven", "accumulation": "two reduced"})
_ENGINES = Path(__file__).with_name("engines.py")


def _pytest(directory: Path) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", str(directory)],
        cwd=directory,
        env=variables,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_a_saved_case_is_bound_to_its_scenario() -> None:
    """Its id has the digest of the scenario, and belongs to no profile."""

    class Kept(saved.SavedCase):
        scenario_json = _SCENARIO.to_json()

    case = case_of(Kept.test_drawn)

    assert case is not None
    assert case.id == f"R000/explored-{_SCENARIO.digest}-ws2"
    assert case.is_saved
    assert case_of(saved.SavedCase.test_drawn) is None


def test_the_file_is_python_and_the_same_every_time(tmp_path: Path) -> None:
    """Saving a scenario twice writes one file, whatever the signature has in it."""
    paths = {
        saved.save(tmp_path / "new", _SCENARIO, implementation="torch-fsdp2", signature='FAIL """ \\ (x)')
        for _ in range(2)
    }

    (path,) = paths
    compile(path.read_text(encoding="utf-8"), str(path), "exec")
    assert path.name == f"test_explored_{_SCENARIO.digest}.py"


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    """The error names the directory and what to do."""
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentUnavailable, match="Choose another --save"):
        saved.save(tmp_path / "file", _SCENARIO, implementation="torch-fsdp2", signature="FAIL")


def test_the_script_is_python() -> None:
    """It runs the scenario through the adapter."""
    text = script(_SCENARIO, implementation="my.py:Mine", signature="FAIL R003 (gradient parity)")

    compile(text, "script.py", "exec")
    assert "my.py:Mine" in text
    assert '"accumulation": "two reduced"' in text


@pytest.mark.nightly
def test_pytest_judges_saved_cases(tmp_path: Path) -> None:
    """One on an engine with the defect fails with the report, one on a correct engine passes; no run file appears."""
    for scenario, implementation in ((_SCENARIO, f"{_ENGINES}:OddAndSecond"), (Scenario(), "torch-fsdp2")):
        saved.save(tmp_path, scenario, implementation=implementation, signature="FAIL R003 (gradient parity)")

    run = _pytest(tmp_path)

    assert run.returncode == 1, run.stdout
    assert "R003" in run.stdout
    assert f"R000/explored-{_SCENARIO.digest}-ws2" in run.stdout
    assert "1 failed, 1 passed" in run.stdout
    assert not list(tmp_path.rglob("*.jsonl"))
