"""
Numbers in README and in the pages of what the suite has: requirements, cases, known-wrong engines, axes, engines.

Figures of a measurement are in other words ("had then", "that there were"), because they do not change with the suite.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from fsdp_conformance import contract
from fsdp_conformance.contract.profile import load_profile
from fsdp_conformance.contract.scopes import BASE
from fsdp_conformance.mutants import MUTANTS
from fsdp_conformance.scenarios.axes import SPACE
from fsdp_conformance.scenarios.covering import Coverage
from fsdp_conformance.selftest.cases import bound_cases
from fsdp_conformance.tests.docs.test_pages import rows, section
from pages.blocks import pages, text_of
from pages.generated import COMPONENTS, CORE, GENERATED
from pages.scoreboard import KEPT

#: Engines that README has figures of, by the names of their files in ci/verdicts.
_IN_README = {"reference", "reference-components", "torch-fsdp2", "torch-fsdp1", "torch-ddp", "torch-dtensor"}

_WORDS = ("fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty")


def _size(profile: str) -> str:
    return f"{len(load_profile(profile).entries):,}"


def _requirements_and_cases() -> tuple[str, str]:
    return str(len({name for entry in load_profile(CORE).entries for name in entry.requirements})), _size(CORE)


def _extensions() -> str:
    return str(len({entry.scope for entry in load_profile(CORE).entries if len(entry.scope) == 1} - {BASE}))


def _axes() -> tuple[str, str, str]:
    return str(len(SPACE.axes)), str(len(SPACE.value_of)), f"{Coverage(SPACE).possible // 1000:,},000"


def _wrong_engines() -> tuple[str, str]:
    return f"{len(MUTANTS):,}", f"{sum(len(bound.case.kills) for bound in bound_cases()):,}"


def _fitting(devices: int) -> tuple[str, str]:
    """How many cases of the core fit on so many devices, and their ranks. The simulated accelerator has any number."""
    entries = [
        entry
        for entry in load_profile(CORE).entries
        if entry.world_size <= devices or "stream_order" in entry.environment
    ]
    return f"{len(entries):,}", f"{sum(entry.world_size for entry in entries):,}"


def _further_engines() -> str:
    return _WORDS[len({path.stem for path in KEPT.glob("*.json")} - _IN_README) - 14]


_N = r"([\d,]+)"

#: The words around figures, and the figures.
FIGURES: dict[str, Callable[[], str | tuple[str, ...]]] = {
    rf"{_N} requirements in {_N} cases": _requirements_and_cases,
    rf"778 of {_N} cases were not run": lambda: _size(CORE),
    rf"the reference engine \| {_N} \|": lambda: _size(CORE),
    rf"the reference engine passes all {_N} cases": lambda: _size(COMPONENTS),
    rf"`--profile {re.escape(COMPONENTS)}` \({_N} cases\)": lambda: _size(COMPONENTS),
    rf"tests/test_conformance\.py +{_N} cases as tests": lambda: _size("quick"),
    rf"CERTIFIED base.*? of {_N} extensions": _extensions,
    rf"each of {_N} axes\. There are {_N} values, and more than {_N} pairs": _axes,
    rf"has {_N} known-wrong engines, in {_N} pairs with cases": _wrong_engines,
    rf"only {_N} of {_N} cases fit": lambda: (_fitting(1)[0], _size(CORE)),
    rf"{_N} cases of the core profile fit on eight GPUs, with {_N} ranks": lambda: _fitting(8),
    rf"start \+ {_N} x T": lambda: _fitting(8)[1],
    r"\[The scoreboard\]\(docs/scoreboard\.md\) has (\w+) more engines": _further_engines,
}

#: Outputs of commands that name a profile and the number of its cases.
_OF_PROFILES = (
    rf"· (?P<profile>\S+) · [\d,]+ of (?P<cases>{_N[1:-1]}) cases selected",
    rf"(?:CERTIFIED.*?|PRIVATE RUN) +(?P<profile>\S+-2026\.\d\d) .* of (?P<cases>{_N[1:-1]}) cases reported",
    rf"[\d,]+ of (?P<cases>{_N[1:-1]}) cases in (?P<profile>\S+),",
)


def _written() -> dict[str, str]:
    """The pages that people write; generated ones have their own test."""
    return {page: text_of(page) for page in pages() if page not in GENERATED}


@pytest.mark.parametrize("pattern", FIGURES)
def test_figures_are_todays(pattern: str) -> None:
    """Wherever these words stand, and they do stand somewhere."""
    expected = FIGURES[pattern]()
    places = {page: set(re.findall(pattern, text)) for page, text in _written().items()}

    assert any(places.values())
    wrong = {page: got - {expected} for page, got in places.items() if got - {expected}}
    assert wrong == {}, f"expected {expected}"


@pytest.mark.parametrize("pattern", _OF_PROFILES)
def test_outputs_have_todays_profiles(pattern: str) -> None:
    """The number of cases is that of the profile that the line names."""
    got = [
        (page, match["profile"], match["cases"])
        for page, text in _written().items()
        for match in re.finditer(pattern, text)
    ]

    assert got
    assert got == [(page, profile, _size(profile)) for page, profile, _ in got]


def test_the_cases_that_fit_are_counted() -> None:
    """By the number of GPUs."""
    table = rows(section("docs/gpus-and-clusters.md", "What a machine needs"))[1:]

    assert {row[0]: row[1].split()[0] for row in table} == {
        size: _fitting(int(size))[0] for size in ("1", "2", "4", "8")
    }
    assert f"{len(contract.load().requirements)} requirements" in text_of("docs/requirements.md")
