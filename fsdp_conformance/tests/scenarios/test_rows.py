"""The frozen rows have every possible pair, also of what a single engine declares; each can be built and judged."""

from __future__ import annotations

import json

import pytest

from fsdp_conformance.adapters import registry
from fsdp_conformance.capability import CAPABILITIES
from fsdp_conformance.explore.building import example_of
from fsdp_conformance.explore.freeze import why_unjudgeable
from fsdp_conformance.scenarios import rows
from fsdp_conformance.scenarios.axes import SPACE
from fsdp_conformance.scenarios.covering import Coverage

pytestmark = pytest.mark.slow

NUMBERS = range(1, len(rows.pairs()) + 1)


def test_every_possible_pair_is_in_a_row() -> None:
    """If one is missing, append rows: python -m fsdp_conformance.explore.freeze."""
    coverage = Coverage(SPACE, rows=[row.choice for row in rows.pairs()])

    assert list(coverage.combinations_left()) == []
    assert coverage.possible > 10_000


def test_the_file_is_what_its_rows_are_written_as() -> None:
    """One row a line, each once, so that a change of a row is seen in review."""
    text = rows.FILE.read_text(encoding="utf-8")

    assert rows.to_text(rows.pairs()) == text
    assert len(set(rows.pairs())) == len(rows.pairs()) == len(json.loads(text)["rows"])


@pytest.mark.parametrize("number", NUMBERS)
def test_every_row_builds_the_parameters_that_are_predicted(number: int) -> None:
    """Plans, schedules and checks go by the predicted shapes."""
    row = rows.pairs()[number - 1]
    example = example_of(row)
    model = example.workload().build(0)

    assert {name: tuple(param.shape) for name, param in model.named_parameters()} == example.model.shapes()
    assert any(param.requires_grad for param in model.parameters())
    assert example.world_size == row.world_size


def _declared(name: str) -> frozenset[str]:
    """The flags that an adapter declares on the CPU, also if its engine is not installed here."""
    adapter = registry.load(name)
    return adapter.declared() - frozenset(adapter.declines_on.get("cpu", ()))


@pytest.mark.daily(8)
@pytest.mark.parametrize("name", registry.names())
def test_an_engine_meets_every_pair_that_it_declares(name: str) -> None:
    """An engine that lacks some capabilities has rows without them, which still have all that it can be asked for."""
    declared = _declared(name)

    assert list(rows.coverage(declared).combinations_left()) == []
    assert all(rows.for_engine(number, declared).scenario.needs <= declared for number in NUMBERS)


def test_an_engine_that_declares_nothing_or_everything() -> None:
    """The first has rows of plain values alone, the other has the rows as they are."""
    everything = frozenset(CAPABILITIES)

    assert [rows.for_engine(number, everything) for number in NUMBERS] == [rows.EngineRow(row) for row in rows.pairs()]
    for number in NUMBERS:
        adapted = rows.for_engine(number, frozenset()).scenario
        assert adapted.needs == frozenset()
        assert adapted.world_size == rows.pairs()[number - 1].world_size
        assert adapted.salt == rows.pairs()[number - 1].salt


AVOIDED = (
    {"optimizer": "adam, foreach", "dropout": "in each block"},
    {"ranks": "3", "rows": "uneven"},
)


def test_rows_are_without_what_an_engine_avoids() -> None:
    """Exactly these pairs are left, and each row says which of them it would have."""
    everything = frozenset(CAPABILITIES)
    for number in NUMBERS:
        mine = rows.for_engine(number, everything, AVOIDED)
        row = rows.pairs()[number - 1]
        avoided = [values for values in AVOIDED if values.items() <= row.choice.items()]
        assert not any(values.items() <= mine.scenario.choice.items() for values in AVOIDED)
        assert len(mine.without) == len(avoided)
        assert mine.scenario.world_size == row.world_size
        assert (mine.scenario == row) is (avoided == [])
    coverage = rows.coverage(everything, AVOIDED)

    assert all(values in coverage.combinations_left() for values in AVOIDED)


def test_the_coverage_of_some_rows() -> None:
    """A profile with fewer rows has fewer pairs."""
    everything = frozenset(CAPABILITIES)
    none, one, two = (rows.coverage(everything, rows=numbers).covered for numbers in ((), (1,), (1, 2)))

    assert none == 0 < one < two <= 2 * one


@pytest.mark.nightly
@pytest.mark.parametrize("number", NUMBERS)
def test_every_row_can_be_judged(number: int) -> None:
    """Its references are exact, or their bounds are narrow enough."""
    assert why_unjudgeable(rows.pairs()[number - 1]) is None
