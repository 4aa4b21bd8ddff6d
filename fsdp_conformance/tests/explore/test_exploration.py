"""Drawing, shrinking and leaving out, with engines that are functions of the scenario: nothing is trained here."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from fsdp_conformance.capability import CAPABILITIES
from fsdp_conformance.contract.gate import empty_record
from fsdp_conformance.errors import ConfigError, SuiteError
from fsdp_conformance.explore.building import example_of
from fsdp_conformance.explore.case import case_for
from fsdp_conformance.explore.counting import summary
from fsdp_conformance.explore.exploration import MAX_SHRINKS, Budget, Exploration, Explorer, shrunk
from fsdp_conformance.explore.pool import Outcome
from fsdp_conformance.explore.signature import Signature, signature_of
from fsdp_conformance.outcome.records import CaseRecord, Finding
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.scenarios import rows
from fsdp_conformance.scenarios.axes import SPACE
from fsdp_conformance.scenarios.scenario import Extent, Scenario
from fsdp_conformance.verdict import Verdict
from fsdp_conformance.workload.events import Action

pytestmark = pytest.mark.slow

ALL = frozenset(CAPABILITIES)

Judged = Callable[[Scenario], Outcome | None]


def _record(scenario: Scenario, verdict: Verdict, *findings: Finding, traceback: str = "") -> CaseRecord:
    record = empty_record(case_for(scenario), RunSettings(implementation="an-engine"), "cpu")
    record.verdict, record.findings, record.traceback = verdict, list(findings), traceback
    return record


def _wrong(scenario: Scenario, check: str = "gradient parity", likely: str = "the gradient is summed") -> Outcome:
    finding = Finding(requirement="R003", check=check, message="gradient: expected 1, got 2", likely=likely, step=0)
    return Outcome(record=_record(scenario, Verdict.FAIL, finding))


class _Engine:
    """An engine that fails where a function says so."""

    def __init__(self, judged: Judged) -> None:
        self.judged = judged
        self.ran: list[Scenario] = []

    def run(self, scenario: Scenario) -> Outcome:
        self.ran.append(scenario)
        return self.judged(scenario) or Outcome(record=_record(scenario, Verdict.PASS))


def _explore(judged: Judged, examples: int = 40, failures: int | None = None) -> Exploration:
    return Explorer(_Engine(judged), ALL, Budget(max_examples=examples), max_failures=failures).explore()


def _has(*features: str) -> Callable[[Scenario], bool]:
    return lambda scenario: set(features) <= scenario.features


def test_a_correct_engine_has_no_failure() -> None:
    """Every scenario is counted on every axis, and its pairs are."""
    result = _explore(lambda scenario: None)

    assert (result.failures, result.ran, result.passed, result.left_out) == ([], 40, 40, 0)
    assert set(result.covered) == set(SPACE.by_name)
    assert all(sum(values.values()) == 40 for values in result.covered.values())
    assert 0 < result.pairs[0] < result.pairs[1]


def test_the_plainest_scenario_is_the_first_and_none_is_run_twice() -> None:
    """It shows at once whether anything passes at all."""
    engine = _Engine(lambda scenario: None)
    Explorer(engine, ALL, Budget(max_examples=30)).explore()

    assert engine.ran[0] == Scenario()
    assert len(set(engine.ran)) == 30


@pytest.mark.nightly
def test_the_same_seed_draws_the_same() -> None:
    """Nothing depends on the time or on earlier runs."""
    engines = [_Engine(lambda scenario: None) for _ in range(3)]
    for engine, seed in zip(engines, (5, 5, 6), strict=True):
        Explorer(engine, ALL, Budget(max_examples=15), first_seed=seed).explore()

    assert engines[0].ran == engines[1].ran
    assert engines[0].ran != engines[2].ran


def test_only_what_is_declared_is_drawn() -> None:
    """An engine that declares nothing is asked for nothing, and one with a flag is asked for it."""
    for declared in (frozenset[str](), frozenset({"no_sync", "checkpoint"})):
        engine = _Engine(lambda scenario: None)
        Explorer(engine, declared, Budget(max_examples=20)).explore()
        assert frozenset().union(*(scenario.needs for scenario in engine.ran)) == declared


@pytest.mark.nightly
@pytest.mark.parametrize("sizes", [(1,), (2,), pytest.param((3, 4), marks=pytest.mark.nightly)])
def test_only_the_given_numbers_of_ranks_are_used(sizes: tuple[int, ...]) -> None:
    """Also where a failure is shrunk, and where a known failure is avoided by making its values plain."""
    engine = _Engine(lambda scenario: _wrong(scenario) if _has("optimizer: adam, foreach")(scenario) else None)
    known = [frozenset({"ranks: 3", "buffers: counter"}), frozenset({"ranks: 4"})]
    Explorer(engine, ALL, Budget(max_examples=30), world_sizes=sizes, known=known).explore()

    assert {scenario.world_size for scenario in engine.ran} <= set(sizes)
    assert len(engine.ran) >= 10


@pytest.mark.parametrize("sizes", [(5,), (2, 8), ()])
def test_other_numbers_of_ranks_are_refused(sizes: tuple[int, ...]) -> None:
    """The space says which there are."""
    with pytest.raises(ConfigError, match="world sizes must be among 2, 3, 4, 1, got"):
        Explorer(_Engine(_wrong), ALL, Budget(max_examples=1), world_sizes=sizes)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 2, 3, 4), (2,)])
def test_triples_are_drawn_when_no_pairs_are_left(sizes: tuple[int, ...]) -> None:
    """An engine with few capabilities has had all pairs soon; also if pairs of other numbers of ranks remain."""
    engine = _Engine(lambda scenario: None)
    result = Explorer(engine, frozenset(), Budget(max_examples=130), world_sizes=sizes).explore()

    assert 0 < result.triples[0] < result.triples[1]
    assert result.triples[0] > result.pairs[0]


# --- shrinking --------------------------------------------------------------------------------------------------------


def _pairs_of_rows(number: int) -> list[tuple[Scenario, tuple[str, str]]]:
    """Rows with two of their special values, chosen at random."""
    random_ = random.Random(0)
    chosen = []
    for _ in range(number):
        row = random_.choice(rows.pairs())
        one, other = random_.sample(sorted(row.features), 2)
        chosen.append((row, (one, other)))
    return chosen


@pytest.mark.slow
def test_any_two_values_are_what_is_left_of_a_scenario() -> None:
    """Within the number of tries; values that one of the two demands are left, too, and nothing else."""
    for row, pair in _pairs_of_rows(150):
        last, number = shrunk(row, _has(*pair))
        items = [_item(feature) for feature in pair]
        assert set(pair) <= last.features
        assert {_item(feature)[0] for feature in last.features - set(pair)} <= _demanded(items)
        assert number <= MAX_SHRINKS
        assert last.salt == row.salt


def _demanded(items: list[tuple[str, str]]) -> set[str]:
    """The axes on which values make others possible, and those that make these possible."""
    axes = {axis for item in items for axis in SPACE.value_of[item].with_}
    values = [(axis, name) for item in items for axis, names in SPACE.value_of[item].with_.items() for name in names]
    return axes | (_demanded(values) if values else set())


def _item(feature: str) -> tuple[str, str]:
    axis, _, name = feature.partition(": ")
    return axis, name


def test_whatever_is_left_is_needed() -> None:
    """For a failure by one of several values, a smaller scenario passes."""
    fails = lambda scenario: bool(scenario.features & {"optimizer: adam, foreach", "dropout: in each block"})  # noqa: E731
    for row in rows.pairs()[:20]:
        if fails(row):
            last, _ = shrunk(row, fails)
            assert len(last.features) == 1
            assert fails(last)


def test_shrinking_has_a_limit() -> None:
    """The smallest scenario so far is returned; without a single try it is the one that was drawn."""
    row = rows.pairs()[0]
    pair = sorted(row.features)[:2]

    assert shrunk(row, _has(*pair), most=0) == (row, 0)
    some, number = shrunk(row, _has(*pair), most=5)
    assert number == 5
    assert set(pair) < some.features < row.features


PAIRS = [
    ("accumulation: two reduced", "rows: uneven"),
    ("learning rate: new", "accumulation: three, two deferred"),
    ("ranks: 3", "checkpoints: loaded later"),
    ("exception: in backward", "optimizer: adam, foreach"),
]


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids=[" and ".join(pair) for pair in PAIRS])
def test_a_failure_of_two_values_is_shrunk_to_exactly_these(pair: tuple[str, str]) -> None:
    """Whatever else the scenario had in which it was seen."""
    result = _explore(lambda scenario: _wrong(scenario) if _has(*pair)(scenario) else None, 150, failures=1)

    (failure,) = result.failures
    assert failure.needs == set(pair)
    assert failure.needs < failure.drawn.features
    assert 0 < failure.shrinks <= MAX_SHRINKS
    assert set(pair) <= failure.drawn.features


@pytest.mark.nightly
@pytest.mark.slow
def test_a_second_defect_neither_hides_the_first_nor_gets_into_it() -> None:
    """One that is common and comes first in a scenario with both; each is reported once, by what it takes."""
    pair = ("accumulation: two reduced", "rows: uneven")

    def judged(scenario: Scenario) -> Outcome | None:
        if _has("optimizer: adam, foreach")(scenario):
            return _wrong(scenario, check="parameter parity", likely="the update is lost")
        return _wrong(scenario) if _has(*pair)(scenario) else None

    result = _explore(judged, 40)

    assert {failure.signature.check: failure.needs for failure in result.failures} == {
        "gradient parity": set(pair),
        "parameter parity": {"optimizer: adam, foreach"},
    }
    assert result.left_out > 0


@pytest.mark.nightly
def test_two_causes_of_one_signature_hide_nothing() -> None:
    """The second cause is reported as seen again, and then avoided as the first one is."""

    def judged(scenario: Scenario) -> Outcome | None:
        if scenario.features & {"frozen: a block", "buffers: counter", "mode: toggled"}:
            return _wrong(scenario)
        if _has("evaluation: between the passes", "dropout: in each block")(scenario):
            return _wrong(scenario, check="loss parity", likely="stale")
        return None

    result = _explore(judged, examples=150)

    assert {failure.signature.check for failure in result.failures} == {"gradient parity", "loss parity"}
    (failure,) = (each for each in result.failures if each.signature.check == "loss parity")
    assert failure.needs == {"evaluation: between the passes", "dropout: in each block"}
    (failure,) = (each for each in result.failures if each.signature.check == "gradient parity")
    assert failure.seen >= 3


@pytest.mark.nightly
def test_known_failures_are_neither_drawn_nor_reported() -> None:
    """And one that is not known is reported all the same."""
    known = frozenset({"optimizer: adam, foreach"}), frozenset({"accumulation: two reduced", "rows: uneven"})

    def judged(scenario: Scenario) -> Outcome | None:
        if any(each <= scenario.features for each in known):
            return _wrong(scenario)
        return _wrong(scenario, check="loss parity") if _has("mode: toggled")(scenario) else None

    engine = _Engine(judged)
    result = Explorer(engine, ALL, Budget(max_examples=60), known=known).explore()

    assert not any(each <= scenario.features for each in known for scenario in engine.ran)
    assert [failure.needs for failure in result.failures] == [{"mode: toggled"}]
    assert result.left_out > 0


def test_a_known_failure_that_takes_nothing_leaves_everything_out_of_account() -> None:
    """It says nothing about a scenario, so that it is as if it were not known."""
    result = Explorer(_Engine(lambda scenario: None), ALL, Budget(max_examples=10), known=[frozenset[str]()]).explore()

    assert (result.ran, result.left_out) == (10, 0)


@pytest.mark.daily(1)
@pytest.mark.nightly_params("evaluation")
@pytest.mark.parametrize("axis", ["checkpoints", "exception", "written by the user", "evaluation"])
def test_events_are_drawn_and_shrunk(axis: str) -> None:
    """An engine that is wrong after one of them is shown with it alone."""
    action = {
        "checkpoints": Action.LOAD,
        "exception": Action.RAISE,
        "written by the user": Action.ASSIGN,
        "evaluation": Action.INFER,
    }[axis]

    def judged(scenario: Scenario) -> Outcome | None:
        return _wrong(scenario) if example_of(scenario).regime.happens(action) else None

    result = _explore(judged, examples=40)

    (failure,) = result.failures
    assert {item.partition(": ")[0] for item in failure.needs} == {axis}
    assert example_of(failure.scenario).regime.happens(action)


# --- what is counted, and when it ends --------------------------------------------------------------------------------


def test_an_engine_that_always_fails_ends_the_exploration() -> None:
    """There is nothing left to explore."""
    result = _explore(_wrong)

    assert result.fails_always
    assert result.ran == 1
    (failure,) = result.failures
    assert failure.needs == frozenset()


@pytest.mark.nightly
def test_scenarios_without_a_verdict_are_counted_with_their_reason() -> None:
    """Rejected and refused scenarios are neither failures nor covered."""

    def judged(scenario: Scenario) -> Outcome | None:
        if scenario.world_size == 3:
            return Outcome(rejected="not exact")
        if scenario.world_size == 2:
            return Outcome(record=_record(scenario, Verdict.FAIL), declined="ValueError: no")
        return None

    result = _explore(judged)

    assert result.failures == []
    assert result.rejected["not exact"] + result.declined["ValueError: no"] + result.passed == result.ran
    assert not {"2", "3"} & set(result.covered["ranks"])


@pytest.mark.nightly
def test_an_engine_that_fails_now_and_then() -> None:
    """A failure that does not repeat while it is shrunk is reported as it was drawn."""
    ran: list[Scenario] = []

    def judged(scenario: Scenario) -> Outcome | None:
        ran.append(scenario)
        return _wrong(scenario) if len(ran) == 10 else None

    result = _explore(judged, examples=20)

    (failure,) = result.failures
    assert failure.scenario == failure.drawn
    assert failure.shrinks <= MAX_SHRINKS


def test_our_own_mistakes_end_the_exploration() -> None:
    """An error that is not the engine's is neither shrunk nor taken for a scenario that passes."""

    def judged(scenario: Scenario) -> Outcome | None:
        if scenario.world_size == 3:
            raise SuiteError("a mistake")
        return None

    with pytest.raises(SuiteError, match="a mistake"):
        _explore(judged)


