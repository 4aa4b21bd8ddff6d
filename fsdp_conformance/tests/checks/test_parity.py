"""Parity reports the first divergence of a history that differs, and nothing for correct histories."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from expecttest import TestCase

from fsdp_conformance.checks import parity
from fsdp_conformance.checks.result import CheckResult
from fsdp_conformance.errors import NothingCompared, SuiteError
from fsdp_conformance.fixtures import buffers, models, probes, structures, workload_by_name, workload_names
from fsdp_conformance.fixtures.transformer import transformer_batch_norm
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.outcome.records import Finding, RankReport
from fsdp_conformance.references.reference_set import Kind, References
from fsdp_conformance.tests.references.reference_runs import damaged, gradient, implementation_run, references_of
from fsdp_conformance.workload.definition import Batch, BatchKey, Regime
from fsdp_conformance.workload.events import Action, Event, Moment

Damage = Callable[[TrainingHistory], None]


def _findings(history: TrainingHistory, references: References, **options: bool) -> list[Finding]:
    results = parity.parity(history, references, **options)  # type: ignore[arg-type]
    return sorted((finding for result in results for finding in result.findings), key=lambda finding: finding.step or 0)


def _as_text(finding: Finding) -> str:
    """The fields that a person reads."""
    lines = [f"{finding.requirement} ({finding.check}): {finding.message}", finding.where()]
    for name in ("got", "expected", "ratio", "ulps", "bound", "differing", "elements", "call", "likely"):
        value = getattr(finding, name)
        if value is not None:
            lines.append(f"{name}: {value:g}" if isinstance(value, float) else f"{name}: {value}")
    # expecttest writes ASCII only.
    return "\n".join(line if len(line) <= 110 else line.replace(", or ", ",\n    or ", 1) for line in lines).replace(
        "·", "|"
    )


# One trains in the dtypes as stored, which `implementation_run` replaces by one dtype.
@pytest.mark.daily(16)
@pytest.mark.nightly_params("deferred-drawn", "transformer-batch-norm")
@pytest.mark.parametrize("name", [name for name in workload_names() if name != "mixed-storage"])
def test_correct_histories_pass(name: str) -> None:
    """A float32 run in another order of reduction is at parity with every workload, and much was compared."""
    references = references_of(workload_by_name(name))

    results = parity.parity(implementation_run(references), references)

    assert [finding.sentence() for result in results for finding in result.findings] == []
    assert [result.inconclusive for result in results if result.inconclusive] == []
    assert all(result.count.comparisons > 0 for result in results)
    assert sum(result.count.elements for result in results) > 5


@pytest.mark.daily(2)
@pytest.mark.nightly_params("transformer")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["norm-mlp", "transformer", "batch-norm", "tiny", "uneven"])
def test_correct_histories_pass_under_adam(name: str) -> None:
    """So do ten steps of Adam, where a gradient that is zero but for rounding moves its parameter at random."""
    references = references_of(workload_by_name(name), Regime(optimizer="adam", steps=10))

    results = parity.parity(implementation_run(references), references)

    assert [finding.sentence() for result in results for finding in result.findings] == []
    assert [result.inconclusive for result in results if result.inconclusive] == []


def _scale_gradients(factor: float) -> Damage:
    def damage(history: TrainingHistory) -> None:
        for record in history.steps:
            for grad in (record.grads or {}).values():
                if grad is not None:
                    grad.mul_(factor)

    return damage


def _one_element(history: TrainingHistory) -> None:
    gradient(history, 1, "stages.1.linear.weight")[2, 3] += 0.0625


def _bias_of_a_norm(history: TrainingHistory) -> None:
    gradient(history, 2, "blocks.1.norm.bias").mul_(1 + 2e-3)


def _late_parameter(history: TrainingHistory) -> None:
    history.steps[2].params["head.bias"][0] += 0.25


def _missing_name(history: TrainingHistory) -> None:
    for record in history.steps:
        del record.params["head.bias"]


def _added_name(history: TrainingHistory) -> None:
    history.steps[0].params["_fsdp_wrapped_module.head.bias"] = torch.zeros(3)


def _shard(history: TrainingHistory) -> None:
    history.steps[0].params["head.weight"] = history.steps[0].params["head.weight"][:1]


def _half(history: TrainingHistory) -> None:
    history.steps[0].params["head.weight"] = history.steps[0].params["head.weight"].half()


def _none(history: TrainingHistory) -> None:
    grads = history.steps[0].grads
    assert grads is not None
    grads["head.bias"] = None


def _nan(history: TrainingHistory) -> None:
    gradient(history, 0, "head.weight")[2, 6] = float("nan")


def _loss(history: TrainingHistory) -> None:
    history.steps[1].losses[0].add_(0.5)


def _initial(history: TrainingHistory) -> None:
    history.initial_params["head.bias"].zero_()


@pytest.mark.parametrize(
    ("damage", "check", "step", "fqn"),
    [
        (_scale_gradients(4.0), "gradient parity", 0, "stages.0.linear.weight"),
        (_one_element, "gradient parity", 1, "stages.1.linear.weight"),
        (_late_parameter, "parameter parity", 2, "head.bias"),
        (_missing_name, "parameter parity", 0, "head.bias"),
        (_added_name, "parameter parity", 0, "_fsdp_wrapped_module.head.bias"),
        (_shard, "parameter parity", 0, "head.weight"),
        (_half, "parameter parity", 0, "head.weight"),
        (_none, "gradient parity", 0, "head.bias"),
        (_nan, "gradient parity", 0, "head.weight"),
        (_loss, "loss parity", 1, "micro-batch 0"),
        (_initial, "initial parity", None, "head.bias"),
    ],
)
def test_damage_is_found(damage: Damage, check: str, step: int | None, fqn: str) -> None:
    """The first finding names the oracle, the step and the tensor that were damaged."""
    references = references_of(probes.exact_long())
    history = damaged(implementation_run(references))

    damage(history)

    first = _findings(history, references)[0]
    assert (first.check, first.step, first.fqn, first.rank) == (check, step, fqn, 1)


@pytest.mark.slow
def test_a_small_difference_of_one_norm_is_found() -> None:
    """Two thousandths in the gradient of one LayerNorm bias are beyond the calibrated bound, and nothing else is."""
    references = references_of(models.norm_mlp(), Regime(optimizer="adam"))
    history = damaged(implementation_run(references))

    _bias_of_a_norm(history)

    assert [(f.check, f.step, f.fqn) for f in _findings(history, references)] == [
        ("gradient parity", 2, "blocks.1.norm.bias")
    ]


def test_later_steps_are_counted_and_not_told() -> None:
    """Each kind reports the first step at which it diverges; the comparisons of later ones still count."""
    references = references_of(probes.exact_long())
    history = damaged(implementation_run(references))
    whole = parity.kind_parity(Kind.GRADIENT, history, references).count.comparisons

    _scale_gradients(2.0)(history)

    result = parity.kind_parity(Kind.GRADIENT, history, references)
    assert {finding.step for finding in result.findings} == {0}
    assert result.count.comparisons == whole


def test_many_tensors_are_summed_up() -> None:
    """More than eight findings of a kind become a note."""
    references = references_of(models.norm_mlp())
    history = damaged(implementation_run(references))

    _scale_gradients(4.0)(history)

    result = parity.kind_parity(Kind.GRADIENT, history, references)
    assert len(result.findings) == parity.MAX_FINDINGS
    assert result.notes == ["15 more gradients differ at step 0 on rank 1"]


def test_a_parameter_that_follows_a_gradient_says_so() -> None:
    """The parameter's difference is not explained a second time."""
    references = references_of(probes.exact_long())
    history = damaged(implementation_run(references))

    _one_element(history)
    history.steps[1].params["stages.1.linear.weight"][2, 3] += 0.5

    causes = {finding.check: finding.likely for finding in _findings(history, references)}
    assert causes["parameter parity"] == "a consequence of the wrong gradient in step 1"


