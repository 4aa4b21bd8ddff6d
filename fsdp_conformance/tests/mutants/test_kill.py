"""Tests for the definition of a kill: a finding shows the defect, and nothing else makes the case fail."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_conformance.mutants import MUTANTS, kill
from fsdp_conformance.mutants.mutant import Mutant, Symptom
from fsdp_conformance.outcome.records import CaseRecord, Finding
from fsdp_conformance.selftest import bound_case, run_case
from fsdp_conformance.tests.mutants import blind_cases
from fsdp_conformance.verdict import Verdict


def _mutant(*requirements: str, **fields: Any) -> Mutant:
    return Mutant(
        name="wrong",
        spec="package.wrong:Wrong",
        engine="torch-fsdp2",
        requirements=requirements or ("R003",),
        defect="It is wrong.",
        **fields,
    )


def _record(*findings: Finding, verdict: Verdict = Verdict.FAIL) -> CaseRecord:
    """Of a case that is named after R092, and binds R002 and R003 as well."""
    return CaseRecord(
        case="R092/some-ws2",
        requirements=["R092", "R002", "R003"],
        chapter="J",
        verdict=verdict,
        findings=list(findings),
    )


def _finding(requirement: str, check: str = "gradient parity", message: str = "gradient: expected 1, got 2") -> Finding:
    return Finding(requirement=requirement, check=check, message=message)


@pytest.mark.parametrize("requirement", ["R003", "R092"])
def test_a_comparison_kills(requirement: str) -> None:
    """It kills for the requirement that names the defect, and for the one that the case is named after."""
    finding = _finding(requirement)

    assert kill.reason(_record(finding), _mutant()) == finding


@pytest.mark.parametrize(
    ("mutant", "requirement"),
    [(_mutant(), "R002"), (_mutant("R001"), "R001"), (_mutant("R001"), "R003")],
    ids=["bound, but another defect's", "the defect's, but not bound", "neither"],
)
def test_another_requirement_does_not(mutant: Mutant, requirement: str) -> None:
    """A finding must be about the defect, and of this case."""
    assert kill.reason(_record(_finding(requirement)), mutant) is None


@pytest.mark.parametrize("verdict", [Verdict.PASS, Verdict.UNSUPPORTED, Verdict.ERROR_SUITE])
def test_no_finding_does_not(verdict: Verdict) -> None:
    """Whatever the verdict."""
    record = _record(verdict=verdict)

    assert kill.reason(record, _mutant()) is None
    assert kill.survival(record, _mutant()).endswith(f"got {verdict}")


RAISED = "rank 1 raised RuntimeError: size of tensor a (7) must match"


@pytest.mark.parametrize(
    ("check", "verdict", "message", "shows"),
    [
        ("training", Verdict.FAIL, RAISED, {"shows": (Symptom.RAISED,), "raises": "RuntimeError"}),
        ("deadline", Verdict.HANG, "rank 1 did not report in time", {"shows": (Symptom.HANG,)}),
        ("process end", Verdict.CRASH, "rank 0 was killed by SIGABRT", {"shows": (Symptom.CRASH,)}),
        ("stream safety", Verdict.FAIL, "reuse of memory in flight", {"shows": (Symptom.HAZARD,)}),
        ("refusal", Verdict.FAIL, "a container: expected an exception, got none", {"shows": (Symptom.REFUSAL,)}),
    ],
)
def test_other_symptoms_must_be_declared(check: str, verdict: Verdict, message: str, shows: dict[str, Any]) -> None:
    """An exception, a hang, a crash, a hazard or a missing refusal kills only mutants whose defect it is."""
    finding = _finding("R003", check, message)
    record = _record(finding, verdict=verdict)

    assert kill.reason(record, _mutant(**shows)) == finding
    assert kill.reason(record, _mutant()) is None
    assert message in kill.survival(record, _mutant())


def test_another_exception_does_not() -> None:
    """A mutant that raises names the class: any other exception may come from anywhere."""
    mutant = _mutant(shows=(Symptom.FINDING, Symptom.RAISED), raises="MeshError")

    assert kill.reason(_record(_finding("R003", "training", RAISED)), mutant) is None


def test_a_wrongful_refusal_does_not() -> None:
    """An engine that refuses everything would be killed by every case."""
    every = _mutant(shows=tuple(symptom for symptom in Symptom if symptom is not Symptom.RAISED))
    refused = _finding("R003", "wrongful refusal", "refused although zero3 is declared")

    assert kill.reason(_record(refused), every) is None


def test_an_exception_beside_a_comparison_does_no_harm() -> None:
    """Comparisons made before a rank raised still count."""
    finding = _finding("R003")

    assert kill.reason(_record(_finding("R092", "training", RAISED), finding), _mutant()) == finding


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "mutant", "verdict"),
    [
        ("R001/exact-probe-ws2", "sum-instead-of-mean", Verdict.PASS),
        ("R178/release-guarded-ws2", "releases-in-use", Verdict.FAIL),
    ],
    ids=["nothing found", "killed by an exception"],
)
def test_a_case_without_checks_kills_nothing(case: str, mutant: str, verdict: Verdict) -> None:
    """Once its comparisons hold whatever they see, a case kills no more, even if the engine still raises."""
    registered = MUTANTS[mutant]
    blind = run_case(blind_cases.blinded(case), registered.spec)

    assert kill.reason(run_case(bound_case(case), registered.spec), registered) is not None
    assert blind.verdict is verdict, blind.reason
    assert kill.reason(blind, registered) is None, kill.survival(blind, registered)
