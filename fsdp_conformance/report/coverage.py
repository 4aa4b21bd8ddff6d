"""
The whole contract in one table: what judges each requirement, who can be judged, and what runs show.

A row for every requirement of the register: its cases, the known-wrong engines that are there to show that these cases
can fail, the adapters that declare what the cases need, and a cell for each engine that has run. A row without cases
has a reason instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from fsdp_conformance.contract import CHAPTERS, Contract, Requirement, load, uncovered, undeclared
from fsdp_conformance.contract.gate import declined_flags, device_for
from fsdp_conformance.contract.profile import COMPONENTS, Entry, load_profile, shipped
from fsdp_conformance.diagnosis.severity import Severity, worst_of
from fsdp_conformance.errors import UsageError
from fsdp_conformance.mutants import MUTANTS
from fsdp_conformance.report.marked import Markdown, marked, row
from fsdp_conformance.report.tally import Shown, Tally, digest_of
from fsdp_conformance.report.terminal import duration
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.verdict import ACCUSING, Verdict

Declared = Callable[[str], frozenset[str]]
"""The flags that an adapter declares on a type of device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """The results of an engine for one requirement. A case counts for every requirement that it binds."""

    passed: int = 0
    failed: int = 0
    declined: int = 0
    unjudged: int = 0
    """Not possible on that machine, inconclusive, left out, or ended by another requirement's failure."""
    absent: int = 0
    """Not in the runs, or changed since."""
    severity: Severity | None = None
    """The worst of the failed cases; None if it is not known."""

    def text(self) -> str:
        """ "✓ 12", "✓ 9 of 12", "✗ 2 of 12", "declined", "not judged" or "not run"; "" if there are no cases."""
        total = self.passed + self.failed + self.declined + self.unjudged + self.absent
        if self.failed:
            return f"✗ {self.failed} of {total}"
        if self.passed:
            return f"✓ {total}" if self.passed == total else f"✓ {self.passed} of {total}"
        words = {"not judged": self.unjudged, "not run": self.absent, "declined": self.declined}
        return next((word for word, count in words.items() if count), "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One requirement."""

    requirement: Requirement
    cases: int
    """How many bind it."""
    wrong: int
    """Known-wrong engines that name it."""
    adapters: tuple[str, ...]
    """Those that declare what at least one of the cases needs."""
    cells: tuple[Seen, ...]
    """One for each engine."""
    reason: str
    """Why no case binds it, or why no adapter declares what the cases need; else empty."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Coverage:
    """The table."""

    engines: tuple[Tally, ...]
    rows: tuple[Row, ...]
    """In the contract's order."""
    adapters: tuple[str, ...]
    """Every adapter whose declarations are known."""
    stale: tuple[tuple[int, int], ...]
    """
    For each engine: cases of its runs' profiles that it did not run or that have changed since, and cases of its runs
    that are gone.
    """
    problems: tuple[str, ...]
    """Rows that are empty without a reason, and reasons that no longer hold."""

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        return {
            "engines": [engine.name for engine in self.engines],
            "requirements": {
                row.requirement.id: {
                    "cases": row.cases,
                    "known_wrong": row.wrong,
                    "adapters": list(row.adapters),
                    "shown": {e.name: cell.text() for e, cell in zip(self.engines, row.cells, strict=True)},
                    "reason": row.reason,
                }
                for row in self.rows
            },
            "problems": list(self.problems),
        }


def coverage(
    tallies: Sequence[Tally],
    entries: Collection[Entry],
    declared: Mapping[str, Declared],
    *,
    contract: Contract | None = None,
    excused: Mapping[str, str] | None = None,
) -> Coverage:
    """
    The table for these cases. `declared` has the adapters by name, `excused` the requirements without a case or an
    adapter and the reasons, by default those of `contract/uncovered.toml`. Raises UsageError for two tallies of one
    engine.
    """
    contract, excused = contract or load(), {**uncovered(), **undeclared()} if excused is None else excused
    names = [tally.name for tally in tallies]
    if len(set(names)) != len(names):
        raise UsageError(f"each engine must have one tally, got {', '.join(names)}")
    bound: dict[str, list[Entry]] = {name: [] for name in contract.requirements}
    for entry in entries:
        for name in entry.requirements:
            bound[name].append(entry)
    runnable = {name: frozenset(_runnable(entries, flags)) for name, flags in declared.items()}
    rows = tuple(
        Row(
            requirement=requirement,
            cases=len(bound[name]),
            wrong=sum(name in mutant.requirements for mutant in MUTANTS.values()),
            adapters=tuple(
                adapter for adapter, cases in runnable.items() if any(entry.id in cases for entry in bound[name])
            ),
            cells=tuple(_seen(name, bound[name], tally.cases) for tally in tallies),
            reason=excused.get(name, ""),
        )
        for name, requirement in contract.requirements.items()
    )
    return Coverage(
        engines=tuple(tallies),
        rows=rows,
        adapters=tuple(declared),
        stale=tuple(_stale(entries, tally) for tally in tallies),
        problems=tuple(problem for row in rows for problem in _problems(row)),
    )


def markdown(table: Coverage) -> str:
    """The table in Markdown: what ran, then one table for each chapter, with the engines that have run a case of it."""
    return "\n".join(_lines(table)) + "\n"


def _lines(table: Coverage) -> Iterator[str]:
    whole = [place for place, engine in enumerate(table.engines) if not _is_of_components(engine)]
    parts = [place for place, engine in enumerate(table.engines) if _is_of_components(engine)]
    if whole:
        yield from _engines(table, whole)
    if parts:
        yield from ("", "### Components", "")
        yield from _engines(table, parts)
    for letter, members in groupby(table.rows, key=lambda row: row.requirement.chapter):
        rows = list(members)
        shown = [
            index
            for index in range(len(table.engines))
            if any(row.cells[index].text() not in ("", "not run") for row in rows)
        ]
        names = [table.engines[index].name for index in shown]
        yield from ("", f"## {letter}. {CHAPTERS[letter]}", "")
        yield row(["requirement", "cases", "known wrong", "adapters", *names])
        yield "|---|--:|--:|--:|" + "---|" * len(names)
        for each in rows:
            words = [each.cells[index].text() for index in shown]
            yield row([_title(each), *_counts(each, table), *words])


def _is_of_components(engine: Tally) -> bool:
    """True if the engine has runs of components alone."""
    return {run.profile.partition("-")[0] for run in engine.runs} == {COMPONENTS.removesuffix("-")}


def _engines(table: Coverage, places: Sequence[int]) -> Iterator[str]:
    """The runs of the engines at these places of the table."""
    engines = [table.engines[place] for place in places]
    facts = {
        "version": [engine.version for engine in engines],
        "torch": [engine.torch for engine in engines],
        "device": [engine.device for engine in engines],
        "date": [engine.date for engine in engines],
        "suite": [engine.suite[:12] for engine in engines],
        # Runs of parts of one profile say the same.
        "profiles": [", ".join(dict.fromkeys(run.profile for run in engine.runs)) for engine in engines],
        "verdict": ["; ".join(dict.fromkeys(run.words for run in engine.runs)) for engine in engines],
        "time": [duration(sum(run.seconds for run in engine.runs)) for engine in engines],
        "cases in the runs": [str(len(engine.cases)) for engine in engines],
        "of these, gone since": [str(table.stale[place][1]) for place in places],
        "cases not run, or changed since": [str(table.stale[place][0]) for place in places],
    }
    yield row(["engine", *(engine.name for engine in engines)])
    yield "|---|" + "---|" * len(engines)
    for label, values in facts.items():
        yield row([label, *values])


def _title(one: Row) -> Markdown:
    requirement = one.requirement
    # The contract's texts are Markdown.
    reason = Markdown(f". {one.reason}" if one.reason else "")
    return marked("{} {}{}", requirement.id, Markdown(requirement.name), reason)


def _counts(one: Row, table: Coverage) -> list[str]:
    if not one.cases:
        return ["", "", ""]
    return [str(one.cases), str(one.wrong), f"{len(one.adapters)} of {len(table.adapters)}"]


def _runnable(entries: Iterable[Entry], declared: Declared) -> Iterator[str]:
    """The cases that an adapter would not decline in a run on the CPU, which may use the simulated accelerator."""
    settings = RunSettings()
    for entry in entries:
        case = entry.case()
        device = device_for(case, settings)
        if not declined_flags(case, declared=declared, device=device):
            yield entry.id


def _seen(requirement: str, entries: Iterable[Entry], cases: Mapping[str, Shown]) -> Seen:
    kinds = {entry.id: kind_of_case(requirement, entry, cases.get(entry.id)) for entry in entries}
    severity = worst_of(cases[case].severity for case, kind in kinds.items() if kind == "failed")
    return Seen(**Counter(kinds.values()), severity=severity)


def kind_of_case(requirement: str, entry: Entry, shown: Shown | None) -> str:
    """The field of `Seen` that a case counts for: an engine's result for one of the requirements that it binds."""
    if shown is None or shown.digest != digest_of(entry):
        return "absent"
    if shown.verdict is Verdict.PASS:
        return "passed"
    # Foretold or not, it is a failure.
    if shown.verdict in ACCUSING | {Verdict.XFAIL}:
        # A crash has no finding, and a finding may name R000: then the requirement that the case tests has failed.
        accused = set(shown.failed) & set(entry.requirements) or {entry.primary}
        return "failed" if requirement in accused else "unjudged"
    return "declined" if shown.verdict is Verdict.UNSUPPORTED else "unjudged"


def _stale(entries: Iterable[Entry], tally: Tally) -> tuple[int, int]:
    now = {entry.id: digest_of(entry) for entry in entries}
    profiles = [load_profile(run.profile) for run in tally.runs if shipped(run.profile) is not None]
    due = {case for profile in profiles for case in profile.by_id} if profiles else now.keys()
    new = sum(
        name not in tally.cases or tally.cases[name].digest != digest for name, digest in now.items() if name in due
    )
    return new, sum(name not in now for name in tally.cases)


def _problems(row: Row) -> Iterator[str]:
    name = f"{row.requirement.id} ({row.requirement.name})"
    if not row.cases and not row.reason:
        yield f"{name} has neither a case nor a reason"
    if row.cases and row.adapters and row.reason:
        yield f"{name} has {row.cases} cases for {len(row.adapters)} adapters, and a reason why it has none"
    if row.cases and not row.wrong:
        yield f"{name} has {row.cases} cases, but no known-wrong engine names it"
    if row.cases and not row.adapters and not row.reason:
        yield f"{name} has {row.cases} cases, but neither an adapter that declares what they need nor a reason"
