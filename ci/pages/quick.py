"""
The choice of the cases of the profile `quick`, and what they are worth.

A case that needs what an engine does not declare shows nothing about it. So the choice is made for all capability sets
of the bundled adapters at once: for each, as many known-wrong engines as its minute of cases can kill, and as many of
the capabilities that it declares. Rows of pairs complete it, since a row asks for a dozen features at once: together
they have nearly every value that an engine can be asked for.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from fsdp_conformance.contract import profile as profiles
from fsdp_conformance.contract.case import Case
from fsdp_conformance.contract.gate import declined_flags
from fsdp_conformance.contract.profile import COMPONENT_CHAPTERS, collect_cases, load_profile
from fsdp_conformance.scenarios import rows
from fsdp_conformance.scenarios.axes import SPACE
from pages import scoreboard

#: The profile of this date. Its cases are chosen again only by --write, so that a nightly job compares like with like.
NAME = "quick-2026.11"

#: Cases that an engine with few capabilities runs, without rows; others run some more. With the rows a minute or two
#: on two cores: the reference took 76 s, and FSDP2 99 s, of which a case that waits for a deadline has 26.
CASES = 45
ROWS = 8

#: What the first case that needs a capability is worth, in known-wrong engines: the ones in the list are not all that
#: can be wrong with a feature.
CAPABILITY_WORTH = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Worth:
    """The worth of the profile for engines with the capabilities of one adapter."""

    adapters: tuple[str, ...]
    cases: int
    """Those that such an engine runs."""
    asked: int
    """Capabilities of the adapter that these cases ask for, rows of pairs among them."""
    askable: int
    """Those that any case on two ranks asks for."""
    killed: int
    """Known-wrong engines that these cases kill."""
    possible: int
    """Those that all cases on two ranks kill, which such an engine runs."""


def candidates(cases: Iterable[Case]) -> list[Case]:
    """Cases on two ranks of the CPU that judge an engine as a whole."""
    return [
        case
        for case in cases
        if case.world_size == 2 and not case.environment and not case.is_own and case.chapter not in COMPONENT_CHAPTERS
    ]


def chosen(cases: Iterable[Case], capabilities: Collection[frozenset[str]], count: int = CASES) -> list[Case]:
    """
    The few cases that kill the most known-wrong engines and need the most capabilities, added up over the capability
    sets, by id.

    One after the other: the case that adds the most to the sets that have fewer than `count` cases, then the one with
    the fewest needs, then the first by id.
    """
    left = candidates(cases)
    running = {case.id: [flags for flags in capabilities if _runs(case, flags)] for case in left}
    killed: dict[frozenset[str], set[str]] = {flags: set() for flags in capabilities}
    needed: dict[frozenset[str], set[str]] = {flags: set() for flags in capabilities}
    numbers = dict.fromkeys(capabilities, 0)

    def gain(case: Case) -> int:
        return sum(
            len({*case.kills} - killed[flags]) + CAPABILITY_WORTH * len({*case.needs} - needed[flags])
            for flags in running[case.id]
            if numbers[flags] < count
        )

    best: list[Case] = []
    while left:
        case = min(left, key=lambda case: (-gain(case), len(case.needs), case.id))
        if not gain(case):
            break
        best.append(case)
        left.remove(case)
        for flags in running[case.id]:
            numbers[flags] += 1
            killed[flags] |= {*case.kills}
            needed[flags] |= {*case.needs}
    return sorted(best, key=lambda case: case.id)


@cache
def values_asked(row: int, flags: frozenset[str]) -> frozenset[tuple[str, str]]:
    """Axis and value of everything but the plain that a row asks of an engine with these capabilities."""
    choice = rows.for_engine(row, flags).scenario.choice
    return frozenset(SPACE.special(choice).items())


def chosen_rows(capabilities: Collection[frozenset[str]], count: int = ROWS) -> list[int]:
    """
    The few rows on two ranks that have the most values, as a share of those that an engine can be asked for, added up
    over the capability sets; by number.
    """
    numbers = [number for number, row in enumerate(rows.pairs(), 1) if row.choice["ranks"] == "2"]
    left = {flags: set[tuple[str, str]]().union(*(values_asked(n, flags) for n in numbers)) for flags in capabilities}
    total = {flags: len(values) for flags, values in left.items()}
    best: list[int] = []
    for _ in range(count):
        best.append(
            max(numbers, key=lambda n: sum(len(values_asked(n, flags) & left[flags]) / total[flags] for flags in left))
        )
        for flags in left:
            left[flags] -= values_asked(best[-1], flags)
    return sorted(best)


def worth(
    cases: Collection[Case], quick: Collection[str], capabilities: Mapping[str, frozenset[str]]
) -> Iterator[Worth]:
    """The worth of the cases with the ids in `quick`; adapters that declare the same are one."""
    for flags in dict.fromkeys(capabilities.values()):
        runs = [case for case in candidates(cases) if _runs(case, flags)]
        yield Worth(
            adapters=tuple(name for name, declared in capabilities.items() if declared == flags),
            cases=sum(case.id in quick for case in runs),
            asked=len(set().union(*(_asked(case, flags) for case in runs if case.id in quick))),
            askable=len(set().union(*(_asked(case, flags) for case in runs))),
            killed=len({name for case in runs if case.id in quick for name in case.kills}),
            possible=len({name for case in runs for name in case.kills}),
        )


def capabilities() -> dict[str, frozenset[str]]:
    """The flags that each bundled adapter of a whole engine declares on the CPU."""
    components = {tally.name for tally in scoreboard.kept() if all("components" in run.profile for run in tally.runs)}
    return {name: declared("cpu") for name, declared in scoreboard.bundled().items() if name not in components}


def markdown() -> str:
    """A table with the worth of the profile, the adapters with the fewest cases first."""
    quick = load_profile(NAME)
    table = sorted(
        worth(collect_cases(), quick.by_id, capabilities()), key=lambda row: (row.cases, row.killed, row.adapters)
    )
    return "\n".join(
        (
            "| capabilities of | cases | capabilities that they ask for | known-wrong engines that they kill |",
            "|---|--:|--:|--:|",
            *(
                f"| {', '.join(row.adapters)} | {row.cases} | {row.asked} of {row.askable} "
                f"| {row.killed} of {row.possible} |"
                for row in table
            ),
            "",
        )
    )


def main(arguments: list[str]) -> int:
    """Print what the profile is worth; with --write, after choosing its cases again. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="ci/quick", description="The profile quick: what it is worth.")
    parser.add_argument("--write", action="store_true", help="choose its cases again, and write it")
    if parser.parse_args(arguments).write:
        sets = set(capabilities().values())
        cases = chosen((case for case in collect_cases() if not case.id.startswith(rows.ID)), sets)
        names = [case.id for case in cases] + [f"{rows.ID}{number}-ws2" for number in chosen_rows(sets)]
        status = profiles.main(["--write", NAME, "--not-certifying", "--only", *names])
        if status:
            return status
    print(markdown(), end="")
    return 0


def _asked(case: Case, flags: frozenset[str]) -> set[str]:
    """The capabilities that a case asks an engine for which declares these."""
    asked = {*case.needs}
    number = rows.number_of(case.id)
    if number is not None:
        asked |= SPACE.needs(rows.for_engine(number, flags).scenario.choice)
    return asked & flags


def _runs(case: Case, flags: frozenset[str]) -> bool:
    return not declined_flags(case, declared=lambda device: flags, device="cpu")
