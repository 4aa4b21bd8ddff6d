"""docs/scoreboard.md fits the register and the suites, and `ci/scoreboard` writes it from runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_conformance import contract
from fsdp_conformance.contract.profile import load_profile
from fsdp_conformance.errors import UsageError
from fsdp_conformance.report.expectations import Expectation
from fsdp_conformance.report.tally import Shown, digest_of
from fsdp_conformance.tests.guards import checkout
from fsdp_conformance.tests.report.test_tally import ran
from fsdp_conformance.verdict import Verdict
from pages import failures, scoreboard

pytestmark = [checkout.required, pytest.mark.slow]

SAMPLE = load_profile("sample")


def test_no_row_is_empty_without_a_reason() -> None:
    """Every requirement has cases, a known-wrong engine and an adapter, or says why not; no reason is stale."""
    table = scoreboard.table()

    assert table.problems == ()
    assert [row.requirement.id for row in table.rows] == list(contract.load().requirements)


def test_what_is_kept_is_of_cases_that_exist() -> None:
    """A verdict on a case that is gone says nothing: `ci/scoreboard` without runs drops it."""
    table = scoreboard.table()

    assert [name for name, (_, gone) in zip(table.engines, table.stale, strict=True) if gone] == []
    assert sorted(path.stem for path in scoreboard.KEPT.glob("*")) == sorted(each.name for each in table.engines)


def test_every_engine_that_was_run_is_bundled() -> None:
    """Others could not repeat a column of a user's own adapter."""
    assert {each.name for each in scoreboard.kept()} - scoreboard.bundled().keys() == set()


def test_every_failure_has_been_judged() -> None:
    """By an entry of ci/known-findings.toml, with a script that shows the defect, or a reason to have none."""
    assert [(each.engine, each.unknown) for each in scoreboard.failed() if each.unknown] == []


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose page and tallies may be overwritten."""
    monkeypatch.setattr(scoreboard, "ROOT", tmp_path)
    monkeypatch.setattr(scoreboard, "KEPT", tmp_path / "verdicts")
    monkeypatch.setattr(scoreboard, "PAGE", tmp_path / "scoreboard.md")
    # What is cached would be another checkout's.
    monkeypatch.setattr(scoreboard, "table", scoreboard.table.__wrapped__)
    monkeypatch.setattr(scoreboard, "failed", scoreboard.failed.__wrapped__)
    return tmp_path


def run_of(directory: Path, name: str, **verdicts: Verdict) -> str:
    """The run of an engine."""
    return ran(directory, cases=tuple(SAMPLE.by_id), profile=SAMPLE, name=name, **verdicts).run.path


@pytest.mark.nightly
def test_runs_replace_an_engines_column(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other engines keep their lines. A failure without an entry is a problem."""
    primary = SAMPLE.entries[0].primary
    paths = [run_of(elsewhere / name, name) for name in ("reference", "torch-fsdp2")]
    assert scoreboard.main(paths) == 0
    first = (elsewhere / "scoreboard.md").read_text(encoding="utf-8")

    other = (elsewhere / "verdicts/torch-fsdp2.json").read_text(encoding="utf-8")
    again = run_of(elsewhere / "again", "reference", **{primary: Verdict.HANG})
    assert scoreboard.main([again]) == 1
    assert "reference: R001/exact-probe-ws2 fails, and ci/known-findings.toml has no entry" in capsys.readouterr().err
    second = (elsewhere / "scoreboard.md").read_text(encoding="utf-8")

    assert [line.split()[1] for line in first.split("## What ran")[1].splitlines()[4:6]] == ["reference", "torch-fsdp2"]
    accused = f"| [{primary}](requirements.md#{primary.lower()}) "
    assert (accused in first, accused in second) == (False, True)
    assert f"| reference | {len(SAMPLE.by_id) - 1} | 0 | 1 | hang 1 | 0 | 1 | 0 |" in second
    assert (elsewhere / "verdicts/torch-fsdp2.json").read_text(encoding="utf-8") == other
    assert sorted(path.name for path in (elsewhere / "verdicts").iterdir()) == ["reference.json", "torch-fsdp2.json"]


