"""Failing rows are shrunk to what they take, with engines that are functions of the scenario; one is a real one."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp_conformance.diagnosis.headline import headline_of
from fsdp_conformance.errors import SuiteError
from fsdp_conformance.explore import shrinking
from fsdp_conformance.explore.exploration import Runs
from fsdp_conformance.explore.pool import Outcome
from fsdp_conformance.explore.shrinking import ROW_S, RowShrinker
from fsdp_conformance.outcome.records import CaseRecord, Takes
from fsdp_conformance.report.runfile import read
from fsdp_conformance.run_settings import RunOrder
from fsdp_conformance.scenarios import rows
from fsdp_conformance.scenarios.scenario import Scenario
from fsdp_conformance.tests.cli.cli_runs import said
from fsdp_conformance.tests.explore.test_exploration import Judged, _Engine, _wrong

ROW = rows.pairs()[15]
ONE, OTHER = sorted(ROW.features)[:2]


@pytest.fixture
def shrinker_on(monkeypatch: pytest.MonkeyPatch) -> Callable[..., RowShrinker]:
    """A shrinker for the given engines, in the order in which they are tried."""

    def make(*engines: Runs, clock: Callable[[], float] = time.monotonic) -> RowShrinker:
        monkeypatch.setattr(RowShrinker, "_places", lambda self, order: list(engines))
        return RowShrinker(clock=clock)

    return make


def _engine(*features: str, check: str = "gradient parity") -> _Engine:
    return _Engine(lambda scenario: _wrong(scenario, check) if set(features) <= scenario.features else None)


def _failure(case: str = f"R000/pairs-row16-ws{ROW.world_size}", scenario: Scenario = ROW) -> CaseRecord:
    record = _wrong(scenario).record
    assert record is not None
    record.case = case
    return record


def test_two_values_of_thirty_are_named(shrinker_on: Callable[..., RowShrinker]) -> None:
    """Both are needed, and the sentence says so."""
    takes = shrinker_on(_engine(ONE, OTHER)).takes(_failure(), ROW, RunOrder())

    assert takes is not None
    assert {ONE, OTHER} <= set(takes.values)
    assert takes.complete
    assert takes.sentence().startswith("; ".join(takes.values) + "; without ")
    assert takes.sentence().endswith(f"it does not fail in this way ({takes.trainings} plainer trainings tried)")


def test_a_row_that_fails_in_the_same_way_is_not_shrunk_again(shrinker_on: Callable[..., RowShrinker]) -> None:
    """It refers to the first one; a row without these values is shrunk itself."""
    engine = _engine(ONE)
    shrinker = shrinker_on(engine)
    first = shrinker.takes(_failure(), ROW, RunOrder())
    trainings = len(engine.ran)
    again = shrinker.takes(_failure("R000/pairs-row17-ws2"), ROW, RunOrder())

    assert first == Takes(values=(ONE,), trainings=first.trainings if first else 0)
    assert again is not None
    assert again.values == (ONE,)
    assert again.sentence() == f"{ONE} (as R000/pairs-row16-ws{ROW.world_size})"
    assert len(engine.ran) == trainings
    other = next(row for row in rows.pairs() if ONE not in row.features)
    assert shrinker.takes(_failure(scenario=other), other, RunOrder()) is None


def test_a_cause_that_shows_only_in_a_plainer_training_is_named(shrinker_on: Callable[..., RowShrinker]) -> None:
    """It is the cause of the row, and of its headline; a row with a cause is only explained by the same one."""

    cause = "wrong sign: got / expected = -1 at every element"

    def judged(scenario: Scenario) -> Outcome | None:
        if ONE not in scenario.features:
            return None
        return _wrong(scenario, likely=cause if len(scenario.values) < 3 else "")

    record = _wrong(ROW, likely="").record
    assert record is not None
    record.takes = shrinker_on(_Engine(judged)).takes(record, ROW, RunOrder())

    assert record.takes is not None
    assert record.takes.values == (ONE,)
    headline = headline_of(record)
    assert headline is not None
    assert headline.likely == f"{cause}, in the plainest training that fails in this way"
    assert shrinker_on(_Engine(judged)).takes(_failure(), ROW, RunOrder()) is None


def test_a_finding_that_a_better_oracle_precedes_is_the_same_failure(shrinker_on: Callable[..., RowShrinker]) -> None:
    """Without one of the row's values, the gradient is seen to be wrong, and the parameter is after it."""

    def judged(scenario: Scenario) -> Outcome | None:
        if ONE not in scenario.features:
            return None
        outcome = _wrong(scenario, "parameter parity", likely="")
        if OTHER not in scenario.features and outcome.record is not None:
            gradient = _wrong(scenario, "gradient parity", likely="rank 1 missing: equals rank 0's").record
            assert gradient is not None
            outcome.record.findings.insert(0, gradient.findings[0])
        return outcome

    record = _wrong(ROW, "parameter parity", likely="").record
    assert record is not None
    takes = shrinker_on(_Engine(judged)).takes(record, ROW, RunOrder())

    assert takes is not None
    assert takes.values == (ONE,)
    assert takes.likely == "rank 1 missing: equals rank 0's"


