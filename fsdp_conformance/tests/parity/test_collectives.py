"""Collectives that differ are evidence where both runs are sharded alike, and nothing where they are not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from fsdp_conformance.parity.comparison import compare
from fsdp_conformance.parity.noise import EPS, noise_of
from fsdp_conformance.parity.result import Comparison
from fsdp_conformance.parity.runs import Run
from fsdp_conformance.parity.text import lines_of
from fsdp_conformance.recordings.events import Collectives, Step
from fsdp_conformance.recordings.files import Recording
from fsdp_conformance.tests.parity.trainings import Script, record

GATHER = Collectives(op="all_gather", reduce_op="", dtype="float32", group=(0, 1), calls=4, nbytes=64)
SCATTER = Collectives(op="reduce_scatter", reduce_op="AVG", dtype="float32", group=(0, 1), calls=2, nbytes=32)
NORM = Collectives(op="all_reduce", reduce_op="SUM", dtype="float32", group=(0, 1), calls=1, nbytes=4)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return record(Script(), tmp_path_factory.mktemp("run") / "run")


def _with(recording: Recording, *collectives: Collectives, factor: float = 1.0) -> Recording:
    """The recording with these collectives in each step, and a learning rate times a factor."""
    ranks = []
    for rank in recording.ranks:
        events = []
        for event in rank.events:
            if isinstance(event, Step):
                groups = [replace(each, settings={**each.settings, "lr": 0.1 * factor}) for each in event.groups]
                event = replace(event, collectives=collectives, groups=tuple(groups))  # noqa: PLW2901
            events.append(event)
        ranks.append(replace(rank, events=tuple(events)))
    return replace(recording, ranks=tuple(ranks))


def _compared(recording: Recording, *collectives: Collectives, factor: float = 2.0) -> Comparison:
    return compare(_with(recording, *collectives, factor=factor), _with(recording, GATHER, SCATTER, NORM))


@pytest.mark.parametrize(
    ("collectives", "words"),
    [
        ((GATHER, SCATTER), "all_reduce SUM float32 of ranks 0, 1 is missing, 1 call with 4 B"),
        (
            (GATHER, SCATTER, NORM, replace(NORM, dtype="float64", nbytes=8)),
            "all_reduce SUM float64 of ranks 0, 1 is extra, 1 call with 8 B",
        ),
        (
            (GATHER, replace(SCATTER, dtype="bfloat16", nbytes=16), NORM),
            "reduce_scatter AVG bfloat16 of ranks 0, 1 instead of reduce_scatter AVG float32 of ranks 0, 1",
        ),
        (
            (GATHER, replace(SCATTER, group=(0,)), NORM),
            "reduce_scatter AVG float32 of ranks 0 instead of reduce_scatter AVG float32 of ranks 0, 1",
        ),
        ((replace(GATHER, calls=3, nbytes=48), SCATTER, NORM), "3 calls with 48 B instead of 4 calls with 64 B"),
    ],
)
def test_the_collective_that_differs_is_evidence(
    trained: Recording, collectives: tuple[Collectives, ...], words: str
) -> None:
    """The finding is the difference in the settings; the collective stands below it."""
    comparison = _compared(trained, *collectives)

    assert comparison.findings[0].title == "The optimizer has different settings"
    assert any(f"collectives of rank 0 in step 0: {words}" in line or words in line for line in comparison.collectives)
    assert set(comparison.collectives) <= set(comparison.findings[0].evidence)


def test_other_strategies_have_other_collectives(trained: Recording) -> None:
    """Data parallel training has other collectives than sharded training, so they say nothing about a mistake."""
    assert _compared(trained, replace(NORM, calls=7)).collectives == ()
    assert _compared(trained).collectives == ()


def test_a_replica_whose_script_gathers_something_is_not_sharded(trained: Recording) -> None:
    """As a contrastive loss does with the embeddings of all ranks."""
    run, reference = _with(trained, GATHER, SCATTER, factor=2.0), _with(trained, replace(GATHER, nbytes=8))

    assert compare(run, reference).collectives == ()


@pytest.mark.parametrize(
    ("group", "reduce_op", "dtype"),
    [((0, 1, 2), "SUM", "bfloat16"), ((0, 1), "SUM", "float32"), ((0, 1, 2), "", "float32")],
)
def test_sums_of_more_than_two_ranks_have_the_noise_of_their_dtype(
    trained: Recording, group: tuple[int, ...], reduce_op: str, dtype: str
) -> None:
    """The order in which they are added up is the engine's choice. What is gathered is not rounded."""
    run = Run(_with(trained, replace(SCATTER, dtype="bfloat16", group=group, reduce_op=reduce_op)))

    assert noise_of(run, None).eps == EPS[dtype]


@pytest.mark.parametrize(("dtype", "is_expected"), [("bfloat16", False), ("float32", True)])
def test_a_run_that_sums_in_bfloat16_is_judged_by_its_noise(
    trained: Recording, dtype: str, is_expected: bool, tmp_path: Path
) -> None:
    """The reference, which sums in float32, cannot show it. Where the run does as well, the engine has rounded."""

    def round_gradients(model: nn.Module, step: int) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.copy_(parameter.grad.bfloat16())

    rounded = record(Script(gradients=round_gradients), tmp_path / "rounded")
    comparison = compare(_with(rounded, replace(SCATTER, dtype=dtype)), _with(trained, NORM))

    assert comparison.differs is is_expected
    seen = [line for line, _ in lines_of(comparison) if "coarse" in line]
    assert bool(seen) is not is_expected
    assert all("the run adds up gradients in bfloat16, and the reference does not" in line for line in seen)


def test_collectives_alone_are_no_finding(trained: Recording) -> None:
    """They are shown if asked for."""
    comparison = _compared(trained, GATHER, SCATTER, factor=1.0)

    assert not comparison.differs
    assert not any("is missing" in line for line, _ in lines_of(comparison))
    assert any("is missing" in line for line, _ in lines_of(comparison, collectives=True))
