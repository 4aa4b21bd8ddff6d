"""The choice of the profile quick: for engines with few capabilities as for those with many."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

from fsdp_conformance.tests.guards import checkout
from fsdp_conformance.tests.report.evidence import a_case

pytestmark = checkout.required

RICH, PLAIN = frozenset({"zero3", "cpu_compute", "hsdp"}), frozenset({"zero3", "cpu_compute"})


@pytest.fixture(name="quick", scope="module")
def _quick() -> ModuleType:
    return importlib.import_module("pages.quick")


def test_cases_are_chosen_one_after_the_other(quick: ModuleType) -> None:
    """Each adds a kill to those before; of equals, the one that needs less. Others than two ranks are too dear."""
    one = a_case(id="R001/one-ws2", kills=("a", "b"), needs=("hsdp",))
    same = a_case(id="R001/same-ws2", kills=("a", "b"))
    other = a_case(id="R001/other-ws2", kills=("b", "c"))
    large = a_case(id="R001/large-ws4", kills=("d",), world_size=4)
    elsewhere = a_case(id="R001/elsewhere-ws2", kills=("e",), environment=("cuda",))
    cases = [one, same, other, large, elsewhere]

    assert [case.id for case in quick.chosen(cases, [PLAIN])] == ["R001/other-ws2", "R001/same-ws2"]
    assert [case.id for case in quick.chosen(cases, [PLAIN], 1)] == ["R001/other-ws2"]


def test_what_an_engine_declines_finds_nothing_in_it(quick: ModuleType) -> None:
    """So an engine with few capabilities gets a case that adds nothing for the others."""
    rich = a_case(id="R001/rich-ws2", kills=("a", "b", "c"), needs=("hsdp",))
    plain = a_case(id="R001/plain-ws2", kills=("a",))

    assert [case.id for case in quick.chosen([rich, plain], [RICH])] == ["R001/rich-ws2"]
    assert [case.id for case in quick.chosen([rich, plain], [RICH, PLAIN])] == ["R001/plain-ws2", "R001/rich-ws2"]
    worth = quick.worth([rich, plain], {"R001/rich-ws2"}, {"one": RICH, "two": PLAIN, "same": PLAIN})
    assert [(each.adapters, each.cases, each.asked, each.askable, each.killed, each.possible) for each in worth] == [
        (("one",), 1, 1, 1, 3, 3),
        (("two", "same"), 0, 0, 0, 0, 1),
    ]


def test_a_capability_is_worth_a_case(quick: ModuleType) -> None:
    """Also where no known-wrong engine is left that only this case kills; one case of each capability is enough."""
    plain = a_case(id="R001/plain-ws2", kills=("a", "b"))
    hybrid = a_case(id="R001/hybrid-ws2", kills=("a",), needs=("hsdp",))
    another = a_case(id="R001/another-ws2", kills=("b",), needs=("hsdp",))

    names = [case.id for case in quick.chosen([plain, hybrid, another], [RICH])]
    assert names == ["R001/another-ws2", "R001/plain-ws2"]


@pytest.mark.slow
def test_rows_have_nearly_every_value_that_an_engine_can_be_asked_for(quick: ModuleType) -> None:
    """In few rows on two ranks, for engines with many capabilities as for those with few."""
    sets = set(quick.capabilities().values())
    all_rows = [number for number, row in enumerate(quick.rows.pairs(), 1) if row.choice["ranks"] == "2"]
    chosen = quick.chosen_rows(sets)

    assert len({*chosen}) == quick.ROWS
    assert {*chosen} <= {*all_rows}
    for flags in sets:
        possible = frozenset[tuple[str, str]]().union(*(quick.values_asked(number, flags) for number in all_rows))
        asked = frozenset[tuple[str, str]]().union(*(quick.values_asked(number, flags) for number in chosen))
        assert len(asked) > 0.85 * len(possible)


@pytest.mark.nightly
def test_it_finds_most_of_what_can_be_wrong_in_a_simple_engine(quick: ModuleType) -> None:
    """Also how it accumulates without any capability for it, which is where everyday bugs are."""
    rows = list(quick.worth(quick.collect_cases(), quick.load_profile(quick.NAME).by_id, quick.capabilities()))
    simplest = min(rows, key=lambda row: row.possible)

    count = quick.CASES + quick.ROWS
    assert simplest.killed > 0.8 * simplest.possible
    assert simplest.asked > 0.7 * simplest.askable
    assert all(count <= row.cases <= 1.2 * count for row in rows)
