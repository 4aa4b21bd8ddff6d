"""Cases as tests of a user's own test suite."""

from __future__ import annotations

import datetime as dt
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_conformance import conformance_tests
from fsdp_conformance.contract.profile import load_profile
from fsdp_conformance.errors import UsageError
from fsdp_conformance.tests import warm_interpreter

_ADAPTER = '''
import torch.distributed as dist

from fsdp_conformance.adapters.vendors.torch_fsdp2 import TorchFSDP2


class Summed(TorchFSDP2):
    """Gradients are summed instead of averaged."""

    def backward(self, loss, *, retain_graph=False):
        super().backward(loss * dist.get_world_size(), retain_graph=retain_graph)
'''

_TESTS = """
from fsdp_conformance import conformance_tests

CASES = ["R001/exact-probe-ws2"]
TestGood = conformance_tests("torch-fsdp2", cases=CASES)
TestWrong = conformance_tests("mine.py:Summed", cases=CASES)
TestKnown = conformance_tests("mine.py:Summed", cases=CASES, expectations="known.toml")
TestStale = conformance_tests("torch-fsdp2", cases=CASES, expectations="stale.toml")
TestDeclined = conformance_tests("torch-ddp", profile="core", cases=["R151/*"])


def test_of_ones_own():
    assert conformance_tests
"""

_KNOWN = """
[[expect]]
case = "R001/*"
verdict = "FAIL"
reason = "gradients are summed"
"""


def test_what_is_collected() -> None:
    """A test for each case of the profile, with its id, and the mark."""
    collected = conformance_tests("whatever")
    (parametrized,) = collected.test_case.pytestmark  # type: ignore[attr-defined]

    assert [case.id for case in parametrized.args[1]] == [entry.id for entry in load_profile("quick").entries]
    assert [mark.name for mark in collected.pytestmark] == ["conformance"]  # type: ignore[attr-defined]
    assert not hasattr(collected, "test_expectations")


def test_it_costs_nothing_before_it_is_used() -> None:
    """Every command imports the package first, and so does pytest wherever it is installed."""
    script = (
        "import sys, fsdp_conformance; print([name for name in sys.modules if name.startswith('fsdp_conformance.')])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout == "[]\n"


def test_a_selection_of_nothing_is_a_mistake() -> None:
    """Otherwise a mistyped glob would be a test suite that is always green."""
    with pytest.raises(UsageError, match=r"cases must match at least one case of quick-2026\.11, got \['R777/\*'\]"):
        conformance_tests("whatever", cases=["R777/*"])


def test_a_list_with_mistakes_is_refused(tmp_path: Path) -> None:
    """When the tests are collected, not when the first one fails."""
    (tmp_path / "conformance.toml").write_text("[[expect]]\n")

    with pytest.raises(UsageError, match="case is missing"):
        conformance_tests("whatever", expectations=tmp_path / "conformance.toml")


@pytest.mark.nightly
def test_in_a_suite_of_ones_own(tmp_path: Path) -> None:
    """
    Right engines pass, wrong ones fail with the report, known failures are expected ones; what is gone, stale or
    expired fails; what is declined skips. Other tests run as ever, and no run file is written.
    """
    (tmp_path / "mine.py").write_text(_ADAPTER)
    (tmp_path / "test_engine.py").write_text(_TESTS)
    (tmp_path / "known.toml").write_text(_KNOWN)
    yesterday = dt.datetime.now(dt.UTC).date() - dt.timedelta(days=1)
    stale = _KNOWN + f"expires = {yesterday}\n" + _KNOWN.replace("R001/*", "R777/*")
    (tmp_path / "stale.toml").write_text(stale)
    done = warm_interpreter.run(
        [sys.executable, "-m", "pytest", "-v", "-rsx", "--strict-markers", "-p", "no:cacheprovider", "test_engine.py"],
        cwd=tmp_path, timeout=240,
    )  # fmt: skip

    outcomes = {line.split()[0].removeprefix("test_engine.py::"): line.split()[1]
                for line in done.stdout.splitlines() if line.startswith("test_engine.py::")}  # fmt: skip
    declined = {name: outcome for name, outcome in outcomes.items() if name.startswith("TestDeclined")}
    assert set(declined.values()) == {"SKIPPED"}, done.stdout
    case = "test_case[R001/exact-probe-ws2]"
    assert {name: outcome for name, outcome in outcomes.items() if name not in declined} == {
        f"TestGood::{case}": "PASSED",
        f"TestWrong::{case}": "FAILED",
        f"TestKnown::{case}": "XFAIL",
        "TestKnown::test_expectations": "PASSED",
        f"TestStale::{case}": "FAILED",
        "TestStale::test_expectations": "FAILED",
        "test_of_ones_own": "PASSED",
    }, done.stdout
    assert "ratio 2" in done.stdout
    assert "CHANGED   R001/exact-probe-ws2: expected FAIL, got PASS" in done.stdout
    assert "UNMATCHED R777/*: no case of the profile has this id" in done.stdout
    assert "Traceback" not in done.stdout
    assert not (tmp_path / ".fsdp-conformance").exists()
