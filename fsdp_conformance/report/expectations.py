"""
The expectations of a run: the failures a user knows about, in `conformance.toml`, and what differs from that list.

    [[expect]]
    case = "R010/eval-between-*"       # an id of the profile, or a glob of ids
    verdict = "FAIL"
    reason = "what is wrong, in one sentence"
    implementation = "torch-fsdp*"     # a name or a glob; without it, the entry is for every implementation
    device = "cpu"                     # the device of the case; without it, any
    torch = ">=2.6,<2.14"              # the versions of torch that have the defect; without it, all
    expires = 2027-01-31               # the first day on which the entry has to be looked at again
    url = "https://..."

An entry changes no verdict and earns no certificate: it tells what is known from what is new. A run is as expected if
every failure has an entry, every entry that applies describes what happened, and none has expired.
"""

from __future__ import annotations

import datetime as dt
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from fsdp_conformance.diagnosis.headline import headline_of
from fsdp_conformance.errors import UsageError
from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.report.run_content import RunFile
from fsdp_conformance.suggestions import near
from fsdp_conformance.verdict import CERTIFIABLE, Verdict

#: The name of the file that `run` and `verify` look for in the working directory.
NAME = "conformance.toml"

#: The table's name in the file.
TABLE = "expect"

#: Verdicts of cases that were left out: they say nothing about an entry.
SILENT = frozenset({Verdict.DISABLED, Verdict.NOT_RUN_ENV})

#: Verdicts that need no entry. A case that the engine declines may have one, to notice when that changes.
UNREMARKABLE = CERTIFIABLE | SILENT

#: Verdicts that an entry, or a reader, has to deal with.
FAILED = frozenset(Verdict) - UNREMARKABLE - {Verdict.XFAIL}