def test_the_number_of_failures_has_a_limit() -> None:
    """Whoever asks for one gets one."""

    def judged(scenario: Scenario) -> Outcome | None:
        return _wrong(scenario, check=scenario.choice["optimizer"]) if scenario != Scenario() else None

    explorer = Explorer(_Engine(judged), ALL, Budget(max_examples=40), max_shrinks=0, max_failures=1)

    assert len(explorer.explore().failures) == 1


def test_the_budget_of_seconds() -> None:
    """It ends by the clock, also while a failure is shrunk."""
    times = iter(range(10_000))
    budget = Budget(seconds=25, clock=lambda: next(times))
    engine = _Engine(lambda scenario: _wrong(scenario) if scenario.features else None)
    result = Explorer(engine, ALL, budget).explore()

    assert 0 < len(engine.ran) <= 25
    assert 25 <= result.seconds < 100


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("rank 0 raised ValueError: expected 3 rows, got 7", "rank 2 raised ValueError: expected 5 rows, got 1", True),
        ("rank 0 raised ValueError: no parameter 'a.b'", "rank 0 raised ValueError: no parameter 'c'", True),
        ("rank 0 raised ValueError: expected rows", "rank 0 raised KeyError: expected rows", False),
    ],
)
def test_exceptions_with_the_same_text_are_the_same_failure(first: str, second: str, same: bool) -> None:
    """Numbers, names and ranks belong to the scenario."""
    made = []
    for message in (first, second):
        finding = Finding(requirement="R000", check="training", message=message)
        made.append(signature_of(Outcome(record=_record(Scenario(), Verdict.FAIL, finding, traceback="Traceback"))))

    assert (made[0] == made[1]) is same


