"""The reference that rounds as a precision policy says, and the comparison with it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.functional import hardtanh, mse_loss

from fsdp_conformance.checks.rounding import rounds_alike
from fsdp_conformance.errors import NotExact, SuiteError
from fsdp_conformance.fixtures import drawn, precision
from fsdp_conformance.fixtures.drawn import DrawnBlock, DrawnModel
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.plan import Plan
from fsdp_conformance.references.reference_set import Kind
from fsdp_conformance.references.rounding import (
    Rounding,
    rounding_histories,
    rounding_mistakes,
    rounding_reference,
)
from fsdp_conformance.workload.definition import BatchKey, Regime

WORKLOAD = precision.scaled()
PLAN = Plan(units=WORKLOAD.units, param_dtype="bfloat16")


def trained(plan: Plan = PLAN, regime: Regime | None = None, world_size: int = 2) -> TrainingHistory:
    return rounding_reference(WORKLOAD, regime or Regime(steps=2), plan, rank=0, world_size=world_size)


def test_first_loss_by_hand() -> None:
    """Parameters and floating inputs are rounded once, tokens and factors are not."""
    model = WORKLOAD.build(0)
    batch = WORKLOAD.batch(BatchKey(step=0, world_size=2))
    factors = [block.factors for block in model.blocks]  # type: ignore[union-attr]
    model.bfloat16()
    x, tokens, gain = batch.args
    x, gain = x.bfloat16() + model.embedding(tokens), gain.bfloat16()  # type: ignore[operator]
    for block, table in zip(model.blocks, factors, strict=True):  # type: ignore[arg-type]
        x = (hardtanh(block.linear(x)) * table.float() * gain).bfloat16()
    expected = mse_loss(model.head(x), batch.target)  # type: ignore[operator]

    assert torch.equal(expected, trained().steps[0].losses[0])
    assert not torch.equal(expected, trained(replace(PLAN, param_dtype=None)).steps[0].losses[0])


@pytest.mark.parametrize(
    "change",
    [
        {"param_dtype": None},
        {"reduce_dtype": "float32"},
        {"buffer_dtype": "bfloat16"},
        {"unit_dtypes": (("blocks.0", "float16"), ("blocks.1", "bfloat16"))},
    ],
    ids=["parameters", "reduction", "buffers", "units"],
)
def test_each_part_of_a_policy_is_seen(change: dict[str, object]) -> None:
    """An engine that omits one part of the policy differs in a gradient."""
    result = rounds_alike(trained(replace(PLAN, **change)), trained(), requirement="R084", kinds=[Kind.GRADIENT])  # type: ignore[arg-type]

    assert result.findings
    assert "the reference rounds where the plan says" in result.findings[0].message


@pytest.mark.parametrize(
    ("cause", "wrong", "accumulates_low"),
    [
        ("accumulated in bfloat16", {}, True),
        ("reduced in bfloat16", {"reduce_dtype": None}, True),
        ("computed in float32", {"param_dtype": None, "unit_dtypes": ()}, False),
    ],
)
def test_the_rounding_that_is_missing_is_named(cause: str, wrong: dict[str, Any], accumulates_low: bool) -> None:
    """An engine with one mistake gets its cause; one that differs otherwise gets none."""
    plan, regime = replace(PLAN, reduce_dtype="float32"), Regime(steps=2, micro_batches=3, reduced=(False, False, True))
    expected = trained(plan, regime)
    mistakes = partial(rounding_mistakes, WORKLOAD, regime, plan, rank=0, world_size=2)
    options: dict[str, Any] = {"requirement": "R086", "kinds": [Kind.GRADIENT, Kind.PARAMETER], "mistakes": mistakes}
    run, *_ = Rounding(
        WORKLOAD, regime, replace(plan, **wrong), accumulates_low=accumulates_low, ranks=range(2), world_size=2
    ).train()

    findings = rounds_alike(run, expected, **options).findings
    run.steps[1].params[next(iter(run.steps[1].params))].add_(1)
    others = rounds_alike(run, expected, **options).findings

    assert {str(finding.likely).partition(":")[0] for finding in findings} == {cause}
    assert {finding.likely for finding in others} == {None}


def test_equal_histories_pass() -> None:
    """A run that rounds alike has no finding, and every tensor was compared."""
    result = rounds_alike(trained(), trained(), requirement="R084", kinds=[Kind.GRADIENT, Kind.PARAMETER, Kind.LOSS])

    assert not result.findings
    num_parameters = len(list(WORKLOAD.build(0).parameters()))
    assert result.count.comparisons == 2 * (2 * num_parameters + 1)


def test_no_gradient_and_one_of_zeros_are_alike_only_on_request() -> None:
    """Another value instead of none is never."""
    zeros, none, other = trained(), trained(), trained()
    name = next(iter(zeros.steps[0].grads or {}))
    for run, value in ((zeros, 0.0), (other, 1.0)):
        assert run.steps[0].grads is not None
        run.steps[0].grads[name] = torch.full_like(run.steps[0].params[name], value)
    assert none.steps[0].grads is not None
    none.steps[0].grads[name] = None

    def alike(got: TrainingHistory, expected: TrainingHistory, *, none_or_zero: bool) -> bool:
        kinds = [Kind.GRADIENT]
        return not rounds_alike(got, expected, requirement="R003", kinds=kinds, none_or_zero=none_or_zero).findings

    for got, expected in ((zeros, none), (none, zeros)):
        assert alike(got, expected, none_or_zero=True)
        assert not alike(got, expected, none_or_zero=False)
    assert not alike(other, none, none_or_zero=True)
    assert not alike(none, other, none_or_zero=True)


def test_full_precision_in_eval() -> None:
    """On request outputs in eval mode are not rounded, and training is what it is without evaluation."""
    regime = Regime(steps=2, eval_before=(1,))
    full = trained(replace(PLAN, full_precision_in_eval=True), regime)

    assert full.eval_outputs[0].dtype is torch.float32
    assert trained(PLAN, regime).eval_outputs[0].dtype is torch.bfloat16
    assert not rounds_alike(full, trained(), requirement="R089", kinds=[Kind.PARAMETER]).findings
    assert rounds_alike(full, trained(PLAN, regime), requirement="R089", kinds=[Kind.EVAL]).findings


def test_a_gradient_in_another_dtype_is_seen() -> None:
    """The optimizer relies on the dtype of gradients, although the values are the same."""
    run = trained()
    grads = run.steps[0].grads or {}
    run.steps[0].grads = {name: None if grad is None else grad.double() for name, grad in grads.items()}

    result = rounds_alike(run, trained(), requirement="R082", kinds=[Kind.GRADIENT])

    assert "torch.float64" in result.findings[0].message


def test_deferred_gradients_need_a_reduction_in_float32() -> None:
    """They are accumulated in it, so that with another dtype the rounding would not be determined."""
    regime = Regime(micro_batches=2, reduced=(False, True))
    with pytest.raises(SuiteError, match="reduce_dtype must be float32 with deferred micro-batches"):
        trained(PLAN, regime)

    assert trained(replace(PLAN, reduce_dtype="float32"), regime).steps


def test_three_ranks_whose_sum_has_one_value_in_any_order() -> None:
    """Coefficients with few bits add up without rounding, so that every engine must have the same bits."""
    workload = drawn.workload(DrawnModel(blocks=(DrawnBlock(extras=((3,),)),)))
    plan = Plan(units=workload.units, param_dtype="bfloat16", reduce_dtype="float32")
    histories = rounding_histories(workload, Regime(steps=2), plan, world_size=3)

    assert [history.rank for history in histories] == [0, 1, 2]
    assert not rounds_alike(histories[0], histories[1], requirement="R084", kinds=[Kind.PARAMETER]).findings


def test_three_ranks_whose_sum_depends_on_the_order() -> None:
    """In a dtype in which the sum rounds, the reference says what depends on the order, instead of choosing one."""
    with pytest.raises(NotExact, match="in low precision depends on the order in which ranks are added"):
        trained(PLAN, Regime(steps=2), world_size=3)

    assert trained(PLAN, Regime(steps=2), world_size=2).steps


def test_hidden_gradients_are_judged_by_the_parameters() -> None:
    """An implementation that does not expose gradients passes if its parameters round alike, and only then."""
    right, wrong = trained(), trained(replace(PLAN, reduce_dtype="float32"))
    for run in (right, wrong):
        for record in run.steps:
            record.grads = None

    results = [rounds_alike(run, trained(), requirement="R084", kinds=[Kind.GRADIENT]) for run in (right, wrong)]

    assert [bool(result.findings) for result in results] == [False, True]
    assert results[0].notes == ["gradients are not exposed: the parameters they lead to were compared"]
