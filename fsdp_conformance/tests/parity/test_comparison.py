"""Mistakes of scripts and engines: each is found in its first step, with its cause and whose it is."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_conformance.parity.comparison import compare
from fsdp_conformance.parity.finding import Whose
from fsdp_conformance.parity.text import lines_of, verdict_of
from fsdp_conformance.parity.words import why_loss
from fsdp_conformance.recorder.process import recording
from fsdp_conformance.recordings import files
from fsdp_conformance.recordings.events import Backward, Mark
from fsdp_conformance.recordings.files import RankRecording
from fsdp_conformance.tests.parity.trainings import (
    SAMPLES,
    STEPS,
    Net,
    Script,
    as_rank,
    clips_between,
    compared,
    record,
    taken_out,
    train,
)


def scaled(factor: float, *, name: str = "", from_step: int = 0) -> Callable[[nn.Module, int], None]:
    """Scales gradients: of one parameter, or of all."""

    def scale(model: nn.Module, step: int) -> None:
        for key, parameter in model.named_parameters():
            if parameter.grad is not None and key.startswith(name) and step >= from_step:
                parameter.grad.mul_(factor)

    return scale


class Stale:
    """Gives the optimizer the gradients of the step before."""

    def __init__(self) -> None:
        self._kept: dict[int, list[torch.Tensor]] = {}

    def __call__(self, model: nn.Module, step: int) -> None:
        kept = self._kept.get(id(model))
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        self._kept[id(model)] = [gradient.clone() for gradient in gradients]
        if kept is not None:
            for gradient, before in zip(gradients, kept, strict=True):
                gradient.copy_(before)


def clamped(model: nn.Module, step: int) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.clamp_(-1e-3, 1e-3)


@torch.no_grad()
def not_updated(model: nn.Module, step: int) -> None:
    """Undoes the first step of the second layer, by what it was seeded to."""
    if step == 0:
        torch.manual_seed(0)
        for parameter, first in zip(model.parameters(), Net(0.0).parameters(), strict=True):
            parameter.data.copy_(first)


@torch.no_grad()
def changed_between(model: nn.Module, step: int) -> None:
    if step == 2:
        next(iter(model.parameters())).mul_(1.01)


def to_evaluation(model: nn.Module, step: int) -> None:
    if step == 1:
        model.eval()


def without_last(model: nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(model.parameters())[:-1], lr=lr, weight_decay=weight_decay)


def only_the_first_is_reduced(model: nn.Module, number: int) -> None:
    model.require_backward_grad_sync = number == 0  # type: ignore[assignment]


def hooked(model: nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    next(iter(model.parameters())).register_hook(lambda gradient: gradient)
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)


def clamped_on_rank_1(model: nn.Module, step: int) -> None:
    if os.environ["RANK"] == "1":
        clamped(model, step)


def faster_on_rank_1(model: nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr * (1 + int(os.environ["RANK"])), weight_decay=weight_decay)


def of_a_copy(model: nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    tensors = [nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
    return torch.optim.AdamW(tensors, lr=lr, weight_decay=weight_decay)


class Partial(torch.optim.AdamW):
    """Leaves every other row of a parameter as it was."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        parameter = self.param_groups[0]["params"][0]
        before = parameter.clone()
        super().step()
        parameter[::2] = before[::2]