def test_a_difference_is_told_when_its_cause_cannot_be_worked_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the search for a cause is reported in the finding, as a bug in the suite."""

    def broken(evidence: object) -> None:
        raise KeyError("no such signature")

    references = references_of(models.norm_mlp())
    history = damaged(implementation_run(references))
    history.steps[0].losses[0] += 1
    monkeypatch.setattr("fsdp_conformance.diagnosis.causes.likely", broken)
    findings = _findings(history, references)

    assert [finding.check for finding in findings] == ["loss parity"]
    assert findings[0].likely == "unknown: a bug in the suite, please report it: KeyError: 'no such signature'"


def test_zero_may_stand_for_none() -> None:
    """With `none_or_zero` a gradient of zeros is taken for none, and the other way round; otherwise it is a finding."""
    references = references_of(probes.exact_unused(), Regime(unused_parameters=True))
    history = damaged(implementation_run(references))

    for record in history.steps:
        assert record.grads is not None
        record.grads["spare_scale"] = torch.zeros(7)

    assert _findings(history, references, none_or_zero=True) == []
    assert [finding.fqn for finding in _findings(history, references)] == ["spare_scale"]


def test_a_gradient_that_is_not_zero_never_stands_for_none() -> None:
    """Garbage is found with `none_or_zero`, too."""
    references = references_of(probes.exact_unused(), Regime(unused_parameters=True))
    history = damaged(implementation_run(references))

    assert history.steps[1].grads is not None
    history.steps[1].grads["spare_scale"] = torch.ones(7)

    assert [(f.fqn, f.step) for f in _findings(history, references, none_or_zero=True)] == [("spare_scale", 1)]


def test_buffers_are_compared_per_rank() -> None:
    """An integer buffer that is off by one, and running statistics of another rank, are found."""
    references = references_of(buffers.batch_norm())
    history = damaged(implementation_run(references))

    history.steps[0].buffers["blocks.0.samples_seen"][2] += 1
    history.steps[0].buffers["blocks.1.norm.running_mean"].mul_(1.01)

    assert [finding.fqn for finding in parity.kind_parity(Kind.BUFFER, history, references).findings] == [
        "blocks.0.samples_seen",
        "blocks.1.norm.running_mean",
    ]


def test_norms_and_clipped_gradients() -> None:
    """A norm that counts something twice is found; so is a clipped gradient."""
    references = references_of(models.nested(), Regime(max_norm=0.05))
    history = damaged(implementation_run(references))
    assert _findings(history, references) == []

    norm = history.steps[0].grad_norm
    assert norm is not None
    norm.mul_(2**0.5)
    assert history.steps[1].clipped_grads is not None
    history.steps[1].clipped_grads["module.2.bias"] = None

    places = [(finding.check, finding.step, finding.fqn) for finding in _findings(history, references)]
    assert places == [("norm parity", 0, "total norm"), ("clipped gradient parity", 1, "module.2.bias")]


def test_outputs_are_compared_with_their_structure() -> None:
    """A dataclass that became a dict, a tuple that became a list, and a wrong value are reported with their path."""
    references = references_of(structures.structured(), Regime(keep_outputs=True))
    history = damaged(implementation_run(references))
    assert _findings(history, references) == []

    output = history.steps[0].outputs[0]
    output["encoded"].pair = list(output["encoded"].pair)
    output["none"] = 0
    output["packed"].data[0, 0] += 1

    messages = {
        finding.fqn: finding.message for finding in parity.kind_parity(Kind.OUTPUT, history, references).findings
    }
    assert "[0]['encoded'].pair" in messages
    assert "[0]['none']" in messages
    assert "[0]['packed'].data" in messages


def test_eval_outputs_are_compared() -> None:
    """The output of an eval forward that was computed with stale weights is found."""
    references = references_of(probes.exact_nested(), Regime(eval_before=(1, 2)))
    history = damaged(implementation_run(references))
    assert _findings(history, references) == []

    history.eval_outputs[1] = history.eval_outputs[0].clone()

    assert [(finding.check, finding.fqn) for finding in _findings(history, references)] == [("eval parity", "[1]")]


def test_state_dicts_are_compared() -> None:
    """At each event that takes one: names, dtypes and values of the unwrapped model's."""
    regime = Regime(events=tuple(Event(action=Action.TAKE_MODEL, moment=Moment.END, step=step) for step in (0, 1)))
    references = references_of(probes.exact_nested(), regime)
    history = damaged(implementation_run(references))
    assert _findings(history, references) == []

    state = history.states[1]
    state["head.bias"] = state["head.bias"] + 1
    state["head.weight"] = state["head.weight"].double()
    state["version"] = torch.ones(1)
    del state["stages.1.linear.bias"]

    found = _findings(history, references)
    assert {finding.fqn for finding in found} == {
        f"{name}, taken 1" for name in ("head.bias", "head.weight", "version", "stages.1.linear.bias")
    }
    assert {(finding.check, finding.requirement) for finding in found} == {("state dict parity", "R146")}


