"""The study of explore's power: what is hidden, what is within reach, and what counts as found."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from fsdp_conformance.contract import requirement
from fsdp_conformance.contract.gate import empty_record
from fsdp_conformance.explore.case import case_for
from fsdp_conformance.explore.pool import Outcome
from fsdp_conformance.mutants import ALL, MUTANTS
from fsdp_conformance.outcome.records import Finding
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.scenarios.scenario import Scenario
from fsdp_conformance.tests.guards import checkout
from fsdp_conformance.verdict import Verdict
from studies import explore_power, explore_reach
from studies.explore_power import Answer, Fork, Forks

pytestmark = [checkout.required, pytest.mark.nightly]


def _answer(name: str, **changes: Any) -> Answer:
    return Answer(**{"mutant": name, "found": True, "ran": 3, **changes})


def test_a_third_is_hidden_and_always_the_same() -> None:
    """Neither the order of the registry nor a new engine changes what is chosen of the others."""
    hidden = [mutant.name for mutant in explore_power.hidden()]

    assert hidden == [mutant.name for mutant in explore_power.hidden(reversed(ALL))]
    assert set(hidden) >= {mutant.name for mutant in explore_power.hidden(ALL[:50])}
    assert len(ALL) / 4 < len(hidden) < len(ALL) / 2


def test_reasons_are_of_what_exists() -> None:
    """Each is of a requirement or an engine that there is, and of an engine only if its requirement has none."""
    assert set(explore_reach.UNREACHED) <= set(requirement.load().requirements)
    assert set(explore_reach.UNREACHED_ALONE) <= set(MUTANTS)
    assert all([*explore_reach.UNREACHED.values(), *explore_reach.UNREACHED_ALONE.values()])
    assert not [name for name in explore_reach.UNREACHED_ALONE if MUTANTS[name].requirement in explore_reach.UNREACHED]


@pytest.mark.parametrize(
    ("name", "reached"),
    [
        ("sum-instead-of-mean", True),
        ("reference-keeps-collected", True),
        ("checkpoint-shifts-state", True),
        ("frees-in-flight", False),
        ("accepts-containers", False),
        ("capacity-rounds-up", False),
        ("checkpoint-sorts-shards-as-text", False),
    ],
)
def test_what_is_within_reach(name: str, reached: bool) -> None:
    """Components, misuse, races and what nothing draws are not."""
    assert (explore_reach.out_of_reach(MUTANTS[name]) == "") is reached


def test_the_engine_without_the_defect() -> None:
    """The seam that a known-wrong engine derives from, or the adapter itself."""
    assert explore_power.without_defect(MUTANTS["sum-instead-of-mean"]) == "fsdp_conformance.mutants.base:SeamFSDP2"
    assert explore_power.without_defect(MUTANTS["keeps-gradients"]) == "fsdp_conformance.mutants.base:SeamFSDP2"
    wrong = [mutant for mutant in ALL if not explore_reach.out_of_reach(mutant)]
    assert all(explore_power.without_defect(mutant) != mutant.spec for mutant in wrong)


def _outcome(verdict: Verdict) -> Outcome:
    record = empty_record(case_for(Scenario()), RunSettings(implementation="an-engine"), "cpu")
    record.verdict = verdict
    record.findings = [Finding(requirement="R003", check="gradient parity", message="no")] * (verdict is Verdict.FAIL)
    return Outcome(record=record)


@pytest.mark.parametrize(
    ("wrong", "correct", "counts_ends", "failed"),
    [
        (Verdict.PASS, Verdict.PASS, False, False),
        (Verdict.FAIL, Verdict.PASS, False, True),
        (Verdict.FAIL, Verdict.FAIL, False, False),
        (Verdict.CRASH, Verdict.PASS, False, False),
        (Verdict.HANG, Verdict.PASS, True, True),
    ],
)
def test_what_counts_as_found(
    wrong: Verdict, correct: Verdict, counts_ends: bool, failed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure that the engine has without the defect is not the defect's; a crash may be the machine's."""
    forks = Forks("torch-fsdp2", "torch-ddp", 1.0, counts_ends=counts_ends)
    answers = {"torch-fsdp2": _outcome(wrong), "torch-ddp": _outcome(correct)}
    monkeypatch.setattr(forks.wrong, "run", lambda scenario: answers["torch-fsdp2"])
    monkeypatch.setattr(forks.correct, "run", lambda scenario: answers["torch-ddp"])

    assert forks.run(Scenario()).failed is failed
    assert bool(forks.own) is (wrong is correct is Verdict.FAIL)


def test_what_fails_without_a_defect_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is what the failures of the correct engine take, with what that says it avoids, and a file keeps it."""

    def run(fork: Fork, scenario: Scenario) -> Outcome:
        return _outcome(Verdict.FAIL if "buffers: counter" in scenario.features else Verdict.PASS)

    monkeypatch.setattr(Fork, "run", run)
    known = explore_power.known_of("reference", 20, 1.0)
    file = tmp_path / "answers.jsonl"
    file.write_text(json.dumps({"correct": "reference", "known": [sorted(features) for features in known]}) + "\n")

    assert frozenset({"buffers: counter"}) in known
    assert explore_power.read_known(file) == {"reference": known}
    assert explore_power.read(file, 60) == {}


def test_a_fork_that_dies_or_takes_too_long() -> None:
    """Its caller learns how it ended, and goes on."""
    assert explore_power.in_fork(lambda: {"a": 1}, 30.0) == ({"a": 1}, "")
    assert explore_power.in_fork(lambda: os._exit(7), 30.0) == (None, "ended with 7")
    assert explore_power.in_fork(lambda: {"a": os.read(os.pipe()[0], 1)}, 0.05) == (None, "hung")


def test_what_a_file_has_is_not_tried_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unless it was missed with a smaller budget, or gave no answer; the figures are of what counts."""
    names = [mutant.name for mutant in explore_power.hidden() if not explore_reach.out_of_reach(mutant)]
    lines = [
        {"mutant": names[0], "found": True, "ran": 3, "how": "", "budget": 10},
        {"mutant": names[1], "found": False, "ran": 10, "how": "", "budget": 10},
        {"mutant": names[2], "found": False, "ran": 60, "how": "", "budget": 60},
        {"mutant": names[3], "found": False, "ran": 0, "how": "AdapterError: no", "budget": 60},
    ]
    file = tmp_path / "answers.jsonl"
    file.write_text("".join(json.dumps({**line, "features": [], "own": []}) + "\n" for line in lines))

    assert set(explore_power.read(file, 60)) == {names[0], names[2]}
    assert set(explore_power.read(file, 10)) == {names[0], names[1], names[2]}
    assert explore_power.main(["--output", str(file), "--only-read"]) == 0
    output = capsys.readouterr().out
    assert "1 of the 2 that were tried were found" in output
    assert f"missed: {names[2]} (" in output
    assert "out of reach: " in output


def test_figures_by_class() -> None:
    """Every hidden engine is in one column of its class."""
    mutants = [
        MUTANTS[name]
        for name in ("averaged-twice", "bias-not-reduced", "shards-rotated", "one-layer-norm-not-averaged")
    ]
    answers = {
        "averaged-twice": _answer("averaged-twice"),
        "bias-not-reduced": _answer("bias-not-reduced", found=False),
    }
    text = explore_power.figures(answers, mutants)

    (row,) = (line.split() for line in text.splitlines() if line.startswith("gradients"))
    assert row[1:] == ["1", "1", "1", "1"]
    assert "4 known-wrong engines are hidden, 3 of them within reach" in text