def test_the_engines_frame_is_part_of_the_signature() -> None:
    """The same text from two places is two failures."""

    def raised(function: str) -> Signature:
        text = f'Traceback (most recent call last):\n  File "/acme/unit.py", line 12, in {function}\nValueError: no'
        finding = Finding(requirement="R000", check="training", message="rank 0 raised ValueError: no")
        return signature_of(Outcome(record=_record(Scenario(), Verdict.FAIL, finding, traceback=text)))

    assert raised("unshard") != raised("reshard")
    assert "unshard of unit.py" in str(raised("unshard"))


def test_the_summary_names_counts_and_reasons() -> None:
    """The summary shows what ran, what could not be judged and why, and every value of every axis."""
    text = summary({
        "ran": 9, "passed": 5, "rejected": {"not exact": 2}, "declined": {"ValueError: no": 1}, "left_out": 4,
        "covered": {"ranks": {"2": 5, "3": 1}}, "shrinks": 7, "seconds": 30.0,
    })  # fmt: skip

    assert "9 examples ran in 30 s, 32 a minute: 5 passed" in text
    assert "could not be judged: 2 (not exact)" in text
    assert "refused by the engine: 1 (ValueError: no)" in text
    assert "7 more were run" in text
    assert "4 were left out" in text
    assert "ranks: 2 5, 3 1" in text


@pytest.mark.parametrize("size", [{"steps": 9}, {"hidden": 500}, {"ranks": 7}, {"names": ("a", "b", "c")}, {}])
def test_a_failure_keeps_the_size_that_it_takes(size: dict[str, Any]) -> None:
    """Everything else of the training becomes as small as usual, and the report names what it takes."""
    large = Scenario.of(
        {"ranks": "2", "dropout": "in each block", "use": "one twice"},
        extent=Extent(steps=9, blocks=5, hidden=500, ranks=7, names=("a", "b", "c")),
    )

    def fails(scenario: Scenario) -> bool:
        is_large = all(getattr(scenario.extent, name) == value for name, value in size.items())
        return is_large and scenario.choice["use"] == "one twice"

    smallest, _ = shrunk(large, fails)

    assert smallest.extent == Extent(**size)
    assert smallest.features == {"use: one twice", *Extent(**size).in_words()}
