"""The stored verdicts as the site shows them: engines, requirements, cases that fail, and the defects behind them."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdp_conformance import contract
from fsdp_conformance.contract import CHAPTERS, Requirement
from fsdp_conformance.contract.profile import FULL, Entry, load_profile
from fsdp_conformance.mutants import MUTANTS
from fsdp_conformance.report.coverage import Row, Seen, kind_of_case
from fsdp_conformance.report.tally import Tally
from pages import scoreboard
from pages.failures import Defect, Failures


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """An engine that fails a requirement."""

    engine: str
    requirement: Requirement
    cases: tuple[str, ...]
    total: int
    """How many cases bind the requirement."""
    defects: tuple[Defect, ...]
    """Those that make the cases fail."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """All of it."""

    engines: tuple[Tally, ...]
    rows: tuple[Row, ...]
    entries: tuple[Entry, ...]
    summaries: Mapping[str, Failures]
    """By engine."""
    failed: tuple[Failed, ...]

    def of_engine(self, name: str) -> list[Failed]:
        """The requirements that an engine fails."""
        return [each for each in self.failed if each.engine == name]

    def of_requirement(self, name: str) -> list[Failed]:
        """The engines that fail a requirement."""
        return [each for each in self.failed if each.requirement.id == name]

    def column(self, name: str) -> list[tuple[Row, Seen]]:
        """The rows with the cells of one engine."""
        place = [engine.name for engine in self.engines].index(name)
        return [(row, row.cells[place]) for row in self.rows]

    def chapters(self) -> list[tuple[str, str, list[Row]]]:
        """Letter, title and rows of each chapter."""
        return [
            (letter, title, rows)
            for letter, title in CHAPTERS.items()
            if (rows := [row for row in self.rows if row.requirement.chapter == letter])
        ]

    def cases_of(self, requirement: str) -> tuple[list[Entry], list[tuple[str, int]]]:
        """The cases that test a requirement, and how many cases of other requirements judge it as well."""
        own = [entry for entry in self.entries if entry.primary == requirement]
        others = Counter(entry.primary for entry in self.entries if requirement in entry.requirements[1:])
        return own, sorted(others.items())

    def failing(self, case: str) -> list[str]:
        """The engines that fail a case."""
        return list(dict.fromkeys(each.engine for each in self.failed if case in each.cases))

    def scripts(self) -> dict[str, list[Defect]]:
        """Path of each script to the defects of engines that it shows."""
        defects = [defect for each in self.summaries.values() for defect in each.defects if defect.script]
        return {path: [each for each in defects if each.script == path] for path in sorted({d.script for d in defects})}


@functools.cache
def results() -> Results:
    """Of today's cases and the stored verdicts."""
    table = scoreboard.table()
    entries = load_profile(FULL).entries
    summaries = {each.engine: each for each in scoreboard.failed()}
    failed = [
        _failed(engine, row.requirement, entries, summaries[engine.name])
        for row in table.rows
        for engine, seen in zip(table.engines, row.cells, strict=True)
        if seen.failed
    ]
    return Results(engines=table.engines, rows=table.rows, entries=entries, summaries=summaries, failed=tuple(failed))


def _failed(engine: Tally, requirement: Requirement, entries: Sequence[Entry], summary: Failures) -> Failed:
    bound = [entry for entry in entries if requirement.id in entry.requirements]
    cases = tuple(
        entry.id for entry in bound if kind_of_case(requirement.id, entry, engine.cases.get(entry.id)) == "failed"
    )
    defects = tuple(defect for defect in summary.defects if set(defect.cases) & set(cases))
    return Failed(engine=engine.name, requirement=requirement, cases=cases, total=len(bound), defects=defects)


def known_wrong(requirement: str) -> dict[str, str]:
    """The engines with a seeded defect that name a requirement, and the defect."""
    return {name: mutant.defect for name, mutant in MUTANTS.items() if requirement in mutant.requirements}


def reason_without_case(requirement: str) -> str:
    """The reason for having no case or no adapter; else empty."""
    return {**contract.uncovered(), **contract.undeclared()}.get(requirement, "")
