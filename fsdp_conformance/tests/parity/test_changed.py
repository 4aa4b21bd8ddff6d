"""Scripts that clip shards, each rank its own, from what each rank held before and afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp_conformance.parity.alone import REPLICAS_DIFFER
from fsdp_conformance.parity.changed import (
    cleared_while_gathered,
    kept_from_clearing,
    leaves_gathered,
    lost_or_kept,
    whose_backward,
    why_changed,
    why_stale,
    without_consequences,
)
from fsdp_conformance.parity.finding import Finding, Whose
from fsdp_conformance.parity.runs import TrainingStep, events_by_step
from fsdp_conformance.recorder.fingerprints import Part, Pending
from fsdp_conformance.recordings.events import Backward, Forward, Mark, Step
from fsdp_conformance.recordings.fingerprint import Fingerprint

NAMES = ("weight", "bias")
#: A limit that the whole norm exceeds, and the norms of both shards.
LIMIT = 0.1


def gradients() -> list[Tensor]:
    """Of both tensors; the second half of each is larger."""
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(8, 5, generator=generator), torch.randn(6, 1, generator=generator)]
    return [torch.cat([half, 3 * other]) for half, other in (tensor.chunk(2) for tensor in whole)]


def halves(rank: int) -> list[Tensor]:
    return [tensor.chunk(2)[rank] for tensor in gradients()]


def norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.stack([tensor.norm() for tensor in tensors]).norm())


def prints(tensors: Sequence[Tensor], rank: int, ranks: int) -> dict[str, Fingerprint]:
    parts = [
        [Part((tensor.shape[0] * ranks, tensor.shape[1]), tensor, (rank * tensor.shape[0], 0))] for tensor in tensors
    ]
    return dict(zip(NAMES, Pending(parts).fingerprints(), strict=True))


def step(before: Sequence[Sequence[Tensor]], after: Sequence[Sequence[Tensor]]) -> TrainingStep:
    """A step whose ranks hold these gradients after the backward, and those when the optimizer gets them."""
    events = tuple(
        Step(
            step=0,
            optimizer="SGD",
            line="train.py:9",
            groups=(),
            gradients=prints(new, rank, len(before)),
            parameters={},
            state={},
            counters={},
            buffers={},
            untrained=(),
            kept=0,
            reduced=prints(old, rank, len(before)),
        )
        for rank, (old, new) in enumerate(zip(before, after, strict=True))
    )
    return TrainingStep(number=0, steps=events, forwards=((),), backwards=((),), clips=((),), initial=())


@pytest.mark.parametrize(
    ("factors", "likely"),
    [
        ([min(1.0, LIMIT / norm(halves(rank))) for rank in range(2)], "a norm of this rank's shard alone"),
        ([0.3, 0.5], "each rank has scaled its own shard, rank 0: 0.3, rank 1: 0.5, instead of all by 0.00"),
        ([0.5, 0.5], "they are scaled by 0.5 instead of 0.00"),
    ],
)
def test_factors_of_ranks_tell_what_they_were_made_of(factors: list[float], likely: str) -> None:
    shards = [halves(rank) for rank in range(2)]
    clipped = step(shards, [[factor * each for each in shard] for factor, shard in zip(factors, shards, strict=True)])
    whole = gradients()
    expected = step([whole], [[LIMIT / norm(whole) * each for each in whole]])

    assert likely in why_changed(clipped, expected)


def test_no_factor_is_no_clipping_by_a_norm() -> None:
    shards = [halves(rank) for rank in range(2)]
    clamped = step(shards, [[each.clamp(-0.1, 0.1) for each in shard] for shard in shards])

    assert "must be combined over the ranks" in why_changed(clamped, step([gradients()], [gradients()]))


def backward(*, is_reduced: bool) -> Backward:
    return Backward(step=0, number=0, line="train.py:5", loss=1.0, is_reduced=is_reduced)


CLEARED = Mark(step=0, kind="clear", line="train.py:6")


@pytest.mark.parametrize(
    ("events", "line"),
    [
        ([backward(is_reduced=False), CLEARED, backward(is_reduced=True)], "train.py:6"),
        ([backward(is_reduced=False), backward(is_reduced=True), CLEARED], None),
        ([CLEARED, backward(is_reduced=False), backward(is_reduced=True)], None),
    ],
    ids=["between", "after both", "before both"],
)
def test_gradients_that_are_cleared_before_they_are_reduced_come_back(
    events: Sequence[Backward | Mark], line: str | None
) -> None:
    shards = [halves(rank) for rank in range(2)]
    sharded, whole = step(shards, shards), step([gradients()], [gradients()])

    def run(trained: TrainingStep) -> Any:
        return SimpleNamespace(events=[[*events, *trained.steps]], steps=[trained])

    by_script = kept_from_clearing(run(sharded), 0)

    assert (by_script[1] if by_script else None) == line
    # With DDP or FSDP1, `zero_grad` sees them.
    assert kept_from_clearing(run(whole), 0) is None


@pytest.mark.parametrize(
    ("reduced", "expected"),
    [
        ([[False, True], [False, True]], ""),
        ([[True, False], [True, True]], "step 0 is not reduced, and what it has added comes with a later reduction"),
        ([[True, True], [True, False]], "step 1 is not reduced: "),
        ([[True, True], []], ""),
    ],
)
def test_a_last_backward_that_is_not_reduced_loses_gradients(reduced: list[list[bool]], expected: str) -> None:
    """Of this step, or of the one before, whatever the reference does: it has the same mistake, and adds them later."""
    steps = [
        SimpleNamespace(number=number, backwards=[[backward(is_reduced=each) for each in flags]])
        for number, flags in enumerate(reduced)
    ]
    run: Any = SimpleNamespace(events=[[], []], steps=steps, marks=[])
    lost = lost_or_kept(run, run, 1)
    assert (expected in lost[0] and lost[1] == "train.py:5") if lost else not expected


FORWARD = Forward(
    step=0,
    number=0,
    line="train.py:4",
    module="Net",
    training=True,
    with_gradients=True,
    dtype="",
    random={},
    draws=(),
    inputs={},
    outputs={},
)


@pytest.mark.parametrize(
    ("events", "line"),
    [
        ([FORWARD, CLEARED, backward(is_reduced=True)], "train.py:6"),
        ([CLEARED, FORWARD, backward(is_reduced=True)], None),
        ([FORWARD, backward(is_reduced=True), CLEARED], None),
        ([replace(FORWARD, with_gradients=False), CLEARED, FORWARD, backward(is_reduced=True)], None),
    ],
    ids=["between", "before", "after", "after an evaluation"],
)
def test_shards_keep_gradients_that_are_cleared_while_they_are_gathered(
    events: Sequence[Forward | Backward | Mark], line: str | None
) -> None:
    shards = [halves(rank) for rank in range(2)]
    sharded = step(shards, shards)
    run: Any = SimpleNamespace(events=[[*events, *sharded.steps]], steps=[sharded])

    by_script = cleared_while_gathered(run, 0)

    assert (by_script[1] if by_script else None) == line


def reshard(*, after_backward: bool) -> Mark:
    return Mark(step=0, kind="reshard", line="train.py:4", detail=str(after_backward))


@pytest.mark.parametrize(
    ("events", "is_left"),
    [
        ([reshard(after_backward=False), backward(is_reduced=True)], True),
        ([reshard(after_backward=False), backward(is_reduced=False), reshard(after_backward=True)], True),
        (
            [
                reshard(after_backward=False),
                backward(is_reduced=False),
                reshard(after_backward=True),
                backward(is_reduced=True),
            ],
            False,
        ),
        ([backward(is_reduced=True)], False),
    ],
    ids=["always", "reset too late", "reset for the last", "never"],
)
def test_units_that_the_script_leaves_gathered_have_old_values(
    events: Sequence[Backward | Mark], is_left: bool
) -> None:
    trained = [step([gradients()], [gradients()]) for _ in range(2)]
    forwards = ((SimpleNamespace(with_gradients=True),),)
    steps = [SimpleNamespace(steps=each.steps, forwards=forwards) for each in trained]
    by_step = events_by_step([*events, *trained[0].steps, *trained[1].steps])
    run: Any = SimpleNamespace(events=by_step, steps=steps, marks=[])

    assert why_stale(run, run, 1).startswith("`set_reshard_after_backward(False)` of train.py:4") is is_left


@pytest.mark.parametrize(
    ("events", "is_left"),
    [
        ([backward(is_reduced=True)], False),
        ([reshard(after_backward=False), backward(is_reduced=True)], True),
        ([backward(is_reduced=True), reshard(after_backward=False)], False),
        ([FORWARD, backward(is_reduced=True)], False),
        ([backward(is_reduced=True), replace(FORWARD, with_gradients=False)], True),
    ],
    ids=["nothing", "always", "too late", "training", "evaluation"],
)
def test_units_that_the_script_leaves_gathered_after_a_backward(
    events: Sequence[Backward | Forward | Mark], is_left: bool
) -> None:
    run: Any = SimpleNamespace(events=[events], marks=[])
    assert leaves_gathered(run, 0) is is_left
    run.marks = [Mark(step=0, kind="unsharded", line="train.py:3")]
    assert leaves_gathered(run, 0)


@pytest.mark.parametrize(
    ("silent", "silent_there", "whose"),
    [(("train.py:3",), (), Whose.SCRIPT), ((), (), Whose.EITHER), (("train.py:3",), ("train.py:3",), Whose.EITHER)],
    ids=["never runs here", "runs", "never runs in either"],
)
def test_a_hook_that_only_the_reference_calls_is_the_scripts(
    silent: tuple[str, ...], silent_there: tuple[str, ...], whose: Whose
) -> None:
    def with_hook(silent: tuple[str, ...]) -> TrainingStep:
        plain = step([gradients()], [gradients()])
        events = tuple(replace(each, hooks=("train.py:3",), silent_hooks=silent) for each in plain.steps)
        return replace(plain, steps=events)

    named, likely = whose_backward(with_hook(silent), with_hook(silent_there), same_script=True)

    assert named is whose
    assert ("the hook of train.py:3 never runs here" in likely) is (whose is Whose.SCRIPT)


@pytest.mark.parametrize(
    ("whose", "step", "title", "stays"),
    [
        (Whose.ENGINE, 1, REPLICAS_DIFFER, False),
        (Whose.ENGINE, 2, REPLICAS_DIFFER, True),
        (Whose.SCRIPT, 1, REPLICAS_DIFFER, True),
        (Whose.ENGINE, 1, "Another sign", True),
        (Whose.ENGINE, None, REPLICAS_DIFFER, True),
    ],
)
def test_replicas_that_an_engine_lets_differ_are_no_sign_of_the_script(
    whose: Whose, step: int | None, title: str, stays: bool
) -> None:
    """They follow from what it did to the gradients of that step, or of one before it."""
    finding = Finding(title="The gradients differ", whose=whose, step=step, first="'a'")
    sign = Finding(title=title, whose=Whose.SCRIPT, step=1, first="'b'")
    assert without_consequences(finding, [sign]) == ([sign] if stays else [])
