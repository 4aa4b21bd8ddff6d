"""Drawing, shrinking and leaving out, with engines that are functions of the example: nothing is trained here."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fsdp_conformance.capability import CAPABILITIES
from fsdp_conformance.contract.gate import empty_record
from fsdp_conformance.errors import SuiteError
from fsdp_conformance.explore.case import case_for
from fsdp_conformance.explore.counting import summary
from fsdp_conformance.explore.example import Example, axes, features
from fsdp_conformance.explore.exploration import Budget, Exploration, Explorer
from fsdp_conformance.explore.pool import Outcome
from fsdp_conformance.explore.signature import Signature, signature_of
from fsdp_conformance.outcome.records import CaseRecord, Finding
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.verdict import Verdict
from fsdp_conformance.workload.events import Action

ALL = frozenset(CAPABILITIES)


def _record(example: Example, verdict: Verdict, *findings: Finding, traceback: str = "") -> CaseRecord:
    record = empty_record(case_for(example), RunSettings(implementation="an-engine"), "cpu")
    record.verdict, record.findings, record.traceback = verdict, list(findings), traceback
    return record


def _wrong(example: Example, check: str = "gradient parity", likely: str = "the gradient is summed") -> Outcome:
    finding = Finding(requirement="R003", check=check, message="gradient: expected 1, got 2", likely=likely, step=0)
    return Outcome(record=_record(example, Verdict.FAIL, finding))


class _Engine:
    """An engine that fails where a function tells it to."""

    def __init__(self, judged: Callable[[Example], Outcome | None]) -> None:
        self.judged = judged
        self.ran: list[Example] = []

    def run(self, example: Example) -> Outcome:
        self.ran.append(example)
        return self.judged(example) or Outcome(record=_record(example, Verdict.PASS))


def _explore(judged: Callable[[Example], Outcome | None], examples: int = 80, seed: int = 0) -> Exploration:
    return Explorer(_Engine(judged), ALL, Budget(max_examples=examples), first_seed=seed).explore()


def test_a_correct_engine_has_no_failure() -> None:
    """Every example is counted on every axis."""
    result = _explore(lambda example: None)

    assert (result.failures, result.ran, result.passed) == ([], 80, 80)
    assert all(sum(values.values()) == 80 for values in result.covered.values())


def test_the_same_seed_draws_the_same() -> None:
    """Nothing depends on the time or on earlier runs."""
    engines = [_Engine(lambda example: None) for _ in range(3)]
    for engine, seed in zip(engines, (5, 5, 6), strict=True):
        Explorer(engine, ALL, Budget(max_examples=30), first_seed=seed).explore()

    assert engines[0].ran == engines[1].ran
    assert engines[0].ran != engines[2].ran


@pytest.mark.slow
def test_a_failure_of_two_axes_is_found_and_shrunk_to_them() -> None:
    """The smallest example has the two axes that it takes, and hardly anything else."""

    def judged(example: Example) -> Outcome | None:
        wrong = example.regime.micro_batches > 1 and axes(example)["shapes"] != "more rows than ranks"
        return _wrong(example) if wrong else None

    result = _explore(judged)

    (failure,) = result.failures
    assert {item.partition(":")[0] for item in failure.needs} >= {"accumulation", "shapes"}
    assert len(failure.needs) <= 3
    assert len(failure.needs) <= len(features(failure.drawn))
    assert failure.shrinks <= 60


@pytest.mark.slow
def test_a_failure_after_an_event_is_shrunk_to_it() -> None:
    """An engine that keeps the old learning rate in accumulation is shown with that event and nothing else."""

    def judged(example: Example) -> Outcome | None:
        regime = example.regime
        wrong = regime.micro_batches > 1 and any(event.action is Action.LEARNING_RATE for event in regime.events)
        return _wrong(example) if wrong else None

    result = _explore(judged, examples=120)

    (failure,) = result.failures
    assert {event.action for event in failure.example.regime.events} == {Action.LEARNING_RATE}
    assert "events: learning rate" in failure.needs
    assert len(failure.needs) <= 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "left"),
    [
        (Action.LOAD, {Action.SAVE, Action.LOAD}),
        pytest.param(Action.SAVE, {Action.SAVE}, marks=pytest.mark.nightly),
        pytest.param(Action.RAISE, {Action.RAISE}, marks=pytest.mark.nightly),
    ],
)
def test_checkpoints_and_exceptions_are_drawn_and_shrunk(action: Action, left: set[Action]) -> None:
    """An engine that is wrong after one of them is shown with it alone; a load keeps the save that it needs."""

    def judged(example: Example) -> Outcome | None:
        return _wrong(example) if any(event.action is action for event in example.regime.events) else None

    result = _explore(judged, examples=120)

    (failure,) = result.failures
    assert {event.action for event in failure.example.regime.events} == left
    assert len(failure.needs) <= 2


@pytest.mark.slow
def test_different_failures_are_told_apart_and_each_is_told_once() -> None:
    """A second defect is found although the first one is common."""

    def judged(example: Example) -> Outcome | None:
        if example.regime.optimizer == "adam":
            return _wrong(example, check="parameter parity", likely="the update is lost")
        return _wrong(example) if example.world_size > 2 else None

    result = _explore(judged, examples=120)

    assert {failure.signature.check for failure in result.failures} == {"gradient parity", "parameter parity"}
    assert len(result.failures) == 2
    assert result.left_out > 0


@pytest.mark.slow
def test_a_known_failure_does_not_hide_another_one() -> None:
    """Examples that have what the known failure needs are left out, and the others go on."""

    def judged(example: Example) -> Outcome | None:
        if example.regime.eval_between:
            return _wrong(example, check="loss parity", likely="stale")
        return _wrong(example) if example.model.frozen else None

    result = _explore(judged, examples=200)

    assert {failure.signature.check for failure in result.failures} == {"loss parity", "gradient parity"}


def test_an_engine_that_always_fails_ends_the_exploration() -> None:
    """There is nothing left to explore."""
    result = _explore(_wrong)

    assert result.fails_always
    assert len(result.failures) == 1
    assert result.failures[0].needs == frozenset()


def test_examples_without_a_verdict_are_counted_with_their_reason() -> None:
    """Rejected and refused examples are neither failures nor covered."""

    def judged(example: Example) -> Outcome | None:
        if example.world_size == 3:
            return Outcome(rejected="not exact")
        if example.world_size == 2:
            return Outcome(record=_record(example, Verdict.FAIL), declined="ValueError: no")
        return None

    result = _explore(judged)

    assert result.failures == []
    assert result.rejected["not exact"] + result.declined["ValueError: no"] + result.passed == result.ran
    assert not {"2", "3"} & set(result.covered["world size"])


@pytest.mark.slow
def test_an_engine_that_fails_now_and_then() -> None:
    """A failure that does not repeat while it is shrunk is reported as it was drawn."""
    seen: list[Example] = []

    def judged(example: Example) -> Outcome | None:
        seen.append(example)
        return _wrong(example) if len(seen) == 20 else None

    result = _explore(judged, examples=60)

    (failure,) = result.failures
    assert failure.example == failure.drawn


def test_our_own_mistakes_end_the_exploration() -> None:
    """An error that is not the engine's is neither shrunk nor taken for a passing example."""

    def judged(example: Example) -> Outcome | None:
        if example.world_size == 3:
            raise SuiteError("a mistake")
        return None

    with pytest.raises(SuiteError, match="a mistake"):
        _explore(judged)


