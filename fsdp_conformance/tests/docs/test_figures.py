"""Figures in README and in the pages are found by the words around them, and brought up to date."""

from __future__ import annotations

import re

import pytest

from fsdp_conformance import contract
from pages.blocks import pages, text_of
from pages.figures import FIGURES, with_figures
from pages.generated import GENERATED


def _written() -> list[str]:
    """The pages that people write; generated ones have their own test."""
    return [page for page in pages() if page not in GENERATED]


@pytest.mark.parametrize("pattern", FIGURES)
def test_the_words_around_a_figure_stand_somewhere(pattern: str) -> None:
    """Otherwise a figure whose sentence was rewritten would no longer be looked at."""
    assert any(re.search(pattern, text_of(page)) for page in _written())


def test_an_old_figure_is_replaced_and_nothing_else() -> None:
    """The words, and figures that no pattern is about, stay."""
    old = (
        "12 requirements in 3 cases, in 5 steps; tests/test_conformance.py   1 cases as tests\n"
        "| FSDP1 | 35 | 17 | 2 | 3 | 0 | 13 | 0 |\n"
    )
    new = with_figures(old)

    assert new != old
    assert re.sub(r"\d+", "", new) == re.sub(r"\d+", "", old)
    assert new.count(", in 5 steps") == 1
    assert new.splitlines()[-1] == old.splitlines()[-1], "a table of something else"
    assert with_figures(new) == new


def test_the_page_of_requirements_counts_them() -> None:
    """All of the contract, whatever profile has cases for them."""
    assert f"{len(contract.load().requirements)} requirements" in text_of("docs/requirements.md")