class Damped(torch.optim.AdamW):
    """An optimizer of the script's own, which takes back a little of the largest updates."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        pairs = [(parameter, parameter.clone()) for group in self.param_groups for parameter in group["params"]]
        super().step()
        for parameter, before in pairs:
            change = parameter - before
            parameter.copy_(before + change.clamp(max=float(change.max()) * 0.9999))


def partial(model: nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    return Partial(model.parameters(), lr=lr, weight_decay=weight_decay)


def damped(model: nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    return Damped(model.parameters(), lr=lr, weight_decay=weight_decay)


def with_rates(*rates: float) -> Callable[[nn.Module, float, float], torch.optim.Optimizer]:
    def make(model: nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)
        left = iter(rates)
        optimizer.register_step_pre_hook(lambda *_: optimizer.param_groups[0].update(lr=next(left)))
        return optimizer

    return make


def drawing(model: nn.Module, step: int) -> None:
    """Draw in the backward, as where activations are computed again without the random state of the forward."""
    torch.rand(1)
    clamped(model, step)


def loads_a_state(model: nn.Module, step: int) -> None:
    """Puts back what it believes to be an older state."""
    if step == 2:
        model.load_state_dict({name: tensor * 0.9 for name, tensor in model.state_dict().items()})


MISTAKES = {
    "rate times ranks": (Script(lr=0.2), Whose.SCRIPT, 0, "lr is 0.2 instead of 0.1", "scaled by the number of ranks"),
    "weight decay": (Script(weight_decay=0.0), Whose.SCRIPT, 0, "weight_decay is 0 instead of 0.01", ""),
    "rate of one rank": (
        Script(optimizer=faster_on_rank_1), Whose.SCRIPT, 0, "rank 1 · 'first.weight' · lr is 0.2 instead of 0.1",
        "rank 0 has the same setting as the reference: what the script sets depends on the rank",
    ),
    "parameter left out": (
        Script(optimizer=without_last), Whose.SCRIPT, 0, "'second.bias' is missing", "where it makes the optimizer",
    ),
    "optimizer of other tensors": (
        Script(optimizer=of_a_copy), Whose.SCRIPT, 0, "is missing", "4 of its tensors belong to no module",
    ),
    "no clipping": (Script(limit=None), Whose.SCRIPT, 0, "the run does not", ""),
    "another limit": (Script(limit=1.0), Whose.SCRIPT, 0, "1 instead of 0.5", ""),
    "same samples on every rank": (
        Script(samples=lambda data, rank: data[:SAMPLES]), Whose.DATA, 0, "rank 1", "every rank gets the same samples",
    ),
    "fewer samples": (
        Script(samples=lambda data, rank: data[rank * SAMPLES : (rank + 1) * SAMPLES - 1]), Whose.DATA, 0,
        "shape [3, 17] instead of [4, 17]", "12 samples instead of 16",
    ),
    "another number of micro-batches": (
        Script(passes=1), Whose.SCRIPT, 0, "another number of micro-batches",
        "every rank accumulates 1 micro-batch in this step instead of 2: the number of accumulation steps",
    ),
    "draws in the backward": (
        Script(dropout=0.5, gradients=drawing), Whose.SCRIPT, 0, "'first.",
        "in another state, and before it they agreed: activations are computed again with other random numbers",
    ),
    "loads a state by hand": (
        Script(before_forward=loads_a_state), Whose.SCRIPT, 2, "'first.weight'",
        "and the reference does not. To put weights back, it needs a copy",
    ),
    "other samples": (
        Script(samples=lambda data, rank: data[rank * SAMPLES : (rank + 1) * SAMPLES] + 1), Whose.DATA, 0, "rank 0",
        "none of the samples is the same",
    ),
    "another shuffle on one rank": (
        Script(samples=lambda data, rank: data[rank * SAMPLES : (rank + 1) * SAMPLES] + rank), Whose.DATA, 0, "rank 1",
        "only rank 1 has other samples: a sampler or a shuffle has another seed there",
    ),
    "samples of another rank": (
        Script(ranks=4, samples=lambda data, rank: data[rank % 2 * SAMPLES :][:SAMPLES]), Whose.DATA, 0, "rank 2",
        "rank 2 trains the samples of rank 0, rank 3 trains the samples of rank 1: ",
    ),
    "a batch left out": (
        Script(batch=lambda step, rank: step + (step in (1, 2))), Whose.DATA, 1, "rank 0",
        "every rank has the samples of step 2 of the reference, 1 step ahead: a batch was left out",
    ),
    "a batch trained twice": (
        Script(batch=lambda step, rank: max(step - rank, 0)), Whose.DATA, 1, "rank 1",
        "rank 1 has the samples of step 0 of the reference, 1 step behind: a batch was trained twice",
    ),
    "each batch by its own count": (
        Script(scale=lambda rank, number: 1.5 if rank else 0.5), Whose.SCRIPT, 0, "rank 0 · micro-batch 0",
        "each batch is scaled by another factor (rank 0 micro-batch 0: 0.5, rank 0 micro-batch 1: 0.5, rank 1",
    ),
    "only the last is scaled": (
        Script(scale=lambda rank, number: 65536.0 if number else 1.0), Whose.SCRIPT, 0, "rank 0 · micro-batch 1",
        "some losses are scaled by 6.554e+04 and others are not (rank 0 micro-batch 0: 1, rank 0 micro-batch 1: 6.5",
    ),
    "other labels": (
        Script(scale=lambda rank, number: 1.05 if rank else 0.97), Whose.SCRIPT, 0, "rank 0 · micro-batch 0",
        "the loss has other labels (shifted, masked or padded differently), or is computed in another way",
    ),
    "begins again": (
        Script(batch=lambda step, rank: step % 2), Whose.DATA, 2, "rank 0",
        "goes on with others: the loader, its iterator or its sampler begins again where it should go on",
    ),
    "evaluation mode": (
        Script(dropout=0.5, before_forward=to_evaluation), Whose.SCRIPT, 1, "rank 0 · micro-batch 0",
        "it runs in evaluation mode, and the reference in training mode: `model.train()`",
    ),
    "clipped in every pass": (
        Script(before_backward=clips_between), Whose.SCRIPT, 0, "'first.",
        "gradients are clipped before the last backward of the step",
    ),
    "cleared in every pass by hand": (
        Script(before_backward=lambda model, number: model.zero_grad()), Whose.SCRIPT, 0, "'first.",
        "gradients are cleared between two backwards of the step",
    ),
    "cleared before the step by hand": (
        Script(changed=lambda model, step: model.zero_grad(), limit=None), Whose.SCRIPT, 0,
        "the gradient of 'first.weight' is missing", "gradients are cleared between the backward and the step",
    ),
    "no_sync around the wrong backward": (
        Script(before_backward=only_the_first_is_reduced, gradients=clamped), Whose.SCRIPT, 0, "'first.",
        "the last backward of step 0 is not reduced",
    ),
    "a hook": (
        Script(optimizer=hooked, gradients=clamped), Whose.SCRIPT, 0, "'first.",
        "changes gradients, and the reference has none",
    ),
    "another seed": (Script(seed=1), Whose.SCRIPT, 0, "'first.weight'", "seeded differently"),
    "not divided by the passes": (
        Script(scale=lambda rank, number: 2.0), Whose.SCRIPT, 0, "rank 0 · micro-batch 0", "the loss is scaled by 2",
    ),
    "gradients not cleared": (Script(clears=lambda step: step != 1), Whose.SCRIPT, 2, "'first.", "not cleared"),
    "summed": (
        Script(ranks=3, gradients=scaled(3.0)), Whose.ENGINE, 0, "relative difference 2",
        "added up over the ranks instead of averaged",
    ),
    "divided twice": (
        Script(ranks=3, gradients=scaled(1 / 3)), Whose.ENGINE, 0, "'first.", "divided by the number of ranks twice",
    ),
    "one tensor": (
        Script(gradients=scaled(-1.0, name="second.weight", from_step=2)), Whose.ENGINE, 2, "'second.weight'",
        "the sign is wrong: every element is -1 times the expected one (1 of 4 tensors)",
    ),
    "clipped by hand": (
        Script(changed=clamped), Whose.SCRIPT, 0, "'first.", "a maximum of a shard must be combined over the ranks",
    ),
    "scaled by hand": (Script(changed=scaled(1.4)), Whose.SCRIPT, 0, "'first.", "scaled by 1.4 instead of 1"),
    "clamped in the backward": (
        Script(gradients=clamped), Whose.EITHER, 0, "'first.", "what one of the two scripts does in its backward",
    ),
    "zero": (Script(gradients=scaled(0.0, from_step=1)), Whose.ENGINE, 1, "'first.", "the gradients are zero"),
    "infinite": (Script(gradients=scaled(1e39)), Whose.ENGINE, 0, "infinite or NaN", "an overflow"),
    "stale": (Script(gradients=Stale()), Whose.ENGINE, 1, "'first.", "stale"),
    "scaled by hand after clipping": (
        Script(clipped=scaled(0.9)), Whose.SCRIPT, 0, "'first.",
        "the script changes them afterwards, and the reference does not: `to_local()` gives the memory of the gradient",
    ),
    "reduced on one rank": (
        Script(gradients=clamped_on_rank_1), Whose.ENGINE, 0, "'first.",
        "rank 1 and others hold the same part of it with different values: it was not reduced over all ranks",
    ),
    "optimizer of the script's own": (
        Script(optimizer=damped), Whose.SCRIPT, 0, "'first.", "the optimizer's class Damped, defined at ",
    ),
    "the first epoch again": (
        Script(batch=lambda step, rank: step % 3), Whose.DATA, 3, "rank 0 · micro-batch 0",
        "after 6 micro-batches the run trains the same samples again in the same order",
    ),
    "not updated": (
        Script(updated=not_updated), Whose.EITHER, 1, "'first.weight'", "only the run writes to 'first.weight'",
    ),
    "changed between steps": (
        Script(before_forward=changed_between), Whose.EITHER, 2, "'first.", "only the run writes to 'first.weight'",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.daily(8)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found_where_it_begins(name: str, tmp_path: Path) -> None:
    script, whose, step, first, likely = MISTAKES[name]

    comparison = compared(script, tmp_path, Script(ranks=script.ranks, dropout=script.dropout))

    assert comparison.differs
    finding = comparison.findings[0]
    assert (finding.whose, finding.step) == (whose, step), finding
    assert first in finding.first, finding
    assert likely in finding.likely, finding
    where = "test_comparison.py:" if "hand" in name else "trainings.py:"
    assert finding.line.removeprefix("fsdp_conformance/tests/parity/").startswith(where), finding


def test_a_parameter_in_another_group_is_the_cause_of_its_settings(tmp_path: Path) -> None:
    """As where a script chooses parameters by names that a wrapper has changed."""

    def slow(number: int) -> Script:
        def make(model: nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
            first, *rest = model.parameters()
            of_slow, others = ([first], rest) if number else ([], [first, *rest])
            groups: list[dict[str, Any]] = [{"params": others}, {"params": of_slow, "lr": 0.1 * lr}]
            return torch.optim.AdamW(groups, lr=lr, weight_decay=weight_decay)

        return Script(optimizer=make)

    finding = compared(slow(0), tmp_path, slow(1)).findings[0]

    assert finding.first == "'first.weight' · lr is 0.1 instead of 0.01"
    assert finding.likely.startswith(
        "it is in another parameter group than in the reference (here the first of 4 is 'first.weight'; there it is "
        "alone): a condition on the names or shapes"
    )


@pytest.mark.parametrize(
    ("factor", "passes", "likely"),
    [
        (2.0, 2, "it is not divided by the number of micro-batches (2) or the number of ranks (2)"),
        (3.0, 3, "it is not divided by the number of micro-batches (3), as the reference's is"),
        (0.5, 1, "it is divided by the number of ranks (2), and the reference's is not, or it is divided twice"),
        (16.0, 2, "by a count of tokens, or by a gradient scaler"),
    ],
)
def test_what_a_loss_is_scaled_by(factor: float, passes: int, likely: str, tmp_path: Path) -> None:
    run = compared(Script(passes=passes, scale=lambda rank, number: factor), tmp_path, Script(passes=passes))

    assert run.findings[0].likely.startswith(f"the loss is scaled by {factor:g}: {likely}")


def test_a_small_term_of_the_loss_that_differs(tmp_path: Path) -> None:
    """The losses differ by more than the order of a sum explains, as if each rank used its own samples alone."""
    script = Script(scale=lambda rank, number: 1 + 1e-5, gradients=clamped)
    finding = compared(script, tmp_path).findings[0]
    assert finding.title == "The gradients differ"
    assert finding.whose is Whose.SCRIPT
    assert "the losses differ a little as well, by 1.0e-05 on rank 0" in finding.likely


def test_losses_of_other_divisors_are_compared_as_means(tmp_path: Path) -> None:
    """FSDP2 may add gradients up where DDP averages them: the script then divides its loss by all tokens."""
    reference = record(Script(scale=lambda rank, number: 2.0), tmp_path / "reference")
    run = record(Script(), tmp_path / "run")
    summed = replace(run, ranks=tuple(map(_summing, run.ranks)))

    titles = [compare(each, reference).findings[0].title for each in (run, summed)]

    # Here the gradients differ as well, which they do not if an engine adds them up.
    assert titles == ["The loss differs although the outputs agree", "The gradients differ"]
    # The same script without its sharding sets the same divisor, which is not seen there.
    assert compare(summed, taken_out(run)).findings == []


def _summing(rank: RankRecording) -> RankRecording:
    mark = Mark(step=0, kind="divide factor", line="train.py:3", detail="1.0")
    return replace(rank, events=(mark, *rank.events))


def test_data_from_a_generator_that_was_seeded_again(tmp_path: Path) -> None:
    def drawn(*, seeds: bool) -> Script:
        def seed(model: nn.Module, step: int) -> None:
            if seeds and step == 2:
                torch.manual_seed(0)

        return Script(updated=seed, samples=lambda data, rank: data[rank * SAMPLES :][:SAMPLES] + torch.rand(1))

    finding = compared(drawn(seeds=True), tmp_path, drawn(seeds=False)).findings[0]

    assert (finding.whose, finding.step) == (Whose.DATA, 3)
    assert finding.likely.startswith("the data is drawn from the generator of torch, which has got another state on ")


def first_weight(model: nn.Module) -> nn.Parameter:
    return next(iter(model.parameters()))


def shrinking(size: float) -> Script:
    """A script that changes a weight after each step, if the size is not 1."""

    def shrink(model: nn.Module, step: int) -> None:
        if size != 1:
            first_weight(model).data.mul_(size)

    return Script(updated=shrink)


@pytest.mark.parametrize(
    ("size", "of_reference", "whose", "likely"),
    [
        (0.9, 0.8, Whose.SCRIPT, "the script writes to 'first.weight': other values than the reference, as where"),
        (1.0, 0.8, Whose.SCRIPT, "only the reference writes to 'first.weight': "),
        (0.9, 1.0, Whose.EITHER, "only the run writes to 'first.weight'"),
    ],
    ids=["both", "reference", "run"],
)
def test_what_is_written_between_the_steps_is_compared(
    size: float, of_reference: float, whose: Whose, likely: str, tmp_path: Path
) -> None:
    """As a constraint on the weights that takes the norm of a shard: the parameters agree after the step."""
    finding = compared(shrinking(size), tmp_path, shrinking(of_reference)).findings[0]

    assert (finding.title, finding.step) == ("Parameters have changed differently since the step before", 1)
    assert (finding.whose, finding.tensors) == (whose, ("first.weight",))
    assert finding.likely.startswith(likely)


def test_a_state_that_only_the_run_loads_is_the_scripts(tmp_path: Path) -> None:
    def load(model: nn.Module, step: int) -> None:
        model.load_state_dict({name: 0.5 * value for name, value in model.state_dict().items()})

    finding = compared(Script(updated=load), tmp_path, shrinking(0.9)).findings[0]

    assert (finding.whose, finding.step) == (Whose.SCRIPT, 1)
    assert finding.likely.startswith("the script loads a state into the model at ")
    assert finding.line.endswith("test_comparison.py:" + finding.line.rpartition(":")[2])


def test_clipping_what_was_collected_before_sharding_clips_nothing(tmp_path: Path) -> None:
    def clip(tensors: Callable[[nn.Module], Sequence[Tensor]]) -> Script:
        return Script(limit=None, changed=lambda model, step: nn.utils.clip_grad_norm_(tensors(model), 0.5))

    stale = [nn.Parameter(torch.ones(3))]
    finding = compared(clip(lambda model: stale), tmp_path, clip(lambda model: list(model.parameters()))).findings[0]

    assert (finding.whose, finding.step) == (Whose.SCRIPT, 0)
    assert finding.likely.startswith("1 of the tensors that it was given belong to no module: ")


def test_autocast_that_outlives_a_step_has_stale_weights(tmp_path: Path) -> None:
    """Its copies of weights in low precision last until it ends, which the reference lets it do after each forward."""

    def under_autocast(*, ends: bool) -> Script:
        contexts = contextlib.ExitStack()

        def enter(model: nn.Module, step: int) -> None:
            if ends or not step:
                contexts.enter_context(torch.autocast("cpu"))

        def leave(model: nn.Module, number: int) -> None:
            if ends and number:
                contexts.close()

        def end(model: nn.Module, step: int) -> None:
            if step == STEPS - 1:
                contexts.close()

        return Script(before_forward=enter, before_backward=leave, updated=end, lr=1.0)

    finding = compared(under_autocast(ends=False), tmp_path, under_autocast(ends=True)).findings[0]

    assert (finding.title, finding.whose, finding.step) == ("The forward computes something else", Whose.SCRIPT, 1)
    assert finding.likely.startswith("autocast was on while the optimizer stepped: ")


def test_an_evaluation_in_between_may_be_why_a_forward_differs(tmp_path: Path) -> None:
    """It may have swapped weights, so a forward that differs although the parameters agree need not be the engine's."""

    def evaluated(weight: float) -> Script:
        def run(model: nn.Module, step: int) -> None:
            if step == 1:
                with torch.no_grad():
                    model(torch.ones(1, 17))
                vars(model.drop)["forward"] = lambda x: x * weight

        return Script(before_forward=run)

    finding = compared(evaluated(0.5), tmp_path, evaluated(1.0)).findings[0]

    assert (finding.title, finding.whose, finding.step) == ("The forward computes something else", Whose.EITHER, 1)


