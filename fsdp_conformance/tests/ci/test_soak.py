"""ci/soak: what counts as an alarm, and that a soak goes on where it was."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdp_conformance.mutants import VARIANTS
from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.selftest import BoundCase
from fsdp_conformance.tests.guards import checkout
from fsdp_conformance.tests.guards.checkout import ROOT
from fsdp_conformance.tests.report.evidence import a_record
from fsdp_conformance.verdict import Verdict

pytestmark = [checkout.required, pytest.mark.nightly]

CASE = "R001/exact-probe-ws2"
#: In the list of known findings for torch-fsdp2.
KNOWN = "R059/order-differs-between-ranks-ws2"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that the script defines."""
    monkeypatch.syspath_prepend(str(ROOT / "ci"))
    return runpy.run_path(str(ROOT / "ci/soak"))


class Soak:
    """The script with cases that end as told, without ranks."""

    def __init__(self, script: dict[str, Any], results: Path) -> None:
        self.verdicts = {CASE: Verdict.PASS, KNOWN: Verdict.FAIL}
        self.ran: list[tuple[str, str]] = []
        self._results = results
        self._main = script["main"]
        self._main.__globals__["run_case"] = self._run

    def _run(self, bound: BoundCase, implementation: str) -> CaseRecord:
        self.ran.append((implementation, bound.case.id))
        return a_record(bound.case.id, self.verdicts[bound.case.id], device="cpu")

    def __call__(self, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
        self.ran.clear()
        given = ["soak", "--case", CASE, "--case", KNOWN, "--results", str(self._results), *arguments]
        monkeypatch.setattr(sys, "argv", given)
        return int(self._main())


def test_goes_on_where_it_was(script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in the results count; a line that was cut off does not."""
    results = tmp_path / "deep" / "results.jsonl"
    soak = Soak(script, results)

    assert soak(monkeypatch, "--repeat", "2") == 0
    assert len(soak.ran) == 4
    lines = results.read_text(encoding="utf-8").splitlines()
    results.write_text("\n".join(lines[:3]) + "\n" + lines[3][:20], encoding="utf-8")

    assert soak(monkeypatch, "--repeat", "2") == 0
    assert soak.ran == [("torch-fsdp2", KNOWN)]
    assert soak(monkeypatch, "--repeat", "2") == 0
    assert not soak.ran


def test_alarms(
    script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A listed failure of an engine raises no alarm on it or its variants; any other failure does, on any engine."""
    soak = Soak(script, tmp_path / "results.jsonl")
    names = ["torch-fsdp2", "sums-then-divides", "reference"]

    status = soak(
        monkeypatch, "--variants", "--repeat", "1", *(word for name in names for word in ("--implementation", name))
    )

    assert status == 1
    specs = ["torch-fsdp2", VARIANTS["sums-then-divides"].spec, "reference"]
    assert soak.ran == [(spec, case) for case in (CASE, KNOWN) for spec in specs]
    runs = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(run["implementation"], run["case"]) for run in runs if run["alarm"]] == [("reference", KNOWN)]
    assert [run["case"] for run in runs if "record" in run] == [KNOWN] * 3
    assert capsys.readouterr().out.endswith("soak: 1 alarms in 6 runs\n")


def test_base_cases_need_nothing(script: dict[str, Any]) -> None:
    """They are of the profile, and ask for no capability."""
    cases = script["base_cases"]()

    assert CASE in {bound.case.id for bound in cases}
    assert not [bound.case.id for bound in cases if bound.case.needs]
