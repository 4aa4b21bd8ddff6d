"""A gradient's finding names the collective that reduced it, where sizes tell which one that was."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from fsdp_conformance.checks import parity
from fsdp_conformance.checks.parity import LastWriters
from fsdp_conformance.fixtures import models
from fsdp_conformance.history.collective import CollectiveRecord, Op
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.references.reference_set import Kind
from fsdp_conformance.tests.references.reference_runs import (
    WORLD_SIZE,
    damaged,
    gradient,
    implementation_run,
    references_of,
)


def _reduced(seq: int, nbytes: int, *, step: int = 0, op: Op = Op.REDUCE_SCATTER) -> CollectiveRecord:
    return CollectiveRecord(
        seq=seq,
        op=op,
        name="reduce_scatter",
        group=tuple(range(WORLD_SIZE)),
        nbytes=nbytes,
        dtype="float32",
        reduce_op="SUM",
        step=step,
        phase="backward",
        site="engine.py:7 in reduce",
    )


def _history(*records: CollectiveRecord) -> TrainingHistory:
    return TrainingHistory(source="engine", rank=0, world_size=WORLD_SIZE, collectives=list(records))


def test_the_collective_of_the_parameters_unit_is_named() -> None:
    """Units of the staircase have 70, 154, 270, 418, 598 and 54 elements: 616 bytes are the second one's."""
    history = _history(*[_reduced(seq, 4 * size) for seq, size in enumerate((54, 598, 418, 270, 154, 70))])

    writer = LastWriters(history, models.staircase()).of_gradient(0, "2.weight")

    assert writer == "#4 backward reduce_scatter 616B float32 SUM [0,1,2,3] at engine.py:7 in reduce"
    assert LastWriters(history, models.staircase()).of_gradient(1, "2.weight") is None


def test_one_collective_for_all_is_named() -> None:
    """A single bucket reduces every gradient."""
    history = _history(_reduced(9, 4 * 1564, op=Op.ALL_REDUCE))

    assert str(LastWriters(history, models.staircase()).of_gradient(0, "10.bias")).startswith("#9 backward all_reduce")


def test_nothing_is_guessed() -> None:
    """Where two collectives fit, or none, there is no text."""
    twice = _history(_reduced(1, 616), _reduced(2, 616), _reduced(3, 280))
    none = _history(_reduced(1, 99_000), _reduced(2, 88_000))

    assert LastWriters(twice, models.staircase()).of_gradient(0, "2.weight") is None
    assert LastWriters(none, models.staircase()).of_gradient(0, "2.weight") is None


def test_the_finding_carries_the_call() -> None:
    """Gradient parity reports the collective together with the difference."""
    references = references_of(models.staircase())
    history = damaged(implementation_run(references))
    history.collectives = [_reduced(seq, 4 * size) for seq, size in enumerate((54, 598, 418, 270, 154, 70))]
    gradient(history, 0, "4.bias").mul_(2)

    finding = parity.kind_parity(Kind.GRADIENT, history, references).findings[0]

    assert finding.call is not None
    assert finding.call.startswith("#3 backward reduce_scatter 1080B")
    assert finding.likely == "counted twice, or divided by 2 instead of 4: got / expected = 2 at every element"


def test_explaining_builds_the_model_once() -> None:
    """However many gradients differ in however many steps: the sizes of the units are those of one model."""
    plain = models.staircase()
    references = references_of(plain)
    history = damaged(implementation_run(references))
    history.collectives = [_reduced(seq, 4 * size) for seq, size in enumerate((54, 598, 418, 270, 154, 70))]
    names = [name for name, _ in plain.build(0).named_parameters()]
    for record in history.steps:
        for name in names:
            gradient(history, record.step, name).mul_(2)
    built: list[int] = []

    def build(rank: int) -> nn.Module:
        built.append(rank)
        return plain.build(rank)

    references.workload = replace(plain, build=build)
    # The gradients of single ranks are needed to explain a difference, and are computed from a model of each rank.
    references.contributions()
    built.clear()
    result = parity.kind_parity(Kind.GRADIENT, history, references)

    assert len(built) == 1
    assert [finding.step for finding in result.findings] == [0] * parity.MAX_FINDINGS
    assert result.count.comparisons > parity.MAX_FINDINGS * len(history.steps)
