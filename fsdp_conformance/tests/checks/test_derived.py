"""Gradients derived from changes of parameters: exact on exact probes, within the rounding of parameters elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fsdp_conformance.checks.derived import with_derived_gradients
from fsdp_conformance.checks.parity import parity
from fsdp_conformance.fixtures import models, probes, workload_by_name, workload_names
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.outcome.records import Finding
from fsdp_conformance.references.reference_set import References
from fsdp_conformance.tests.references.reference_runs import damaged, gradient, implementation_run, references_of
from fsdp_conformance.workload.definition import Batch, Regime, Workload


def without_gradients(history: TrainingHistory) -> TrainingHistory:
    """A copy whose implementation does not expose them."""
    copied = damaged(history)
    for record in copied.steps:
        record.grads = None
    return copied


def gradient_findings(history: TrainingHistory, references: References) -> list[Finding]:
    return [
        finding
        for result in parity(history, references)
        for finding in result.findings
        if finding.check == "gradient parity"
    ]


def with_factor(workload: Workload, factor: float) -> Workload:
    """The workload with its loss, and so its gradients, multiplied."""

    def loss(output: object, batch: Batch) -> Tensor:
        return workload.loss(output, batch) * factor

    return replace(workload, loss=loss)


# One trains in the dtypes as stored, which `implementation_run` replaces by one dtype.
@pytest.mark.daily(14)
@pytest.mark.nightly_params("transformer", "transformer-batch-norm")
@pytest.mark.parametrize("name", [name for name in workload_names() if name not in ("no-parameters", "mixed-storage")])
def test_correct_histories_pass(name: str) -> None:
    """Derived gradients of a correct run are at parity with every workload."""
    references = references_of(workload_by_name(name))

    results = parity(without_gradients(implementation_run(references)), references)

    assert "gradient parity" in [result.check for result in results]
    assert [finding.sentence() for result in results for finding in result.findings] == []
    assert [result.inconclusive for result in results if result.inconclusive] == []


def test_exact_probes_are_derived_exactly() -> None:
    """Bit for bit the gradients that were there, with momentum, in every step; None for a frozen unit."""
    references = references_of(probes.exact_frozen())
    history = implementation_run(references)

    derived = with_derived_gradients(without_gradients(history), references)

    assert derived is not None
    for record, original in zip(derived[0].steps, history.steps, strict=True):
        assert record.grads is not None
        assert original.grads is not None
        assert record.grads.keys() == original.grads.keys()
        for name, grad in original.grads.items():
            got = record.grads[name]
            assert (got is None) == (grad is None), name
            assert grad is None or (got is not None and torch.equal(got, grad)), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workload", "factor"), [(probes.rank_coded(), 2.0), (probes.exact_mlp(), 0.5), (models.norm_mlp(), 1.01)]
)
def test_wrong_gradients_are_found(workload: Workload, factor: float) -> None:
    """A wrong factor is reported against R003 from the first step on, with the same values as if it had been seen."""
    references = references_of(workload)
    wrong = implementation_run(replace(references, workload=with_factor(workload, factor)))

    wrong_findings = gradient_findings(without_gradients(wrong), references)

    assert {(finding.requirement, finding.step) for finding in wrong_findings} == {("R003", 0)}
    shown = wrong_findings[0].fqn
    assert shown is not None
    if references.exact:
        assert wrong_findings[0].message == gradient_findings(wrong, references)[0].message
    assert gradient(wrong, 0, shown).abs().max() > 0


def test_a_frozen_parameter_that_moves_is_found() -> None:
    """It must have had a gradient."""
    references = references_of(probes.exact_frozen())
    history = without_gradients(implementation_run(references))
    name = "stages.0.linear.weight"
    moved = next(fqn for fqn in history.initial_params if fqn.startswith("stages.0"))
    for record in history.steps[1:]:
        record.params[moved] = record.params[moved] + 1

    (finding,) = gradient_findings(history, references)

    assert (finding.fqn, finding.step) == (moved, 1), name
    assert finding.message == f"gradient: expected None, got a tensor of {tuple(history.initial_params[moved].shape)}"


@pytest.mark.parametrize("regime", [Regime(optimizer="adam"), Regime(max_norm=0.5)])
def test_other_regimes_are_not_derivable(regime: Regime) -> None:
    """Adam divides by what it has seen, and clipping multiplies."""
    references = references_of(models.norm_mlp(), regime)

    assert with_derived_gradients(without_gradients(implementation_run(references)), references) is None


def test_dropped_gradients_are_left_out() -> None:
    """A gradient that is gone before the step cannot be derived."""
    names = ("0.weight", "0.bias")
    references = references_of(probes.exact_mlp(), Regime(gradient_to_none=names))

    derived = with_derived_gradients(without_gradients(implementation_run(references)), references)

    assert derived is not None
    for run in (derived[0], derived[1].expected):
        assert not set(names) & set(run.steps[0].grads or {})
    assert gradient_findings(without_gradients(implementation_run(references)), references) == []