@pytest.mark.slow
def test_a_run_that_is_the_same_is_equal_bit_for_bit(tmp_path: Path) -> None:
    comparison = compared(Script(), tmp_path)

    assert comparison.is_bitwise
    assert comparison.suspicions == []
    # Four steps of outputs on two ranks and two passes, and of gradients, clipped ones, parameters and states.
    assert sum(row.tensors for row in comparison.rows) == 4 * (2 * 2 * 1 + 4 * 3 + 8)


CORRECT = {
    "samples on other ranks": Script(samples=lambda data, rank: data[(1 - rank) * SAMPLES : (2 - rank) * SAMPLES]),
    "rounding": Script(gradients=scaled(1 + 2.0**-23)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CORRECT)
def test_a_correct_variation_has_no_finding(name: str, tmp_path: Path) -> None:
    comparison = compared(CORRECT[name], tmp_path)

    assert comparison.findings == []
    assert comparison.steps == 4
    # The sum of two ranks is the same in either order.
    assert comparison.is_bitwise is (name != "rounding")


@pytest.mark.slow
def test_the_state_of_generators_matters_once_something_differs(tmp_path: Path) -> None:
    def draw(model: nn.Module, step: int) -> None:
        if step == 1:
            torch.rand(1)

    drawn = compared(Script(before_forward=draw), tmp_path / "drawn")
    with_dropout = compared(Script(before_forward=draw, dropout=0.5), tmp_path / "dropout", Script(dropout=0.5))

    assert drawn.is_bitwise
    assert with_dropout.findings[0].whose is Whose.SCRIPT
    assert with_dropout.findings[0].step == 1
    assert "the generators of torch on rank 0" in with_dropout.findings[0].likely


@pytest.mark.slow
def test_evaluation_mode_is_suspicious(tmp_path: Path) -> None:
    comparison = compared(Script(before_forward=to_evaluation), tmp_path)

    assert [finding.title for finding in comparison.suspicions] == ["The model is trained in evaluation mode"]
    assert comparison.suspicions[0].step == 1


@pytest.mark.slow
def test_what_both_do_wrong_is_suspicious(tmp_path: Path) -> None:
    wrong = Script(samples=lambda data, rank: data[:SAMPLES], optimizer=without_last)

    comparison = compared(wrong, tmp_path, wrong)

    assert not comparison.differs
    assert [finding.title for finding in comparison.suspicions] == [
        "Every rank trains the same samples",
        "Parameters that require gradients are in no optimizer",
    ]
    assert verdict_of(comparison).endswith("bit for bit; 2 suspicions above, which both runs may share")


@pytest.mark.slow
def test_numbers_that_differ_are_shown_with_the_digits_that_do(tmp_path: Path) -> None:
    update = compared(Script(optimizer=damped), tmp_path / "update").findings[0]
    rate = compared(Script(lr=0.1 + 1e-9), tmp_path / "rate").findings[0]

    part = compared(Script(optimizer=partial), tmp_path / "part").findings[0]

    assert "1 times the expected" not in update.likely
    assert "times the expected" not in part.likely
    assert "lr is 0.100000001 instead of 0.1" in rate.first


@pytest.mark.slow
def test_an_order_that_ends_within_a_step_is_suspicious(tmp_path: Path) -> None:
    """Epochs of three micro-batches, steps of two."""
    order = [0, 1, 2, 0, 1, 2, 0, 1]
    wrong = Script(samples=lambda data, rank: data[rank * SAMPLES : (rank + 1) * SAMPLES], numbers=order.__getitem__)

    comparison = compared(wrong, tmp_path, wrong)

    assert [(finding.title, finding.step) for finding in comparison.suspicions] == [
        ("The samples come in the same order in every epoch", 1)
    ]
    assert comparison.suspicions[0].evidence == ("the order repeats every 3 micro-batches",)


@pytest.mark.nightly
def test_equality_says_what_it_does_not_show(tmp_path: Path) -> None:
    idle, used = Script(limit=1e6), Script(limit=0.5)

    lines = [text for text, _ in lines_of(compared(idle, tmp_path / "idle", idle))]

    assert "  not used    clipping: the norm of the gradients was never above the limit of 1e+06" in lines
    assert "not used" not in "".join(text for text, _ in lines_of(compared(used, tmp_path / "used", used)))


def test_one_that_steps_less_often_has_another_number_of_steps(tmp_path: Path) -> None:
    class Stop(Exception):
        """Ends the training early."""

    def stop(model: nn.Module, step: int) -> None:
        if step == 2:
            raise Stop

    with pytest.raises(Stop):
        compared(Script(ranks=1, before_forward=stop), tmp_path)
    comparison = compare(files.read(tmp_path / "run"), record(Script(ranks=1), tmp_path / "reference"))

    assert comparison.findings[0].title == "The run ended early"
    assert comparison.findings[0].first == "rank 0 · Stop: "
    swapped = compare(files.read(tmp_path / "reference"), files.read(tmp_path / "run"))
    assert [finding.title for finding in swapped.findings] == ["The reference ended early"]
    assert comparison.findings[0].evidence == ("the run has 2 steps, the reference 4",)


@pytest.mark.slow
def test_a_forward_that_one_rank_runs_alone_is_why_all_fail(tmp_path: Path) -> None:
    def evaluate(model: nn.Module, step: int) -> None:
        if step == 2 and os.environ["RANK"] == "1":
            with torch.no_grad():
                model(torch.ones(1, 17))

    def fail(model: nn.Module, step: int) -> None:
        if step == 2:
            rank = os.environ["RANK"]
            raise ConnectionError("Connection reset by peer" if rank == "0" else "wrong size")

    for rank in range(2):
        with pytest.raises(ConnectionError), as_rank(rank, 2), recording(tmp_path / "run"):
            train(Script(before_forward=evaluate, changed=fail), rank)

    comparison = compare(files.read(tmp_path / "run"), record(Script(), tmp_path / "reference"))

    finding = comparison.findings[0]
    assert (finding.title, finding.whose, finding.step) == ("The ranks ran different forwards", Whose.SCRIPT, 2)
    assert finding.first.startswith("rank 1 ran a forward that rank 0 did not · evaluation at ")
    assert "test_comparison.py:" in finding.line
    assert "the run ended early: rank 1 · ConnectionError: wrong size" in finding.evidence


def with_another_norm(directory: Path, factor: float) -> None:
    """Edit a recording: what clipping has returned is that much larger in step 1."""
    for file in directory.iterdir():
        lines = []
        for line in file.read_text(encoding="utf-8").splitlines():
            event = json.loads(line)
            if event["event"] == "clip" and event["step"] == 1:
                event["norm"] *= factor
            lines.append(json.dumps(event) + "\n")
        file.write_text("".join(lines), encoding="utf-8")


@pytest.mark.slow
def test_a_norm_must_be_that_of_the_gradients(tmp_path: Path) -> None:
    compared(Script(), tmp_path)
    with_another_norm(tmp_path / "run", 0.9)

    comparison = compare(files.read(tmp_path / "run"), files.read(tmp_path / "reference"))

    finding = comparison.findings[0]
    assert (finding.title, finding.step) == ("The norm of the gradients differs although the gradients agree", 1)
    assert finding.whose is Whose.ENGINE
    assert "as of one rank's shards" in finding.likely


@pytest.mark.slow
def test_a_scheduler_that_is_ahead_is_named(tmp_path: Path) -> None:
    def decayed(times: int) -> Callable[[nn.Module, float, float], torch.optim.Optimizer]:
        """The rate is halved so often before each step but the first."""

        def make(model: nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
            optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)
            factors = itertools.chain([1.0], itertools.repeat(0.5**times))

            def halve(*arguments: object) -> None:
                optimizer.param_groups[0]["lr"] *= next(factors)

            optimizer.register_step_pre_hook(halve)
            return optimizer

        return make

    comparison = compared(Script(optimizer=decayed(2)), tmp_path, Script(optimizer=decayed(1)))

    finding = comparison.findings[0]
    assert (finding.whose, finding.step) == (Whose.SCRIPT, 1)
    assert "lr is 0.025 instead of 0.05" in finding.first
    assert finding.likely == "it is the rate of the reference's step 2: the scheduler is stepped more often"


@pytest.mark.slow
def test_rates_that_come_a_step_late_are_named(tmp_path: Path) -> None:
    # The rate that the optimizer is made with is that of the reference's second step.
    late, right = with_rates(0.2, 0.1, 0.2, 0.3), with_rates(0.1, 0.2, 0.3, 0.4)
    comparison = compared(Script(optimizer=late), tmp_path, Script(optimizer=right))

    assert comparison.findings[0].likely.startswith("every rate comes one step late")


@pytest.mark.slow
def test_a_rate_that_never_changes_is_of_an_optimizer_without_a_scheduler(tmp_path: Path) -> None:
    """Even if it is that of another step of the reference."""

    def scheduled(model: nn.Module, lr: float, wd: float) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=wd)
        schedulers.append(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (0.0, 1.0, 0.5, 0.25, 0.1)[step]))
        return optimizer

    schedulers: list[Any] = []
    reference = record(
        Script(optimizer=scheduled, updated=lambda model, step: schedulers[-1].step()), tmp_path / "reference"
    )
    comparison = compare(record(Script(), tmp_path / "run"), reference)

    assert comparison.findings[0].likely.startswith("the rate never changes here, and in the reference it does")


