"""
Figures in README and in the pages of what the suite has: requirements, cases, known-wrong engines, axes, verdicts.

Each is found by the words around it, so that a page reads like any other text; `ci/docs --write` brings it up to date.
Figures of a measurement are in other words ("had then", "that there were"), because they do not change with the suite.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

from fsdp_conformance.contract.profile import load_profile
from fsdp_conformance.contract.scopes import BASE
from fsdp_conformance.mutants import MUTANTS
from fsdp_conformance.scenarios.axes import SPACE
from fsdp_conformance.scenarios.covering import Coverage
from fsdp_conformance.selftest.cases import bound_cases
from pages import scoreboard
from pages.generated import COMPONENTS, CORE

#: Engines that README has figures of, by the names of their files in ci/verdicts.
_IN_README = {"reference", "reference-components", "torch-fsdp2", "torch-fsdp1", "torch-ddp", "torch-dtensor"}

_WORDS = ("fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty")

#: Fewer requirements than this in a row are named one by one.
_A_RUN = 3


def _size(profile: str) -> str:
    return f"{len(load_profile(profile).entries):,}"


def _requirements() -> str:
    return str(len({name for entry in load_profile(CORE).entries for name in entry.requirements}))


def _extensions() -> str:
    return str(len({entry.scope for entry in load_profile(CORE).entries if len(entry.scope) == 1} - {BASE}))


def _wrong_engines() -> tuple[str, str]:
    return f"{len(MUTANTS):,}", f"{sum(len(bound.case.kills) for bound in bound_cases()):,}"


@functools.cache
def _fitting(devices: int) -> tuple[str, str]:
    """How many cases of the core fit on so many devices, and their ranks. The simulated accelerator has any number."""
    entries = [
        entry
        for entry in load_profile(CORE).entries
        if entry.world_size <= devices or "stream_order" in entry.environment
    ]
    return f"{len(entries):,}", f"{sum(entry.world_size for entry in entries):,}"


def _further_engines() -> str:
    return _WORDS[len({path.stem for path in scoreboard.KEPT.glob("*.json")} - _IN_README) - 14]


def _verdicts(engine: str) -> tuple[str, ...]:
    """Of an engine's stored runs: the cases, those that passed, were declined and failed, and what they fail."""
    (shown,) = (each for each in scoreboard.failed() if each.engine == engine)
    place = [each.name for each in scoreboard.table().engines].index(engine)
    failing = [row.requirement.id for row in scoreboard.table().rows if row.cells[place].failed]
    total = shown.passed + shown.declined + shown.failed + shown.left
    return (*map(str, (total, shown.passed, shown.declined, shown.failed)), ", ".join(_runs(failing)) or "none")


def _runs(requirements: list[str]) -> Iterator[str]:
    """Requirements, with `R147 to R150` for several in a row."""
    starts = [0, *(n for n, (a, b) in enumerate(pairwise(requirements), 1) if int(b[1:]) != int(a[1:]) + 1)]
    for start, end in pairwise([*starts, len(requirements)]):
        row = requirements[start:end]
        yield from [f"{row[0]} to {row[-1]}"] if len(row) >= _A_RUN else row


_N = r"([\d,]+)"
_ROW = rf"\| {_N} \| {_N} \| {_N} \| {_N} \| (R[R\d, to]*\d|none)(?= ?\|)"

#: Words around figures, and the figures: one for each group of the pattern.
FIGURES: Mapping[str, Callable[[re.Match[str]], tuple[str, ...]]] = {
    rf"{_N} requirements in {_N} cases": lambda _: (_requirements(), _size(CORE)),
    # The output names three of them.
    rf"{_N} of {_N} cases were not run: (?:R000\S+\s+){{3}}and {_N} more": lambda _: (
        f"{len(load_profile(CORE).entries) - 1:,}", _size(CORE), f"{len(load_profile(CORE).entries) - 4:,}",
    ),
    rf"one case out of {_N}\b": lambda _: (_size(CORE),),
    rf"the reference engine passes all {_N} cases": lambda _: (_size(COMPONENTS),),
    rf"`--profile {re.escape(COMPONENTS)}` \({_N} cases\)": lambda _: (_size(COMPONENTS),),
    rf"tests/test_conformance\.py +{_N} cases as tests": lambda _: (_size("quick"),),
    rf"CERTIFIED base.*? of {_N} extensions": lambda _: (_extensions(),),
    rf"each of {_N} axes\. There are {_N} values, and more than {_N} pairs": lambda _: (
        str(len(SPACE.axes)), str(len(SPACE.value_of)), f"{Coverage(SPACE).possible // 1000:,},000",
    ),
    rf"has {_N} known-wrong engines, in {_N} pairs with cases": lambda _: _wrong_engines(),
    rf"only {_N} of {_N} cases fit": lambda _: (_fitting(1)[0], _size(CORE)),
    rf"\| (1) \| {_N} of {_N} \|": lambda _: ("1", _fitting(1)[0], _size(CORE)),
    rf"(?<=\n)\| ([248]) \| {_N} \|(?=\n)": lambda match: (match[1], _fitting(int(match[1]))[0]),
    rf"{_N} cases of the core profile fit on eight GPUs, with {_N} ranks": lambda _: _fitting(8),
    rf"start \+ {_N} x T": lambda _: (_fitting(8)[1],),
    r"\[The scoreboard\]\(docs/scoreboard\.md\) has (\w+) more engines": lambda _: (_further_engines(),),
    rf"the reference engine {_ROW}": lambda _: _verdicts("reference"),
    rf"(?<=\n)\| FSDP2 {_ROW}": lambda _: _verdicts("torch-fsdp2"),
    rf"(?<=\n)\| FSDP1 {_ROW}": lambda _: _verdicts("torch-fsdp1"),
    # Outputs of commands, which name a profile.
    rf"· (\S+) · {_N} of {_N} cases selected": lambda match: (match[1], match[2], _size(match[1])),
    rf"(?:CERTIFIED.*?|PRIVATE RUN) +(\S+-2026\.\d\d) .* of {_N} cases reported": lambda m: (m[1], _size(m[1])),
    rf"{_N} of {_N} cases in (\S+),": lambda match: (match[1], _size(match[3]), match[3]),
}  # fmt: skip


def with_figures(text: str) -> str:
    """The text with today's figures. Raises ConfigError if an output names a profile that does not exist."""
    for pattern, figures in FIGURES.items():
        text = re.sub(pattern, functools.partial(_filled, figures), text)
    return text


def _filled(figures: Callable[[re.Match[str]], tuple[str, ...]], match: re.Match[str]) -> str:
    """The text of the match, with the figures in the place of its groups."""
    text, place = "", match.start()
    for group, figure in enumerate(figures(match), 1):
        text += match.string[place : match.start(group)] + figure
        place = match.end(group)
    return text + match.string[place : match.end()]