def test_a_parameter_in_another_dtype() -> None:
    """Its values may be the same; the engine must not convert what it stores."""
    references = references_of(probes.exact_nested(), Regime(steps=1))
    history = damaged(implementation_run(references))
    history.steps[0].params["head.bias"] = history.steps[0].params["head.bias"].double()

    (finding,) = _findings(history, references)

    assert finding.message.startswith("dtype: expected torch.float32, got torch.float64")
    assert finding.likely == "converted to float64: it should keep its dtype"


@pytest.mark.slow
def test_what_is_not_exposed_is_noted() -> None:
    """An implementation without gradients and buffers is compared by the rest, with a note in the report."""
    references = references_of(transformer_batch_norm(), Regime(optimizer="adam"))
    history = damaged(implementation_run(references))
    history.shows_buffers, history.initial_buffers = False, {}
    for record in history.steps:
        record.grads = None
        record.buffers = {}

    results = parity.parity(history, references)

    assert [result.check for result in results] == ["initial parity", "loss parity", "parameter parity"]
    assert results[0].notes == ["not exposed by the implementation, so not compared: gradient, buffer"]
    assert parity.hidden_kinds(history, references) == [Kind.GRADIENT, Kind.BUFFER]


def test_missing_buffers_are_no_hidden_ones() -> None:
    """An implementation that shows buffers, but none, has lost them."""
    references = references_of(buffers.batch_norm())
    history = damaged(implementation_run(references))
    history.initial_buffers = {}
    for record in history.steps:
        record.buffers = {}

    findings = _findings(history, references)

    assert {finding.check for finding in findings} == {"initial parity", "buffer parity"}
    assert "buffer 'input_mean' is missing" in {finding.message for finding in findings}