def test_a_rate_that_a_schedule_had_before_says_nothing_about_the_scheduler(tmp_path: Path) -> None:
    """A schedule that ends at the rate it began with was stepped as often as that of the reference until then."""
    short, right = with_rates(0.1, 0.2, 0.3, 0.1), with_rates(0.1, 0.2, 0.3, 0.2)
    comparison = compared(Script(optimizer=short), tmp_path, Script(optimizer=right))

    assert "lr is 0.1 instead of 0.2" in comparison.findings[0].first
    assert "the reference's step" not in comparison.findings[0].likely


@pytest.mark.slow
def test_a_scheduler_of_another_length_is_named(tmp_path: Path) -> None:
    def warming_up(steps: int) -> Callable[[nn.Module, float, float], torch.optim.Optimizer]:
        def make(model: nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
            optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)
            torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / steps, total_iters=steps)
            return optimizer

        return make

    comparison = compared(Script(optimizer=warming_up(3)), tmp_path, Script(optimizer=warming_up(4)))

    assert comparison.findings[0].likely == (
        "both begin with 0.1: the scheduler is stepped a different number of times, or is made for a different number "
        "of steps"
    )


def test_losses_that_differ_too_little_for_a_factor_have_no_cause() -> None:
    def losses(factor: float) -> list[list[Backward]]:
        return [[Backward(step=0, number=0, line="", loss=factor, is_reduced=True, means=(), contributions={})]]

    assert why_loss(losses(1.0002), losses(1.0)) == ""
    assert "scaled by 2" in why_loss(losses(2.0), losses(1.0))
    assert "scaled by 0.25" in why_loss(losses(0.25), losses(1.0))
    assert "such as an auxiliary loss, has another weight" in why_loss(losses(1.04), losses(1.0))
