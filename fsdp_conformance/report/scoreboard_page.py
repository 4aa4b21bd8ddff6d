"""Several engines side by side: what each run shows of every requirement, and what only one engine gets wrong."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fsdp_conformance.contract import Contract, load
from fsdp_conformance.diagnosis.severity import Severity, count_by_severity
from fsdp_conformance.errors import RunFileError
from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.report.marked import Markdown, marked, row
from fsdp_conformance.report.terminal import duration, verdict_words
from fsdp_conformance.report.verify import Verification
from fsdp_conformance.verdict import ACCUSING, Verdict


@dataclass(frozen=True, slots=True)
class Cell:
    """The results of a run for one requirement: its cases by verdict. A case counts for its first requirement alone."""

    passed: int = 0
    failed: int = 0
    declined: int = 0
    unjudged: int = 0
    """Not possible on that machine, inconclusive, or left out."""

    def text(self) -> str:
        """ "✓ 12", "✗ 2 of 14", "declined", "not judged", or "" if the run has no such case."""
        judged = self.passed + self.failed
        if self.failed:
            return f"✗ {self.failed} of {judged}"
        if judged:
            return f"✓ {judged}"
        return "declined" if self.declined else "not judged" if self.unjudged else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One run."""

    name: str
    version: str
    torch: str
    profile: str
    suite: str
    """The hash of the suite."""
    date: str
    words: str
    """CERTIFIED or not, and for what."""
    seconds: float
    """Of the whole run."""
    case_seconds: float
    """Median of the cases that passed."""
    cells: Mapping[str, Cell]
    """By requirement."""
    harm: Mapping[Severity, int]
    """Cases by the worst harm that they show."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scoreboard:
    """Runs side by side."""

    columns: tuple[Column, ...]
    requirements: tuple[str, ...]
    """Those that a run has cases of, in the contract's order."""
    alone: Mapping[str, str]
    """Requirement to the only engine that fails it, while another one passes it."""
    warnings: tuple[str, ...]
    """Why columns may not be comparable."""

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        return asdict(self)

    @property
    def remarkable(self) -> tuple[str, ...]:
        """The requirements that an engine fails, or that not all engines offer."""
        return tuple(
            name
            for name in self.requirements
            if any(cell is None or cell.failed or not cell.passed for cell in self.row(name))
        )

    def row(self, requirement: str) -> list[Cell | None]:
        """The cells of a requirement; None where a run has no case of it."""
        return [column.cells.get(requirement) for column in self.columns]


def scoreboard(runs: Sequence[Verification], contract: Contract | None = None) -> Scoreboard:
    """
    The runs side by side. Every verdict is derived from its evidence again.

    Raises RunFileError for a run that did not finish or whose file was edited.
    """
    contract = contract or load()
    problems = [f"{each.run.path}: {'; '.join(each.discrepancies)}" for each in runs if each.discrepancies]
    if problems:
        raise RunFileError(f"a scoreboard needs runs that verify: {'; '.join(problems)}")
    columns = tuple(_column(each) for each in runs)
    names = [name for name in contract.requirements if any(name in column.cells for column in columns)]
    return Scoreboard(
        columns=columns,
        requirements=tuple(names),
        alone={name: only for name in names if (only := _alone(name, columns))},
        warnings=tuple(_warnings(columns)),
    )


def markdown(board: Scoreboard, *, whole: bool = False) -> str:
    """
    The table in Markdown, one row for each requirement: with `whole`, of all of them; otherwise of the remarkable ones.
    """
    columns = board.columns
    facts = {
        "version": [column.version for column in columns],
        "torch": [column.torch for column in columns],
        "profile": [column.profile for column in columns],
        "date": [column.date for column in columns],
        "verdict": [column.words for column in columns],
        "requirements failed": [str(_failed(column)) for column in columns],
        "requirements passed": [str(_passed(column)) for column in columns],
        "harm, in cases": [_harm(column) for column in columns],
        "run": [duration(column.seconds) for column in columns],
        "median case": [duration(column.case_seconds) for column in columns],
    }
    lines: list[str] = [marked("note: {}", warning) for warning in board.warnings] + [""] * bool(board.warnings)
    lines += ["| " + row(column.name for column in columns), "|---|" + "---|" * len(columns)]
    lines += [row([label, *values]) for label, values in facts.items()]
    requirements = load().requirements
    for name in board.requirements if whole else board.remarkable:
        cells = [cell.text() if cell is not None else "" for cell in board.row(name)]
        only = f" (only {board.alone[name]})" if name in board.alone else ""
        lines.append(row([marked("{} {}{}", name, Markdown(requirements[name].name), only), *cells]))
    if not whole:
        rest = len(board.requirements) - len(board.remarkable)
        lines += ["", f"{rest} more requirements are passed by every engine here."]
    return "\n".join(lines) + "\n"


def _column(verification: Verification) -> Column:
    run = verification.run
    header = run.header
    described, environment = header.get("implementation") or {}, header.get("environment") or {}
    passed = [record.seconds for record in run.records if record.verdict is Verdict.PASS]
    return Column(
        name=str(described.get("name", "?")),
        version=str(described.get("version", "")),
        torch=str(environment.get("torch", "?")),
        profile=verification.certificate.profile,
        suite=str(header.get("suite_sha256", "")),
        date=str(header.get("started", ""))[:10],
        words=verdict_words(verification.certificate),
        seconds=float((run.footer or {}).get("seconds") or 0.0),
        case_seconds=statistics.median(passed) if passed else 0.0,
        cells=_cells(run.records),
        harm=count_by_severity(run.records),
    )


def _harm(column: Column) -> str:
    return ", ".join(f"{severity.words} {count}" for severity, count in column.harm.items()) or "none"


def _cells(records: Iterable[CaseRecord]) -> dict[str, Cell]:
    counts: dict[str, Counter[str]] = {}
    for record in records:
        counted = counts.setdefault(record.requirements[0], Counter())
        counted[_kind(record.verdict)] += 1
    return {name: Cell(**counted) for name, counted in counts.items()}


def _kind(verdict: Verdict) -> str:
    if verdict is Verdict.PASS:
        return "passed"
    if verdict in ACCUSING:
        return "failed"
    return "declined" if verdict is Verdict.UNSUPPORTED else "unjudged"


def _alone(requirement: str, columns: Sequence[Column]) -> str:
    """The only engine that fails the requirement, if another one passes it."""
    cells = {column.name: column.cells.get(requirement, Cell()) for column in columns}
    failing = [name for name, cell in cells.items() if cell.failed]
    passing = [name for name, cell in cells.items() if cell.passed and not cell.failed]
    return failing[0] if len(failing) == 1 and passing else ""


def _failed(column: Column) -> int:
    return sum(cell.failed > 0 for cell in column.cells.values())


def _passed(column: Column) -> int:
    return sum(cell.passed > 0 and not cell.failed for cell in column.cells.values())


def _warnings(columns: Sequence[Column]) -> Iterable[str]:
    for label, values in (
        ("versions of the suite", {column.suite for column in columns}),
        ("profiles", {column.profile for column in columns}),
        ("versions of torch", {column.torch for column in columns}),
    ):
        if len(values) > 1:
            yield f"the runs are of {len(values)} {label}"