def test_the_budget_of_seconds() -> None:
    """It ends by the clock, and shrinking has its own limit."""
    times = iter(range(10_000))
    explorer = Explorer(_Engine(lambda example: None), ALL, Budget(seconds=25, clock=lambda: next(times)))

    assert 0 < explorer.explore().ran <= 25


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("rank 0 raised ValueError: expected 3 rows, got 7", "rank 2 raised ValueError: expected 5 rows, got 1", True),
        ("rank 0 raised ValueError: no parameter 'a.b'", "rank 0 raised ValueError: no parameter 'c'", True),
        ("rank 0 raised ValueError: expected rows", "rank 0 raised KeyError: expected rows", False),
    ],
)
def test_exceptions_with_the_same_text_are_the_same_failure(first: str, second: str, same: bool) -> None:
    """Numbers, names and ranks belong to the example."""
    made = []
    for message in (first, second):
        finding = Finding(requirement="R000", check="training", message=message)
        made.append(signature_of(Outcome(record=_record(Example(), Verdict.FAIL, finding, traceback="Traceback"))))

    assert (made[0] == made[1]) is same


def test_the_engines_frame_is_part_of_the_signature() -> None:
    """The same text from two places is two failures."""

    def raised(function: str) -> Signature:
        text = f'Traceback (most recent call last):\n  File "/acme/unit.py", line 12, in {function}\nValueError: no'
        finding = Finding(requirement="R000", check="training", message="rank 0 raised ValueError: no")
        return signature_of(Outcome(record=_record(Example(), Verdict.FAIL, finding, traceback=text)))

    assert raised("unshard") != raised("reshard")
    assert "unshard of unit.py" in str(raised("unshard"))


def test_the_summary_names_counts_and_reasons() -> None:
    """The summary shows what ran, what could not be judged and why, and every value of every axis."""
    text = summary({
        "ran": 9, "passed": 5, "rejected": {"not exact": 2}, "declined": {"ValueError: no": 1}, "left_out": 4,
        "covered": {"world size": {"2": 5, "3": 1}}, "shrinks": 7, "seconds": 30.0,
    })  # fmt: skip

    assert "9 examples ran in 30 s, 32 a minute: 5 passed" in text
    assert "could not be judged: 2 (not exact)" in text
    assert "refused by the engine: 1 (ValueError: no)" in text
    assert "7 more were run" in text
    assert "4 were left out" in text
    assert "world size: 2 5, 3 1" in text
