"""The study of the kill matrix: which pairs it tries, and which kills it counts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from fsdp_conformance.mutants import MUTANTS
from fsdp_conformance.selftest import bound_cases
from fsdp_conformance.tests.guards import checkout
from studies import kill_matrix
from studies.kill_matrix import Pair

pytestmark = [checkout.required, pytest.mark.nightly]

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
    methods_of = {"own": {"A"}, "shared": {"A"}, "named": {"A", "B"}, "survivor": {"A", "B"}}

    assert kill_matrix.general_kills(pairs, _METHODS, methods_of) == {
        "R001/a-ws2": {"shared", "named"},
        "R001/a-ws3": set(),
        "R002/b-ws2": {"shared"},
    }


CASES = [bound for bound in bound_cases() if bound.case.id in ("R001/exact-probe-ws2", "R184/one-axis-ws2")]


def test_the_plan() -> None:
    """All that a case names, and at most so many others: in turn one with its defects, and one that many cases name."""
    probe, axis = kill_matrix.planned(CASES, 3)

    assert (probe.named, axis.named) == (CASES[0].case.kills, CASES[1].case.kills)
    assert [len(task.others) for task in (probe, axis)] == [3, 3]
    assert not set(probe.others).intersection(probe.named)
    related, popular, _ = probe.others
    assert set(CASES[0].case.requirements).intersection(MUTANTS[related].requirements)
    naming = {(kill_matrix.method(bound), name) for bound in bound_cases() for name in bound.case.kills}
    counts = Counter(name for _, name in naming)
    assert counts[popular] > counts[related]
    assert {MUTANTS[name].engine for name in axis.others} == {"reference-components"}
    assert [task.others for task in kill_matrix.planned(CASES, 0)] == [(), ()]


def test_what_was_tried_is_not_planned_again() -> None:
    """Neither as a named pair nor as another; the budget counts what was tried before."""
    first = next(kill_matrix.planned(CASES, 3))
    there = [_pair(first.case, name, killed=False) for name in (first.named[0], *first.others[:2])]
    again = next(kill_matrix.planned(CASES, 3, there))

    assert again.named == first.named[1:]
    assert again.others == first.others[2:]
    assert again.missing == kill_matrix.ENOUGH


def test_a_case_that_kills_enough_needs_no_others() -> None:
    """Mutants that other methods name, or kill."""
    case = CASES[0].case
    popular = [_pair(id_, name) for name in case.kills for id_ in (case.id, "R184/one-axis-ws2")]

    assert [(task.named, task.others) for task in kill_matrix.planned(CASES[:1], 3, popular)] == [((), ())]


def test_what_a_case_names_can_be_trusted() -> None:
    """Then only others are tried, and none where other methods name two of its mutants. What was seen counts more."""
    seen = _pair(CASES[0].case.id, CASES[0].case.kills[0], killed=False)
    pairs = kill_matrix.trusting([seen], CASES)
    probe, axis = kill_matrix.planned(CASES, 3, pairs)

    assert pairs[0] == seen
    assert [pair.mutant for pair in pairs] == [*CASES[0].case.kills, *CASES[1].case.kills]
    assert (probe.named, axis.named) == ((), ())
    assert probe.others == ()
    assert len(axis.others) == 3


def test_others_are_tried_until_enough_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of them is left; every named one is tried."""
    monkeypatch.setattr(
        kill_matrix, "tried", lambda case, mutant: _pair(case, mutant, killed=mutant.startswith("killed"))
    )
    others = ("alive", "killed-2", "killed-3", "killed-4")
    alone = kill_matrix.Task("R001/a-ws2", ("killed-0", "killed-1"), others, 2)
    shared = kill_matrix.Task("R001/a-ws2", ("killed-0", "alive-1"), others, 2, frozenset({"killed-0", "alive-1"}))

    assert [pair.mutant for pair in alone.pairs()] == ["killed-0", "killed-1", "alive", "killed-2", "killed-3"]
    assert [pair.mutant for pair in shared.pairs()] == ["killed-0", "alive-1", "alive", "killed-2"]


def test_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Survivors of cases that name them, and cases that kill too few, make the status 1."""
    file = tmp_path / "pairs.jsonl"
    file.write_text(
        '{"case": "R001/exact-probe-ws2", "mutant": "sum-instead-of-mean", "verdict": "PASS", "killed": false,'
        ' "text": "not seen"}\n'
        '{"case": "R001/gone-ws2", "mutant": "sum-instead-of-mean", "verdict": "PASS", "killed": false, "text": ""}\n'
    )

    assert kill_matrix.main(["--output", str(file), "--only-read"]) == 1
    output = capsys.readouterr().out
    assert "SURVIVED not seen" in output
    assert "R001/exact-probe-ws2 kills none" in output
    assert "1 pairs, 0 kills, 1 survivors" in output


@pytest.mark.slow
def test_a_pair_is_run_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Pairs that the file has are not run again."""
    file = tmp_path / "pairs.jsonl"
    words = ["--output", str(file), "--case", "R006/*"]
    kill_matrix.main(words)
    first = file.read_text()
    kill_matrix.main(words)

    assert all(pair.killed for pair in kill_matrix.read(file))
    assert len(kill_matrix.read(file)) >= 2
    assert file.read_text() == first
