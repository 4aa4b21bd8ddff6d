"""The study of the kill matrix: which pairs it tries, and which kills it counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_conformance.mutants import MUTANTS
from fsdp_conformance.selftest import bound_cases
from fsdp_conformance.tests.guards import checkout
from studies import kill_matrix
from studies.kill_matrix import Pair

pytestmark = checkout.required

_METHODS = {"R001/a-ws2": "A", "R001/a-ws3": "A", "R002/b-ws2": "B"}


def _pair(case: str, mutant: str, *, killed: bool = True) -> Pair:
    return Pair(case, mutant, "FAIL" if killed else "PASS", killed, "the text")


def test_a_mutant_of_one_method_alone_does_not_count() -> None:
    """It is written for that method, however many of its cases kill it, unless another method kills or names it."""
    pairs = [
        _pair("R001/a-ws2", "own"),
        _pair("R001/a-ws3", "own"),
        _pair("R001/a-ws2", "shared"),
        _pair("R002/b-ws2", "shared"),
        _pair("R001/a-ws2", "named"),
        _pair("R001/a-ws2", "survivor", killed=False),
    ]
    named = {"own": {"A"}, "shared": {"A"}, "named": {"A", "B"}, "survivor": {"A", "B"}}

    assert kill_matrix.general_kills(pairs, _METHODS, named) == {
        "R001/a-ws2": {"shared", "named"},
        "R001/a-ws3": set(),
        "R002/b-ws2": {"shared"},
    }


def test_the_plan() -> None:
    """Named pairs first; the others are drawn from mutants that the case can run on, the same in every run."""
    cases = [bound for bound in bound_cases() if bound.case.id in ("R001/exact-probe-ws2", "R184/one-axis-ws2")]
    named = [(bound.case.id, name) for bound in cases for name in bound.case.kills]
    plan = list(kill_matrix.planned(cases, 3))
    parts = {name for case, name in plan if case.startswith("R184/")}

    assert plan[: len(named)] == named
    assert len(plan) == len(set(plan)) == len(named) + 3 * len(cases)
    assert plan == list(kill_matrix.planned(cases, 3))
    assert {MUTANTS[name].engine for name in parts} == {"reference-components"}


def test_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Survivors of cases that name them, and cases that kill too few, make the status 1."""
    file = tmp_path / "pairs.jsonl"
    file.write_text(
        '{"case": "R001/exact-probe-ws2", "mutant": "sum-instead-of-mean", "verdict": "PASS", "killed": false,'
        ' "text": "not seen"}\n'
    )

    assert kill_matrix.main(["--output", str(file), "--only-read"]) == 1
    said = capsys.readouterr().out
    assert "SURVIVED not seen" in said
    assert "R001/exact-probe-ws2 kills none" in said
    assert "1 pairs, 0 kills, 1 survivors" in said


@pytest.mark.slow
@pytest.mark.nightly
def test_a_pair_is_run_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the file has is not run again."""
    file = tmp_path / "pairs.jsonl"
    words = ["--output", str(file), "--case", "R006/*"]
    kill_matrix.main(words)
    first = file.read_text()
    kill_matrix.main(words)

    assert all(pair.killed for pair in kill_matrix.read(file))
    assert len(kill_matrix.read(file)) >= 2
    assert file.read_text() == first