def test_an_engine_that_always_fails_takes_nothing_special(shrinker_on: Callable[..., RowShrinker]) -> None:
    """Every further row is explained by the first."""
    engine = _engine()
    shrinker = shrinker_on(engine)
    takes = shrinker.takes(_failure(), ROW, RunOrder())

    assert takes is not None
    assert takes.sentence() == "nothing special: the plainest training fails in the same way"
    assert len(engine.ran) == 2


def test_processes_are_used_where_simulated_ranks_do_not_show_it(shrinker_on: Callable[..., RowShrinker]) -> None:
    """An engine that passes, fails otherwise, or breaks the suite there is shrunk on processes, or not at all."""
    elsewhere = _engine(ONE)
    passes, otherwise = _Engine(lambda scenario: None), _engine(check="loss parity")
    for simulated in (passes, otherwise):
        takes = shrinker_on(simulated, elsewhere).takes(_failure(), ROW, RunOrder())
        assert takes is not None
        assert takes.values == (ONE,)
        assert len(simulated.ran) == 1
    assert shrinker_on(passes, otherwise).takes(_failure(), ROW, RunOrder()) is None

    def breaks(scenario: Scenario) -> Outcome:
        raise SuiteError("broken")

    assert shrinker_on(_Engine(breaks)).takes(_failure(), ROW, RunOrder()) is None


class _Slow(_Engine):
    """An engine whose trainings after the first take a quarter of a row's time, by a clock that is given."""

    def __init__(self, judged: Judged, now: list[float], *, first: float) -> None:
        super().__init__(judged)
        self._now = now
        self._first = first

    def run(self, scenario: Scenario) -> Outcome:
        self._now[0] += ROW_S / 4 if self.ran else self._first
        return super().run(scenario)


def test_a_busy_machine_has_time_for_as_many_trainings(shrinker_on: Callable[..., RowShrinker]) -> None:
    """Where the first training is as slow as the others, the machine is."""
    now = [0.0]
    engine = _Slow(_engine(ONE, OTHER).judged, now, first=ROW_S / 4)
    takes = shrinker_on(engine, clock=lambda: now[0]).takes(_failure(), ROW, RunOrder())

    assert takes is not None
    assert takes.complete
    assert set(takes.values) == {ONE, OTHER}


def test_time_is_limited(shrinker_on: Callable[..., RowShrinker], monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that were not tried by the deadline are an upper bound; rows that fail after all time is used stay."""
    now = [0.0]
    engine = _Slow(_engine(ONE, OTHER).judged, now, first=0.0)
    shrinker = shrinker_on(engine, clock=lambda: now[0])
    takes = shrinker.takes(_failure(), ROW, RunOrder())
    assert takes is not None
    assert not takes.complete
    assert takes.sentence().startswith("at most ")
    assert {ONE, OTHER} <= set(takes.values) <= ROW.features

    monkeypatch.setattr(shrinking, "ALL_S", ROW_S)
    trainings = len(engine.ran)
    other = next(row for row in rows.pairs() if ONE not in row.features)
    assert shrinker.takes(_failure(scenario=other), other, RunOrder()) is None
    assert len(engine.ran) == trainings


@pytest.mark.slow
@pytest.mark.nightly
def test_a_run_names_what_a_failing_row_takes(tmp_path: Path) -> None:
    """On the screen, in the run file, and in what `explain` prints."""
    engine, case = "mutant:loses-a-row-of-the-second-micro-batch", f"R000/pairs-row16-ws{ROW.world_size}"
    words = ("--implementation", engine, "--case", case, "--report", "report")
    # However slow this machine is, all of the search is made.
    run = said("run", *words, "--deadline-scale", "20", cwd=tmp_path, timeout_s=20 * ROW_S)

    assert run.status == 1, run.out + run.err
    record = read(tmp_path / "report").records[0]
    assert record.takes is not None
    axes = [value.partition(": ")[0] for value in record.takes.values]
    assert "accumulation" in axes
    # Each of them is needed beside the others; others may take fewer.
    assert record.takes.complete
    assert len(axes) < len(ROW.values) / 3, axes
    explained = said("explain", case, "--report", "report", cwd=tmp_path)
    for text in (run.out, explained.out):
        assert f"takes     {record.takes.sentence()[:30]}" in text.replace("takes       ", "takes     ")