_NOT_EXPECTED = frozenset({Verdict.PASS, Verdict.XFAIL, Verdict.XPASS}) | SILENT
_VERDICTS = tuple(verdict.value for verdict in Verdict if verdict not in _NOT_EXPECTED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectation:
    """One entry of a list."""

    case: str
    verdict: str
    reason: str
    implementation: str = "*"
    device: str = ""
    torch: str = ""
    expires: dt.date | None = None
    url: str = ""

    def is_for(self, implementation: str, torch: str) -> bool:
        """True if the entry applies to runs of this implementation with this version of torch."""
        return fnmatchcase(implementation, self.implementation) and _is_in(torch, self.torch)

    def is_about(self, record: CaseRecord, device: str) -> bool:
        """True if the entry is about the case. `device` is the run's, for a record without one."""
        return fnmatchcase(record.case, self.case) and self.device in ("", record.device or device)

    def has_expired(self, today: dt.date) -> bool:
        """True if the entry has to be looked at again."""
        return self.expires is not None and today >= self.expires


class Kind(StrEnum):
    """How a run differs from what was expected."""

    NEW = "NEW"
    """A failure without an entry."""
    CHANGED = "CHANGED"
    """A case with an entry has another verdict."""
    UNMATCHED = "UNMATCHED"
    """An entry that applies to the run names no case of the profile."""
    EXPIRED = "EXPIRED"
    """An entry that applies to the run has to be looked at again."""


@dataclass(frozen=True, slots=True)
class Surprise:
    """One difference between a run and what was expected of it."""

    kind: Kind
    case: str
    text: str

    def sentence(self) -> str:
        """The difference in one line."""
        return f"{self.kind:<10}{self.case}: {self.text}"


class Standing(StrEnum):
    """How the verdict on a case compares with the list."""

    KNOWN = "known"
    """It is the failure that an entry announces."""
    NEW = "new"
    """A failure without an entry."""
    CHANGED = "changed"
    """A failure with another verdict than its entry announces."""
    GONE = "gone"
    """Its entry announces a failure, and it passed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """The standing of a case, and the entry that decides it."""

    standing: Standing
    reason: str = ""
    """Of the entry."""
    url: str = ""

    def sentence(self) -> str:
        """ "known: the reason of its entry (url)"."""
        return f"{self.standing}{f': {self.reason}' if self.reason else ''}{f' ({self.url})' if self.url else ''}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """A run next to a list of expectations."""

    surprises: tuple[Surprise, ...] = ()
    marks: Mapping[str, Mark] = field(default_factory=dict)
    """By case id: failures, and the cases of entries."""

    @property
    def expected(self) -> int:
        """How many cases have the verdict that an entry announces."""
        return sum(mark.standing is Standing.KNOWN for mark in self.marks.values())

    @property
    def as_expected(self) -> bool:
        """True if the run is exactly as the list says."""
        return not self.surprises

    def is_known(self, record: CaseRecord) -> bool:
        """True if an entry announces the failure."""
        mark = self.marks.get(record.case)
        return mark is not None and mark.standing is Standing.KNOWN


#: A run without a list: nothing is known, so nothing is new.
NO_LIST = Judged()


def load_expectations(path: Path) -> tuple[Expectation, ...]:
    """The entries of the file. Raises UsageError with every problem that it has."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"the expectations in {path} cannot be read: {error.strerror or error}") from error
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from error
    entries = content.get(TABLE, [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UsageError(f"{path} must list expectations as [[{TABLE}]] tables, got {TABLE} = {entries!r}")
    problems = [
        f"entry {number} ({entry.get('case', 'no case')}): {problem}"
        for number, entry in enumerate(entries, start=1)
        for problem in _problems(entry)
    ]
    problems += [f"unknown table {name!r}{_near(name, [TABLE])}" for name in content if name not in (TABLE, "tool")]
    if problems:
        raise UsageError(f"{path}: " + "; ".join(problems))
    return tuple(Expectation(**entry) for entry in entries)


def judge(run: RunFile, expectations: Sequence[Expectation], *, profile_cases: Iterable[str], today: dt.date) -> Judged:
    """How a run differs from what is expected of it. `profile_cases`: the ids that an entry can name."""
    settings = run.header.get("settings") or {}
    device, torch = str(settings.get("device")), str((run.header.get("environment") or {}).get("torch"))
    names = _names(run)
    applying = [entry for entry in expectations if any(entry.is_for(name, torch) for name in names)]
    ids = list(profile_cases)
    surprises = [_stale(entry, ids) for entry in applying if not any(fnmatchcase(id_, entry.case) for id_ in ids)]
    surprises += [_expired(entry) for entry in applying if entry.has_expired(today)]
    marks: dict[str, Mark] = {}
    for record in run.records:
        if record.verdict in SILENT:
            continue
        entries = [entry for entry in applying if entry.is_about(record, device)]
        announced = [entry for entry in entries if entry.verdict == record.verdict]
        if announced:
            marks[record.case] = _mark(Standing.KNOWN, announced[0])
        elif entries:
            surprises.append(_changed(record, entries))
            standing = Standing.GONE if record.verdict in UNREMARKABLE else Standing.CHANGED
            marks[record.case] = _mark(standing, entries[0])
        elif record.verdict not in UNREMARKABLE:
            surprises.append(Surprise(Kind.NEW, record.case, f"{record.verdict}: {what_happened(record)}"))
            marks[record.case] = Mark(standing=Standing.NEW)
    return Judged(surprises=tuple(surprises), marks=marks)


def _mark(standing: Standing, entry: Expectation) -> Mark:
    return Mark(standing=standing, reason=entry.reason, url=entry.url)


def _names(run: RunFile) -> set[str]:
    """The names that an entry may use for the implementation: the user's, and the adapter's own."""
    settings, described = run.header.get("settings") or {}, run.header.get("implementation") or {}
    return {str(settings.get("implementation")), str(described.get("name"))}


def _stale(entry: Expectation, ids: Sequence[str]) -> Surprise:
    return Surprise(Kind.UNMATCHED, entry.case, f"no case of the profile has this id{_near(entry.case, ids)}")


def _expired(entry: Expectation) -> Surprise:
    return Surprise(
        Kind.EXPIRED, entry.case, f"expired on {entry.expires}: check whether it still holds ({entry.reason})"
    )


def _changed(record: CaseRecord, entries: Sequence[Expectation]) -> Surprise:
    announced = " or ".join(dict.fromkeys(entry.verdict for entry in entries))
    seen = str(record.verdict) if record.verdict in UNREMARKABLE else f"{record.verdict} ({what_happened(record)})"
    return Surprise(Kind.CHANGED, record.case, f"expected {announced}, got {seen}; the entry says: {entries[0].reason}")


def what_happened(record: CaseRecord) -> str:
    """The headline of the case, or else the reason for its verdict."""
    finding = headline_of(record)
    return finding.sentence() if finding is not None else record.reason


def _problems(entry: Mapping[str, Any]) -> list[str]:
    """The problems of one entry."""
    by_name = {key.name: key for key in fields(Expectation)}
    problems = [f"unknown key {key!r}{_near(key, by_name)}" for key in entry if key not in by_name]
    for name, key in by_name.items():
        value = entry.get(name)
        if value is None:
            problems += [f"{name} is missing"] if key.default is MISSING else []
        elif name == "expires":
            if type(value) is not dt.date:
                problems.append(f"expires must be a date such as 2027-01-31, without quotes, got {value!r}")
        elif not isinstance(value, str) or (key.default is MISSING and not value.strip()):
            problems.append(f"{name} must be a string that is not blank, got {value!r}")
    if isinstance(entry.get("verdict"), str) and entry["verdict"] not in _VERDICTS:
        problems.append(f"verdict must be one of {', '.join(_VERDICTS)}, got {entry['verdict']!r}")
    if isinstance(entry.get("torch"), str) and _specifier(entry["torch"]) is None:
        problems.append(f"torch must be a version specifier such as '>=2.6,<2.14', got {entry['torch']!r}")
    return problems


def _near(word: str, words: Iterable[str]) -> str:
    close = near(word, words, count=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def _specifier(text: str) -> SpecifierSet | None:
    try:
        return SpecifierSet(text)
    except InvalidSpecifier:
        return None


def _is_in(version: str, specifier: str) -> bool:
    """True if a version satisfies a specifier; an unknown version satisfies only the empty specifier."""
    parsed = _specifier(specifier)
    try:
        return not specifier or (parsed is not None and parsed.contains(Version(version), prereleases=True))
    except InvalidVersion:
        return False