def test_comparing_nothing_is_an_error() -> None:
    """Gradient parity of a history without gradients does not pass."""
    references = references_of(probes.exact_long())
    history = damaged(implementation_run(references))
    for record in history.steps:
        record.grads = None
    for record in references.expected.steps:
        record.grads = None

    with pytest.raises(NothingCompared, match="comparisons: expected at least 1, got 0"):
        parity.kind_parity(Kind.GRADIENT, history, references)


def test_another_number_of_steps_is_the_suites_mistake() -> None:
    """Three steps are not compared with two."""
    references = references_of(probes.exact_long())
    history = implementation_run(references_of(probes.exact_long(), Regime(steps=2)))

    with pytest.raises(SuiteError, match="steps: expected 3 as in the references, got 2"):
        parity.kind_parity(Kind.LOSS, history, references)


def test_a_bound_that_could_hide_a_fault_is_inconclusive() -> None:
    """
    Where the references themselves are off by a ten-thousandth, a history between them is neither right nor wrong.
    """
    references = references_of(models.nested())
    history = implementation_run(references)
    for sample in references.samples:
        gradient(sample, 1, "module.2.bias").mul_(1.0001)

    result = parity.kind_parity(Kind.GRADIENT, history, references)

    assert result.findings == []
    assert result.inconclusive is not None
    assert "the bound of gradient 'module.2.bias' at step 1 is 0.0013 of the scale" in result.inconclusive
    assert "above 0.0005: a weak fault could hide in it" in result.inconclusive


@pytest.mark.parametrize(("which", "conclusive"), [(slice(1, 2), True), (slice(None), False)])
def test_one_unclear_gradient_of_an_input_leaves_the_others(which: slice, *, conclusive: bool) -> None:
    """A micro-batch whose gradient nearly vanishes is judged by its noise: the others show what the engine does."""
    workload = models.nested()

    def batch(key: BatchKey) -> Batch:
        given: Batch = workload.batch(key)
        return replace(given, args=tuple(value.requires_grad_() for value in given.args))

    references = references_of(replace(workload, batch=batch), Regime(keep_input_gradients=True))
    history = implementation_run(references)
    for sample in references.samples:
        for value in sample.input_grads[which]:
            assert value is not None
            value.add_(1e-4 * value.abs().max())

    result = parity.kind_parity(Kind.INPUT, history, references)

    assert result.findings == []
    assert (result.inconclusive is None) == conclusive
    assert any("a weak fault could hide in it" in note for note in result.notes) == conclusive


def test_requirements_can_be_replaced() -> None:
    """A case can replace the requirement of a kind of comparison."""
    references = references_of(probes.exact_long())
    history = damaged(implementation_run(references))
    _one_element(history)

    results = parity.parity(history, references, requirements={"gradient": "R122"})

    assert [finding.requirement for result in results for finding in result.findings] == ["R122"]


