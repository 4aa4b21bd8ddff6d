"""`selftest` shows survivors and wrong accusations, and its status says whether there was one."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdp_conformance.cli.command import main
from fsdp_conformance.cli.commands import selftest


def _result(kind: str, *, group: str = "gradients", engine: str = "wrong", good: bool = True, **more: Any) -> Any:
    trial = {"kind": kind, "group": group, "engine": engine, "case": "R003/some-ws2"}
    return {
        "what": "result",
        "trial": trial,
        "good": good,
        "text": "the text",
        "strict": False,
        "failed": False,
        **more,
    }


def _plan(*results: Any, not_here: dict[str, str] | None = None) -> Any:
    trials = [result["trial"] for result in results]
    groups = {trial["group"]: "Wrong reductions" for trial in trials if trial["kind"] == "kill"}
    return {"what": "plan", "trials": trials, "groups": groups, "not_here": not_here or {}}


_KILLED = _result("kill")
_SURVIVED = _result("kill", good=False)
_RIGHT = _result("right", group="reference", engine="reference")
_ACCUSED = _result("right", group="reference", engine="reference", good=False)
_FAILED = _result("kill", good=False, failed=True)
_DIED = {"what": "died", "how": "was ended by SIGKILL", "output": "said before"}


@pytest.mark.parametrize(
    ("results", "more", "status", "line"),
    [
        ([_KILLED, _RIGHT], [], 0, "selftest: ok"),
        ([_SURVIVED, _RIGHT], [], 1, "SURVIVED the text"),
        ([_KILLED, _ACCUSED], [], 1, "WRONGLY KILLED the text"),
        ([_FAILED, _RIGHT], [], 4, "the suite itself failed: the text"),
        ([_KILLED], [_DIED], 4, "the child process was ended by SIGKILL"),
        ([], [], 3, "correct engines (none), 0 trials: none is killed"),
    ],
    ids=["ok", "a survivor", "a correct engine killed", "the suite failed", "the child died", "nothing could run"],
)
def test_the_status(
    results: list[Any],
    more: list[Any],
    status: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whatever is wrong is named, and shows in the status."""
    _answering(monkeypatch, [_plan(*results), *results, *more])

    assert main(["selftest", "--quick"]) == status
    assert line in capsys.readouterr().out


def test_a_trial_without_a_result_is_no_kill(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A child that ends early, and says that all is well, has shown nothing."""
    _answering(monkeypatch, [_plan(_KILLED, _RIGHT), _KILLED])

    assert main(["selftest"]) == 4
    assert "1 of 2 trials have no result" in capsys.readouterr().out


def test_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Known-wrong engines are counted, not trials; the losses are given next to them."""
    results = [
        _result("kill", engine="one"),
        _result("kill", engine="one", good=False),
        _result("kill", engine="two"),
        _result("kill", engine="three"),
        _result("loss", engine="one", good=False, strict=True),
        _result("loss", engine="two", good=True, strict=True),
    ]
    plan = _plan(*results, not_here={"four": "no C++ compiler"})
    _answering(monkeypatch, [plan, *results])
    main(["selftest"])
    table = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]

    assert "gradients 2 of 3 1 of 3 2 of 3 Wrong reductions" in table
    assert "all 2 of 3 1 of 3 2 of 3" in table
    assert "not run: 1 known-wrong engine (no C++ compiler)" in table


@pytest.mark.slow
@pytest.mark.parametrize(
    ("oracle", "status", "line"),
    [
        pytest.param("", 0, "gradients 1 of 1", id="as it is", marks=pytest.mark.nightly),
        pytest.param(
            "checks.parity = blind",
            1,
            "SURVIVED sum-instead-of-mean on R003/some-ws2",
            id="broken on purpose",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_broken_oracle_is_reported(oracle: str, status: int, line: str, tmp_path: Path) -> None:
    """With parity that holds for everything, the known-wrong engine survives."""
    package = tmp_path / "small_suite"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "test_small.py").write_text(_SUITE.format(oracle=oracle), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "fsdp_conformance", "selftest", "-n", "1", "--suites", "small_suite"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )

    assert line in " ".join(done.stdout.split()), done.stdout + done.stderr
    assert done.returncode == status


_SUITE = '''
from fsdp_conformance.cases import checks
from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.checks.result import CheckResult
from fsdp_conformance.fixtures import probes
from fsdp_conformance.outcome.records import CheckCount
from fsdp_conformance.cases.base import ConformanceTestCase


def blind(*arguments, **options):
    yield CheckResult(check="parity", requirement="R003", count=CheckCount(comparisons=1, elements=1))


{oracle}


class Some(ConformanceTestCase):
    @conformance_case("R003", chapter="A", world_size=2, kills=("sum-instead-of-mean",))
    def test_some(self):
        """Gradients are averaged."""
        workload = probes.exact_mlp()
        self.check_parity(self.train(workload), workload)
'''


def _answering(monkeypatch: pytest.MonkeyPatch, child_answers: list[Any]) -> None:
    @contextlib.contextmanager
    def answers(job: str, **arguments: Any) -> Iterator[Iterator[dict[str, Any]]]:
        yield iter([dict(answer) for answer in child_answers])

    monkeypatch.setattr(selftest, "answers", answers)
