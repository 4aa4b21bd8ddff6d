"""The least that a passing case has compared."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_conformance.contract.minimum import FILE, Minimum, least, minimum_of, text_of
from fsdp_conformance.contract.profile import load_profile
from fsdp_conformance.outcome.records import CheckCount
from fsdp_conformance.tests.guards import checkout
from fsdp_conformance.tests.report.evidence import a_record, a_report
from fsdp_conformance.verdict import Verdict

CASE = "R001/probe-ws2"
ONE = CheckCount(comparisons=1, elements=1)
NOTHING = CheckCount(comparisons=1, elements=0)


@checkout.required
def test_every_case_that_the_reference_engine_passes_has_figures() -> None:
    """New cases get theirs by python -m fsdp_conformance.contract.minimum RUN... > .../contract/minimum.json."""
    tallies = [Path(checkout.ROOT, f"ci/verdicts/{name}.json") for name in ("reference", "reference-components")]
    verdicts = {
        case: words.partition(" ")[0]
        for path in tallies
        for case, words in json.loads(path.read_text(encoding="utf-8"))["cases"].items()
    }
    passed = [entry for entry in load_profile("full").entries if verdicts.get(entry.id) == Verdict.PASS]
    without = [entry.id for entry in passed if minimum_of(entry.case()) is None]

    assert len(passed) > 500
    assert without == []


def test_another_case_with_the_id_of_one_of_the_suites_has_no_figures() -> None:
    """A project's own cases make their own checks."""
    case = load_profile("full").by_id["R001/exact-probe-ws2"].case()

    assert minimum_of(case) is not None
    assert minimum_of(replace(case, title="Something else.")) is None


def test_no_figures_are_of_a_case_that_is_gone() -> None:
    """Nor of one without any check, but for those whose checks all depend on the engine."""
    content = json.loads(FILE.read_text(encoding="utf-8"))
    cases = [case for group in content["groups"] for case in group["cases"]]

    assert set(cases) <= load_profile("full").by_id.keys()
    assert len(set(cases)) == len(cases)


def test_figures_are_the_least_of_all_runs_that_pass() -> None:
    """A check that one engine does not make is none of the case; a failure and a check of nothing do not count."""
    first = a_record(CASE, evidence=[a_report(rank, checks={"a": ONE, "b": ONE, "c": NOTHING}) for rank in (0, 1)])
    second = a_record(CASE, evidence=[a_report(0, checks={"a": ONE}), a_report(1, checks={"d": ONE})])
    failed = a_record(CASE, Verdict.FAIL)

    assert least([[first]]) == {CASE: Minimum(device="cpu", checks={"a": 2, "b": 2})}
    assert least([[first], [second], [failed]]) == {CASE: Minimum(device="cpu", checks={"a": 1})}


def test_figures_of_one_case_are_of_one_device() -> None:
    """An accelerator has other checks."""
    with pytest.raises(ValueError, match="must have run on one type of device, got cpu and sim"):
        least([[a_record(CASE)], [a_record(CASE, device="sim")]])


def test_checks_of_some_engines_are_left_out() -> None:
    """Gradients may be hidden; a row of the pair profile is another training for each engine."""
    checks = {"gradient parity": ONE, "loss parity": ONE, "held between steps": ONE}
    row = "R000/pairs-row1-ws1"
    records = [a_record(case, evidence=[a_report(0, checks=checks)]) for case in (CASE, row)]
    found = least([records])

    assert found[CASE].checks == {"loss parity": 1, "held between steps": 1}
    assert found[row].checks == {"loss parity": 1}


def test_the_file_has_each_set_of_checks_once() -> None:
    """A line for each, with its cases."""
    made = Minimum(device="cpu", checks={"a": 2, "b": 1})
    text = text_of({"R002/x-ws2": made, "R001/x-ws2": made})

    assert json.loads(text) == {
        "names": ["a", "b"],
        "groups": [{"device": "cpu", "checks": [[0, 2], [1, 1]], "cases": ["R001/x-ws2", "R002/x-ws2"]}],
    }
