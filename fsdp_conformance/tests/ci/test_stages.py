"""The stages of ci/test: what each attempt leaves behind, and the exit status of all of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_conformance.tests.guards import checkout
from fsdp_conformance.tests.guards.checkout import ROOT

pytestmark = checkout.required

#: The environment's Python: runs ci/test, and stands for pytest, which fails.
_PYTHON = """#!/bin/sh
case "$1" in
    -m)
        echo "$FSDP_CONFORMANCE_TEST_REFERENCES" >>references
        echo "FAILED tests/test_a.py::test_b - it is wrong"
        exit 1 ;;
    *) exec {python} "$@" ;;
esac
"""


@pytest.fixture(name="stubs")
def _stubs(tmp_path: Path) -> Path:
    """A checkout with the real ci/test, whose stages end immediately: types fail, workflows cannot run, lint passes."""
    scripts = {
        "ci/setup": f"#!/bin/sh\necho {tmp_path}/env\n",
        "ci/types": "#!/bin/sh\necho an error of types\nexit 3\n",
        "ci/workflows": "#!/bin/sh\nexit 77\n",
        "env/bin/python": _PYTHON.format(python=sys.executable),
        "env/bin/ruff": "#!/bin/sh\necho all is well\n",
    }
    for name, text in scripts.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
    for name in ("test", "driver.py"):
        shutil.copy(ROOT / "ci" / name, tmp_path / "ci")
    return tmp_path


def ci_test(stubs: Path, *arguments: str) -> tuple[int, list[str]]:
    """
    The exit status, and the lines of stdout; a traceback fails the test.

    The variables of the ci/test that runs these tests are left out: they name its own store of references.
    """
    variables = {name: value for name, value in os.environ.items() if not name.startswith("FSDP_CONFORMANCE_")}
    done = subprocess.run(
        [stubs / "ci/test", *arguments],
        cwd=stubs,
        env=variables,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


def test_every_stage_runs_and_the_first_failure_is_the_status(stubs: Path) -> None:
    """The last lines name what failed, where the whole output is, and how each stage ended."""
    status, lines = ci_test(stubs, "--only", "workflows,types,lint,unit")

    assert status == 3
    assert lines[-1].startswith("ci/test: FAILED in types, unit, ")
    assert lines[-2] == "NOT_RUN_ENV: 1 (workflows)"
    outcomes = {line.split()[0]: line.partition(" s  ")[2] for line in lines[-7:-2]}
    failures = {"types": "FAILED, status 3", "unit": "FAILED, status 1"}
    assert outcomes == {"setup": "ok", "workflows": "NOT_RUN_ENV", "lint": "ok", **failures}
    assert "types: an error of types" in lines
    assert "unit: FAILED tests/test_a.py::test_b - it is wrong" in lines
    assert "types: the whole output is in .fsdp-conformance/test/types.log" in lines
    assert (stubs / ".fsdp-conformance/test/lint.log").read_text(encoding="utf-8") == "all is well\n"


def test_an_attempt_of_several_has_its_own_log(stubs: Path) -> None:
    """Nothing is run again because it failed, and nothing is left out because it succeeded."""
    status, lines = ci_test(stubs, "--only", "lint", "--repeat", "2")

    assert status == 0
    assert [line.split()[:2] for line in lines[-3:-1]] == [["lint", "1/2"], ["lint", "2/2"]]
    assert sorted(path.name for path in (stubs / ".fsdp-conformance/test").iterdir()) == ["lint.1.log", "lint.2.log"]


def test_a_stage_that_cannot_start_has_failed(stubs: Path) -> None:
    """An error of the driver itself is never taken for success."""
    (stubs / "ci/types").unlink()
    done = subprocess.run(
        [stubs / "ci/test", "--only", "types"], cwd=stubs, capture_output=True, text=True, timeout=240, check=False
    )

    assert done.returncode == 4
    assert "FileNotFoundError" in done.stderr
    assert done.stdout.splitlines()[-1].startswith("ci/test: FAILED in types, ")


def test_tests_share_a_store_of_references_that_is_gone_afterwards(stubs: Path) -> None:
    """The tests of the night share none."""
    ci_test(stubs, "--only", "unit,nightly")
    store, nothing = (stubs / "references").read_text(encoding="utf-8").splitlines()

    assert nothing == ""
    assert store != ""
    assert not Path(store).exists()
