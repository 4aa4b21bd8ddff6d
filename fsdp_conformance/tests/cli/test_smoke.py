"""`smoke` prints what the adapter's own checks found, and starts nothing for an adapter that cannot be loaded."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from fsdp_conformance.adapters.registry import AdapterDescription
from fsdp_conformance.cli.command import main
from fsdp_conformance.cli.survey import Machine, Survey
from fsdp_conformance.driver.smoke import SmokeResult
from fsdp_conformance.tests.cli.cli_runs import said, with_adapter

_OK = SmokeResult(check="ADAPTER-01", title="the class keeps to the protocol")
_WRONG = SmokeResult(
    check="ADAPTER-03",
    title="full parameters are full",
    problems=(
        "shape of 0.weight: expected (16, 16), got (8, 16)\nit looks like the local shard",
        "1.weight is missing",
    ),
)
_LEFT_OUT = SmokeResult(check="ADAPTER-04", title="forward", not_run="the ranks had ended")


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(
        torch="2.13.0",
        device="cpu",
        backend="gloo",
        problem="",
        present=frozenset({"gloo"}),
        num_devices=2,
        num_ranks=None,
    )
    adapter_survey = Survey(machine=machine, description=AdapterDescription(spec="mine.py", name="mine", version="1"))
    monkeypatch.setattr("fsdp_conformance.cli.single.survey", lambda device, spec, fork: adapter_survey)


@pytest.mark.parametrize(
    ("results", "status", "last"),
    [
        ([_OK, _OK], 0, "mine.py: 2 of 2 checks ok"),
        ([_OK, _WRONG, _LEFT_OUT], 1, "the adapter is not ready"),
        ([_LEFT_OUT], 3, "no check could run on this machine"),
    ],
    ids=["ready", "wrong", "nothing checked"],
)
def test_the_status_says_whether_the_adapter_is_ready(
    results: list[SmokeResult], status: int, last: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A check that did not run does not count as passed."""
    with mock.patch("fsdp_conformance.driver.smoke.smoke", return_value=results):
        returned = main(["smoke", "mine.py"])
    out = capsys.readouterr().out

    assert returned == status
    lines = [line for line in out.splitlines() if not line.startswith("see ")]
    assert lines[-1].startswith(last)


def test_every_problem_of_every_check_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Below the line of the check, all lines of each."""
    with mock.patch("fsdp_conformance.driver.smoke.smoke", return_value=[_OK, _WRONG, _LEFT_OUT]):
        main(["smoke", "--implementation", "mine.py"])
    lines = capsys.readouterr().out.splitlines()

    assert lines[0].startswith("ADAPTER-01 the class keeps to the protocol")
    assert lines[0].endswith(" ok")
    assert lines[1].endswith(" ✗")
    assert [line.strip() for line in lines[2:5]] == [*_WRONG.problems[0].splitlines(), _WRONG.problems[1]]
    assert lines[5].endswith(" not run")
    assert lines[6] == "not run: the ranks had ended"
    assert [line for line in lines if len(line) > 80] == []


@pytest.mark.slow
def test_a_real_adapter_that_shards_nothing_is_judged_on_real_ranks(tmp_path: Path) -> None:
    """A wrap that returns the module as it is: ranks are started, and each check has its line."""
    result = said("smoke", with_adapter(tmp_path))

    assert result.status in (0, 1), result.err
    assert "ADAPTER-01 " in result.out
    assert "ADAPTER-05 " in result.out


@pytest.mark.slow
def test_an_adapter_that_cannot_be_imported_is_wrong_usage(tmp_path: Path) -> None:
    """Status 2, before a rank is started."""
    result = said("smoke", with_adapter(tmp_path, "import no_such_engine\n"))

    assert (result.status, result.out) == (2, "")
    assert "no_such_engine" in result.err
