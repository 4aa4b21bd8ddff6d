"""Stored runs in the order of their dates: which run first failed a case, what changed with it, and how times moved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from fsdp_conformance.errors import RunFileError, UsageError
from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.report import runfile
from fsdp_conformance.report.expectations import SILENT, UNREMARKABLE, what_happened
from fsdp_conformance.report.run_content import RunFile
from fsdp_conformance.report.terminal import duration
from fsdp_conformance.verdict import Verdict

#: A case has become slower if it takes so many times as long as before, next to the other cases of the same two runs...
_SLOWER = 2.0
#: ... and so many seconds more. Shorter cases vary by more than this from run to run.
_SECONDS = 1.0
#: How many earlier runs say what a case used to take.
_EARLIER = 7
#: Hexadecimal digits of a hash that people read.
_DIGITS = 8
#: A case whose outcome changed this often is unsteady: failing, passing and failing again is twice.
_OFTEN = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Night:
    """One run."""

    path: str
    started: str
    """ISO 8601, UTC."""
    seconds: float
    judged: int
    """Cases with a verdict that says something about the implementation."""
    failed: int
    finished: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Failing:
    """A case that fails in the last run that judged it."""

    case: str
    verdict: str
    happened: str
    since: str
    """When the first of the failing runs without a pass after it started."""
    runs: int
    """How many runs in a row judged the case and failed it."""
    last_pass: str
    """When the last run that passed it started; empty if none did."""
    changed: tuple[str, ...]
    """The differences between that run and the first failing one: "torch 2.12.0 -> 2.13.0"."""
    is_new: bool
    """True if the newest run is the first that fails it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slower:
    """A case that takes longer than it used to, next to the other cases."""

    case: str
    seconds: float
    before: float
    """Median of earlier runs, scaled to the speed of the newest one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trend:
    """The runs of one implementation on one device."""

    implementation: str
    device: str
    nights: tuple[Night, ...]
    failing: tuple[Failing, ...]
    fixed: tuple[str, ...]
    """Cases that the newest run passes and the one that judged them before failed."""
    unsteady: Mapping[str, str]
    """Case to its outcomes, oldest first: "." passed, "F" failed, " " was not judged."""
    slower: tuple[Slower, ...]

    @property
    def new(self) -> tuple[Failing, ...]:
        """The failures that are new in the newest run."""
        return tuple(failing for failing in self.failing if failing.is_new)


def stored(directory: Path) -> list[RunFile]:
    """
    Every run file below the directory, oldest first.

    Raises UsageError if there is none, and RunFileError for a file that was edited. A run that did not finish counts
    with the cases that it judged.
    """
    runs = [runfile.read(path) for path in sorted(directory.rglob(runfile.NAME)) if path.is_file()]
    if not runs:
        raise UsageError(f"expected run files ({runfile.NAME}) below {directory}, found none")
    edited = [run for run in runs if run.problems and not run.aborted]
    if edited:
        raise RunFileError("; ".join(f"{run.path}: {run.problems[0]}" for run in edited))
    return sorted(runs, key=_started)


def trends(runs: Iterable[RunFile]) -> list[Trend]:
    """One for each implementation and device, by name. `runs` are in the order of their dates."""
    series: dict[tuple[str, str], list[RunFile]] = defaultdict(list)
    for run in runs:
        series[_name(run), str(run.header["settings"].get("device"))].append(run)
    return [_trend(name, device, nights) for (name, device), nights in sorted(series.items())]


def _trend(name: str, device: str, runs: Sequence[RunFile]) -> Trend:
    judged = [_judged(run) for run in runs]
    cases = list(dict.fromkeys(case for records in reversed(judged) for case in records))
    failing, fixed, unsteady = [], [], {}
    for case in cases:
        seen = [(run, records[case]) for run, records in zip(runs, judged, strict=True) if case in records]
        outcomes = [_failed(record) for _, record in seen]
        if outcomes[-1]:
            failing.append(_failing(case, seen, newest=runs[-1]))
        elif case in judged[-1] and any(outcomes[-2:-1]):
            fixed.append(case)
        if sum(one != other for one, other in pairwise(outcomes)) >= _OFTEN:
            unsteady[case] = "".join(_mark(records.get(case)) for records in judged)
    return Trend(
        implementation=name,
        device=device,
        nights=tuple(_night(run, records) for run, records in zip(runs, judged, strict=True)),
        failing=tuple(sorted(failing, key=lambda failure: (not failure.is_new, failure.case))),
        fixed=tuple(sorted(fixed)),
        unsteady=unsteady,
        slower=_slower(judged),
    )


def _failing(case: str, seen: Sequence[tuple[RunFile, CaseRecord]], *, newest: RunFile) -> Failing:
    streak = 0
    while streak < len(seen) and _failed(seen[-1 - streak][1]):
        streak += 1
    first = seen[-streak][0]
    before = seen[-streak - 1][0] if streak < len(seen) else None
    last, record = seen[-1]
    return Failing(
        case=case,
        verdict=str(record.verdict),
        happened=what_happened(record),
        since=_started(first),
        runs=streak,
        last_pass=_started(before) if before is not None else "",
        changed=_changed(before, first) if before is not None else (),
        is_new=streak == 1 and last is newest,
    )


def _changed(before: RunFile, after: RunFile) -> tuple[str, ...]:
    """The versions that differ between two runs."""
    old, new = _versions(before), _versions(after)
    return tuple(f"{what} {old[what]} -> {new[what]}" for what in old if old[what] != new[what])


def _versions(run: RunFile) -> dict[str, str]:
    header = run.header
    described, around = header.get("implementation") or {}, header.get("environment") or {}
    # What the ranks had loaded; the same in all of them.
    loaded = next((record.environment for record in run.records if "adapter" in record.environment), {})
    return {
        "engine": str(described.get("version", "unknown")),
        "adapter": str(loaded.get("adapter", "unknown"))[:_DIGITS],
        "torch": str(around.get("torch", "unknown")),
        "python": str(around.get("python", "unknown")),
        "suite": f"{header.get('suite', 'unknown')} {str(header.get('suite_sha256', ''))[:_DIGITS]}".strip(),
    }


def _slower(judged: Sequence[Mapping[str, CaseRecord]]) -> tuple[Slower, ...]:
    """Cases that got slower, next to the others: a slow machine slows all of them."""
    newest, earlier = judged[-1], judged[-1 - _EARLIER : -1]
    usual = {
        case: median(records[case].seconds for records in earlier if case in records)
        for case in newest
        if any(case in records for records in earlier)
    }
    ratios = [newest[case].seconds / before for case, before in usual.items() if before > 0]
    speed = median(ratios) if ratios else 1.0
    slower = [
        Slower(case=case, seconds=newest[case].seconds, before=before * speed)
        for case, before in usual.items()
        if newest[case].seconds > max(_SLOWER * before * speed, before * speed + _SECONDS)
    ]
    return tuple(sorted(slower, key=lambda one: one.before - one.seconds))


def _night(run: RunFile, records: Mapping[str, CaseRecord]) -> Night:
    return Night(
        path=run.path,
        started=_started(run),
        seconds=round(run.seconds, 1),
        judged=len(records),
        failed=sum(map(_failed, records.values())),
        finished=not run.aborted,
    )


def _judged(run: RunFile) -> dict[str, CaseRecord]:
    """The records that say something about the implementation."""
    return {
        record.case: record
        for record in run.records
        if record.verdict not in SILENT and record.verdict is not Verdict.UNSUPPORTED
    }


def _failed(record: CaseRecord) -> bool:
    return record.verdict not in UNREMARKABLE


def _mark(record: CaseRecord | None) -> str:
    return " " if record is None else "F" if _failed(record) else "."


def _started(run: RunFile) -> str:
    return str(run.header.get("started", ""))


def _name(run: RunFile) -> str:
    return str((run.header.get("implementation") or {}).get("name") or run.header["settings"].get("implementation"))


def text(trend: Trend) -> str:
    """The trend for people, what needs attention first."""
    lines = [f"{trend.implementation} on {trend.device}: {len(trend.nights)} run{'s' * (len(trend.nights) > 1)}"]
    for night in trend.nights:
        state = "" if night.finished else ", did not finish"
        took = duration(night.seconds)
        lines.append(f"  {night.started}  {night.failed} of {night.judged} failed, {took}{state}  {night.path}")
    for failing in trend.failing:
        lines += ["", *_failing_lines(failing)]
    if trend.fixed:
        lines += ["", f"fixed in the last run: {', '.join(trend.fixed)}"]
    for case, outcomes in trend.unsteady.items():
        lines += ["", f"unsteady  {case}  [{outcomes}]  oldest first; F failed"]
    for slow in trend.slower:
        lines += ["", f"slower    {slow.case}: {slow.seconds:.1f} s, usually {slow.before:.1f} s"]
    lines += ["", f"{len(trend.new)} new, {len(trend.failing) - len(trend.new)} known, {len(trend.fixed)} fixed"]
    return "\n".join(lines)


def _failing_lines(failing: Failing) -> list[str]:
    lines = [f"{'NEW' if failing.is_new else 'failing':<9} {failing.case}: {failing.verdict}", f"  {failing.happened}"]
    if not failing.last_pass:
        return [*lines, f"  never passed; first seen {failing.since}"]
    lines.append(f"  first failed {failing.since}, last passed {failing.last_pass}")
    changed = ", ".join(failing.changed) or "no version: the cause may be chance, or the machine"
    return [*lines, f"  changed between them: {changed}"]


def as_annotations(trend: Trend) -> list[str]:
    """A line for each new failure, in the form that GitHub's runner shows as an error annotation."""
    return [
        f"::error title={_property(f'{trend.implementation}: {new.case}')}::{_data(f'{new.verdict}: {new.happened}')}"
        for new in trend.new
    ]


def _data(words: str) -> str:
    """Words as they may stand behind a command of the runner."""
    return words.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(words: str) -> str:
    """Words as they may stand in its title."""
    return _data(words).replace(":", "%3A").replace(",", "%2C")