def test_the_order_of_findings_is_the_order_of_a_step() -> None:
    """Step before phase, the loss before the gradient that it makes, parameters after both."""
    references = references_of(probes.exact_long())
    history = damaged(implementation_run(references))
    _late_parameter(history)
    _loss(history)
    _one_element(history)

    assert [finding.check for finding in _findings(history, references)] == [
        "loss parity",
        "gradient parity",
        "parameter parity",
    ]


def test_results_go_into_a_report() -> None:
    """Findings, counts and figures of every kind arrive, and say how the comparison was made."""
    references = references_of(models.nested())
    report = RankReport(rank=1)

    results: list[CheckResult] = parity.parity(implementation_run(references), references)
    for result in results:
        result.into(report)

    assert report.findings == []
    assert report.checks["gradient parity"].elements > 1000
    figures = report.measurements["gradient parity"]
    assert figures["comparison"] == "calibrated"
    assert 0 < figures["noise"] < figures["widest bound"] < 5e-4


class Texts(TestCase):
    """The texts that a person reads."""

    def test_a_summed_gradient(self) -> None:
        """The sentence is complete without the numbers, which are separate."""
        references = references_of(probes.rank_coded())
        history = damaged(implementation_run(references))

        _scale_gradients(4.0)(history)

        self.assertExpectedInline(
            _as_text(_findings(history, references)[0]),
            """\
R003 (gradient parity): gradient: expected 3.75, got 15; 11 of 11 elements differ
step 0 | reduce | 'scale' | rank 1 | element [0]
got: 15
expected: 3.75
ratio: 4
ulps: 4.71859e+07
bound: bitwise
differing: 11
elements: 11
likely: summed over ranks instead of averaged: got / expected = 4 at every element, which is the world size""",
        )

    def test_one_rank_missing(self) -> None:
        """Rank-coded gradients say who is missing."""
        references = references_of(probes.rank_coded())
        history = damaged(implementation_run(references))
        parts = [rank[0][0]["parts.1.weight"] for rank in references.contributions()]
        gradient(history, 0, "parts.1.weight").sub_(parts[2] / 4)  # type: ignore[operator]

        self.assertExpectedInline(
            _as_text(_findings(history, references)[0]),
            """\
R003 (gradient parity): gradient: expected 3.75, got 2.75; 13 of 13 elements differ
step 0 | reduce | 'parts.1.weight' | rank 1 | element [0]
got: 2.75
expected: 3.75
ratio: 0.733333
ulps: 4.1943e+06
bound: bitwise
differing: 13
elements: 13
likely: rank 2 missing: equals the sum over ranks 0, 1, 3, divided by 4""",
        )

    def test_the_last_row(self) -> None:
        """A dropped padded row is recognised by its rows."""
        references = references_of(probes.exact_mlp())
        history = damaged(implementation_run(references))
        gradient(history, 0, "0.weight")[12] = 0

        self.assertExpectedInline(
            _as_text(_findings(history, references)[0]),
            """\
R003 (gradient parity): gradient: expected -1, got 0; 3 of 65 elements differ
step 0 | reduce | '0.weight' | rank 1 | element [12, 0]
got: 0
expected: -1
ratio: 0
ulps: 8.38861e+06
bound: bitwise
differing: 3
elements: 65
likely: last padded rows dropped,
    or rows of a shard lost: row 12 of 13 (rank 3's shard) is zero, the others are correct""",
        )

    def test_a_calibrated_bound(self) -> None:
        """A bound comes with its derivation."""
        references = references_of(models.nested())
        history = damaged(implementation_run(references))
        gradient(history, 0, "module.2.bias")[1] *= 1.25

        finding = _findings(history, references)[0]

        self.assertExpectedInline(
            _as_text(replace(finding, bound=None)),
            """\
R003 (gradient parity): gradient: expected -0.177352665, got -0.221690834; 1 of 4 elements differ
step 0 | reduce | 'module.2.bias' | rank 1 | element [1]
got: -0.221690834
expected: -0.177352665
ratio: 1.25
ulps: 2.97548e+06
differing: 1
elements: 4""",
        )
        self.assertRegex(str(finding.bound), r"^[0-9.e-]+ of the scale [0-9.e-]+ \(.*, noise [0-9.e-]+\)$")