@pytest.mark.nightly
def test_cases_that_are_gone_are_dropped(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Removed cases are dropped even if no run file is given."""
    assert scoreboard.main([run_of(elsewhere / "a", "reference")]) == 0
    tally = scoreboard.kept()[0]
    left = SAMPLE.entries[1:]
    monkeypatch.setattr(scoreboard, "load_profile", lambda name: type("Fewer", (), {"entries": left}))

    assert scoreboard.table().stale[0][1] == 1
    scoreboard.main([])

    assert tally.cases.keys() - scoreboard.kept()[0].cases.keys() == {SAMPLE.entries[0].id}


@pytest.mark.nightly
def test_what_was_edited_by_hand_is_refused(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tally or a run that was edited is refused."""
    path = Path(run_of(elsewhere / "a", "reference"))
    assert scoreboard.main([str(path)]) == 0
    file = elsewhere / "verdicts/reference.json"
    data = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**data, "version": "9"}), encoding="utf-8")

    with pytest.raises(UsageError, match=r"sha256 of the content: expected \w+, got \w+ \[reference.json\]"):
        scoreboard.kept()
    assert scoreboard.main([]) == 2
    path.write_text(path.read_text(encoding="utf-8").replace("PASS", "XPASS", 1), encoding="utf-8")
    file.unlink()
    assert scoreboard.main([str(path)]) == 2
    assert "needs runs that verify" in capsys.readouterr().err


def test_failures_of_one_script_are_one_defect() -> None:
    """A failure is counted with its entry only if the case is still what it was, and the verdict the one foretold."""
    first, second, third, fourth, fifth = SAMPLE.entries[:5]
    shown = {
        first: Verdict.FAIL,
        second: Verdict.FAIL,
        third: Verdict.HANG,
        fourth: Verdict.UNSUPPORTED,
        fifth: Verdict.PASS,
    }
    cases = {entry.id: Shown(verdict=verdict, digest=digest_of(entry)) for entry, verdict in shown.items()}
    changed = SAMPLE.entries[5]
    cases[changed.id] = Shown(verdict=Verdict.FAIL, digest="00000000")
    script = "ci/findings/torch-fsdp2/units_differ_between_ranks.py"
    expectations = [
        Expectation(case=entry.id, verdict="FAIL", reason=f"It is wrong ({script}).", implementation="torch-*")
        for entry in (first, second, third)
    ]
    tally = replace(scoreboard.kept()[0], name="torch-fsdp2", cases=cases)

    summary = failures.failures(tally, SAMPLE.entries, expectations)
    text = failures.markdown([summary])

    assert (summary.passed, summary.declined, summary.failed, summary.left) == (1, 1, 3, 0)
    (defect,) = summary.defects
    assert (defect.reason, defect.script, defect.cases) == ("It is wrong.", script, (first.id, second.id))
    assert summary.unknown == (third.id,)
    assert "| torch-fsdp2 | 1 | 1 | 3 |  | 0 | 1 | 1 |" in text
    assert "[pytorch#75373](https://github.com/pytorch/pytorch/issues/75373)" in text


def test_what_is_by_design_or_not_settled_is_no_defect() -> None:
    """Neither needs a script; what is not settled is counted as such."""
    entries = SAMPLE.entries[:3]
    reasons = ["By design: it replicates.", "Not settled: it may be the simulator.", "It is wrong, they say."]
    expectations = [Expectation(case=e.id, verdict="FAIL", reason=r) for e, r in zip(entries, reasons, strict=True)]
    cases = {entry.id: Shown(verdict=Verdict.FAIL, digest=digest_of(entry)) for entry in entries}
    summary = failures.failures(replace(scoreboard.kept()[0], name="mine", cases=cases), SAMPLE.entries, expectations)
    text = failures.markdown([summary])

    assert (summary.failed, summary.proven, summary.unsettled, summary.unknown) == (3, 0, 2, (entries[2].id,))
    assert "0 defects, 0 of which" in text
    assert "| mine | 0 | 0 | 3 |  | 0 | 2 | 0 |" in text
    assert "| mine | Not settled: it may be the simulator. | 1 |  |  |" in text
