"""The trials that the selftest plans, and how it judges their results."""

from __future__ import annotations

import importlib
from collections import Counter
from dataclasses import replace
from fnmatch import fnmatchcase

import pytest

from fsdp_conformance.mutants import MUTANTS
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.selftest import bound_cases, correct, run_case, trials
from fsdp_conformance.selftest.plain import USUAL, difference, plain_loss
from fsdp_conformance.selftest.trials import Kind, Trial
from fsdp_conformance.tests.guards import checkout
from fsdp_conformance.tests.torch_versions import with_fsdp2_on_the_cpu


def _module(name: str) -> str:
    return MUTANTS[name].spec.partition(":")[0].rpartition(".")[2]


def test_the_whole_plan() -> None:
    """Every case meets every known-wrong engine that it names, on this machine or not."""
    plan = trials.plan(quick=False)
    kills = Counter((trial.engine, trial.case) for trial in plan.trials if trial.kind is Kind.KILL)
    here = {name for name, _ in kills}

    assert set(kills) <= {(name, bound.case.id) for bound in bound_cases() for name in bound.case.kills}
    assert here | set(plan.not_here) == set(MUTANTS)
    assert set(kills.values()) == {1}
    assert {trial.engine for trial in plan.trials if trial.kind is Kind.RIGHT} == set(correct.CORRECT)


def test_the_quick_plan() -> None:
    """One known-wrong engine of each class, with one case and its losses, and all correct engines."""
    plan = trials.plan(quick=True)
    kills = [trial for trial in plan.trials if trial.kind is Kind.KILL]
    losses = [trial.engine for trial in plan.trials if trial.kind is Kind.LOSS]

    assert Counter(trial.group for trial in kills) == Counter({_module(name): 1 for name in MUTANTS})
    assert set(plan.groups) == {trial.group for trial in kills}
    assert set(losses) <= {trial.engine for trial in kills}
    assert {trial.engine for trial in plan.trials if trial.kind is Kind.RIGHT} >= set(correct.BUNDLED)


@checkout.required
def test_upstream_defects_are_the_known_findings() -> None:
    """A case is left out for a correct engine only where ci/known-findings.toml says why it fails."""
    known_findings = importlib.import_module("known_findings")
    upstream = {finding.case for finding in known_findings.known_findings() if finding.implementation == "torch-fsdp2"}
    patterns = correct.DEFECTS_OF_FSDP2
    left_out = {bound.case.id for bound in bound_cases() if correct.has_upstream_defect("torch-fsdp2", bound.case.id)}

    assert upstream <= left_out
    assert all(any(fnmatchcase(case, pattern) for case in upstream) for pattern in patterns)
    assert not any(correct.has_upstream_defect("reference", case) for case in left_out)


def test_a_case_that_torch_fails_kills_a_mutant_of_another_engine() -> None:
    """It fails on every mutant of FSDP2, whatever the mutant does: such a kill shows nothing."""
    for bound in bound_cases():
        if bound.case.kills and correct.has_upstream_defect("torch-fsdp2", bound.case.id):
            engines = {MUTANTS[name].engine for name in bound.case.kills}
            assert engines - {"torch-fsdp2"}, bound.case.id


_TRIAL = Trial(kind=Kind.KILL, group="gradients", engine="sum-instead-of-mean", case="R001/exact-probe-ws2")


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("trial", "good", "text"),
    [
        (_TRIAL, True, "R003 (gradient parity)"),
        (
            replace(_TRIAL, engine="ignores-offload"),
            False,
            "ignores-offload on R001/exact-probe-ws2: expected",
        ),
        (replace(_TRIAL, kind=Kind.RIGHT, group="reference", engine="reference"), True, ""),
        (replace(_TRIAL, kind=Kind.LOSS, engine="ddp-keeps-last-bucket", case=""), True, "losses differ by"),
        (replace(_TRIAL, kind=Kind.LOSS, engine="keeps-unused-unsharded", case=""), False, "losses differ by"),
    ],
    ids=["killed", "survived", "correct", "seen in the losses", "not seen in the losses"],
)
def test_a_trial(trial: Trial, good: bool, text: str) -> None:
    """The result says what was found."""
    result = trials.run(trial)

    assert (result.good, result.failed) == (good, False), result.text
    assert result.text.startswith(text)


@pytest.mark.nightly
@with_fsdp2_on_the_cpu
def test_a_correct_engine_that_a_case_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named, with the finding."""
    monkeypatch.setitem(correct.CORRECT, "fsdp2", MUTANTS["sum-instead-of-mean"].spec)
    result = trials.run(replace(_TRIAL, kind=Kind.RIGHT, group="fsdp2", engine="fsdp2"))

    assert not result.good
    assert result.text.startswith("fsdp2 on R001/exact-probe-ws2: FAIL: R003 (gradient parity)")


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch-fsdp2", "reference"])
def test_losses_of_a_correct_engine(engine: str) -> None:
    """They are the unwrapped model's, much closer than the usual bound."""
    deviation = difference(run_case(plain_loss(), engine, base=RunSettings()))

    assert deviation is not None
    assert deviation < USUAL / 1000
