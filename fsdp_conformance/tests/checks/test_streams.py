"""Races become findings for their requirements; a run in which nothing was checked is not clean."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from fsdp_conformance.checks.streams import requirement_of, same_undisturbed, stream_control, stream_safety
from fsdp_conformance.errors import NothingCompared, SuiteError
from fsdp_conformance.history.hazard import HazardKind, HazardRecord
from fsdp_conformance.history.training import StepRecord, TrainingHistory


def hazard(kind: HazardKind = HazardKind.READ_AFTER_WRITE, **changes: Any) -> HazardRecord:
    """An all-gather in forward that reads what the optimizer writes."""
    fields: dict[str, Any] = {
        "then_op": "aten::add_",
        "then_label": "step",
        "now_op": "all_gather_into_tensor",
        "now_label": "forward",
        "sentence": "read after write on sim:0: one reads what the other writes, and does not wait for it",
        "text": "the sentence\n  first: add_\n  then: all_gather",
    }
    return HazardRecord(kind=kind, **{**fields, **changes})


def run(*hazards: HazardRecord, accesses: int | None = 1000, streams: int = 2) -> TrainingHistory:
    """A run in which these were seen."""
    history = TrainingHistory(source="mine", rank=1, world_size=2, hazards=list(hazards), checked_accesses=accesses)
    history.checked_streams = streams
    return history


def ending(losses: list[float], **params: list[float]) -> TrainingHistory:
    """A run of one step for each loss, with these parameters in the end."""
    steps = [StepRecord(step=number, losses=[torch.tensor(loss)]) for number, loss in enumerate(losses)]
    steps[-1].params = {name: torch.tensor(values) for name, values in params.items()}
    return TrainingHistory(source="mine", rank=1, world_size=2, steps=steps)


def test_an_undisturbed_run_ends_as_the_observed_one() -> None:
    """Every loss and every final parameter is compared."""
    result = same_undisturbed(ending([1.0, 2.0], w=[1.0, 2.0, 3.0]), ending([1.0, 2.0], w=[1.0, 2.0, 3.0]), "R073")

    assert (result.findings, result.count.comparisons, result.count.elements) == ([], 3, 5)


@pytest.mark.parametrize(
    ("other", "where", "seen"),
    [
        (ending([1.0, 2.5], w=[9.0, 2.0, 3.0]), (1, None), "loss .* got others in 1 of 1"),
        (ending([1.0, 2.0], w=[1.0, 0.0, 0.0]), (1, "w"), "parameter .* got others in 2 of 3"),
        (ending([1.0, 2.0]), (1, "w"), "parameter .* got none"),
    ],
)
def test_a_race_that_the_observation_hid(other: TrainingHistory, where: tuple[int, Any], seen: str) -> None:
    """There is one finding, where the runs first differ."""
    (finding,) = same_undisturbed(ending([1.0, 2.0], w=[1.0, 2.0, 3.0]), other, "R073").findings

    assert (finding.requirement, finding.rank, (finding.step, finding.fqn)) == ("R073", 1, where)
    assert re.search(seen, finding.message)


def test_a_clean_run_has_looked_at_something() -> None:
    """It counts one comparison, of as many accesses as were checked."""
    result = stream_safety(run())

    assert result.findings == []
    assert (result.count.comparisons, result.count.elements) == (1, 1000)
    assert result.measurements == {"accesses": 1000}


@pytest.mark.parametrize("accesses", [0, None])
def test_a_run_without_accesses_proves_nothing(accesses: int | None) -> None:
    """Both the check and its control are errors."""
    with pytest.raises(NothingCompared, match=f"accesses checked: expected at least 1, got {accesses}"):
        stream_safety(run(accesses=accesses))
    with pytest.raises(NothingCompared):
        stream_control(run(hazard(), accesses=accesses))


def test_a_race_is_a_finding_with_its_argument() -> None:
    """The finding has the sentence, the count, the missing wait, and both stacks."""
    (finding,) = stream_safety(run(hazard(count=3))).findings

    assert finding.requirement == "R074"
    assert finding.message.endswith("and does not wait for it (3 times)")
    assert (finding.rank, finding.phase, finding.call) == (1, "forward", "all_gather_into_tensor")
    assert finding.likely == "a wait is missing between the stream that writes and the one that reads"
    assert finding.detail == "the sentence\n  first: add_\n  then: all_gather"


@pytest.mark.parametrize(
    ("kind", "then", "now", "expected"),
    [
        (HazardKind.READ_AFTER_WRITE, "step", "forward", "R074"),
        (HazardKind.WRITE_AFTER_WRITE, "step", "", "R074"),
        (HazardKind.READ_AFTER_WRITE, "step", "step", "R075"),
        (HazardKind.READ_AFTER_WRITE, "", "step", "R075"),
        (HazardKind.WRITE_AFTER_READ, "forward", "backward", "R075"),
        (HazardKind.REUSE_IN_FLIGHT, "step", "forward", "R075"),
        (HazardKind.HOST_READ_IN_FLIGHT, "", "step", "R138"),
        (HazardKind.HOST_WRITE_IN_FLIGHT, "forward", "step", "R138"),
    ],
)
def test_the_requirement_of_a_race(kind: HazardKind, then: str, now: str, expected: str) -> None:
    """A read too early of something that the optimizer wrote is R074; pinned memory is R138; the rest is R075."""
    assert requirement_of(hazard(kind, then_label=then, now_label=now)) == expected


def test_a_case_can_say_another_requirement() -> None:
    """It may name one for each kind, and one for accesses after the optimizer."""
    names = {HazardKind.REUSE_IN_FLIGHT: "R078", "parameters": "R073"}
    findings = stream_safety(run(hazard(HazardKind.REUSE_IN_FLIGHT), hazard()), names).findings

    assert [item.requirement for item in findings] == ["R078", "R073"]


def test_the_control_must_have_races() -> None:
    """Without one the checker could not have seen any."""
    assert stream_control(run(hazard())).measurements == {"hazards without waits": 1, "streams": 2}
    with pytest.raises(SuiteError, match="hazards with every wait dropped: expected at least 1, got 0"):
        stream_control(run())


@pytest.mark.parametrize("streams", [0, 3])
def test_only_one_stream_explains_that_there_are_no_races(streams: int) -> None:
    """Everything on one stream is ordered. None at all means that nothing was seen."""
    assert stream_control(run(streams=1)).measurements == {"hazards without waits": 0, "streams": 1}
    with pytest.raises(SuiteError, match="got 0"):
        stream_control(run(streams=streams))
