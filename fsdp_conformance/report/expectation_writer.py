"""Writing `conformance.toml` from a run: what no longer holds is removed, and what is new is added."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.items import AoT, Table

from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.report.expectations import (
    TABLE,
    Expectation,
    Kind,
    judge,
    load_expectations,
    what_happened,
)
from fsdp_conformance.report.run_content import RunFile
from fsdp_conformance.verdict import Verdict

_PREAMBLE = """\
Failures that are known. An entry changes no verdict: it tells what is known from what is new.
Written by `fsdp-conformance update-expectations`; correct the reasons, add links, and give entries a day to expire."""

#: Verdicts to fix, not to expect.
_NOT_OF_THE_ENGINE = frozenset({Verdict.ERROR_ADAPTER, Verdict.ERROR_SUITE})


@dataclass(frozen=True, slots=True)
class Update:
    """A new text for a file of expectations, and how it differs from the old one."""

    text: str
    added: tuple[str, ...]
    removed: tuple[str, ...]
    """Case ids or globs of the entries."""
    left_out: tuple[str, ...] = ()
    """Cases that say nothing about the implementation, each with its verdict and what happened."""

    @property
    def changes(self) -> bool:
        """True if there is something to write."""
        return bool(self.added or self.removed)


def updated(path: Path, run: RunFile, *, profile_cases: Sequence[str], today: dt.date) -> Update:
    """
    The text of the file with which the run is as expected. Comments and entries of other runs stay.

    A case in which the adapter or the suite is wrong gets no entry: the list is for what is known of the engine. A glob
    of which only some cases still hold is replaced by entries for these. Expired entries stay: a person has to look at
    them. Raises UsageError if the file exists and cannot be read.
    """
    exists = path.exists()
    entries = load_expectations(path) if exists else ()
    document = tomlkit.parse(path.read_text(encoding="utf-8")) if exists else _new_document()
    tables = document.get(TABLE)
    array = tables if isinstance(tables, AoT) else tomlkit.aot()
    removed, remaining, split = [], [], []
    # From the end, so that positions stay what they are.
    for index in reversed(range(len(entries))):
        holding = _still_holding(entries[index], run, profile_cases=profile_cases, today=today)
        if holding is None:
            remaining.append(entries[index])
            continue
        removed.append(entries[index].case)
        split += [_table(record, run, like=entries[index]) for record in holding]
        del array[index]
    remaining += [_expectation(table) for table in split]
    records = {record.case: record for record in run.records}
    missing = [
        records[surprise.case]
        for surprise in judge(run, remaining, profile_cases=profile_cases, today=today).surprises
        if surprise.kind in (Kind.NEW, Kind.CHANGED)
    ]
    new = split + [_table(record, run) for record in missing if record.verdict not in _NOT_OF_THE_ENGINE]
    for table in new:
        array.append(table)
    if TABLE not in document and new:
        document.append(TABLE, array)
    return Update(
        text=tomlkit.dumps(document),
        added=tuple(str(table["case"]) for table in new),
        removed=tuple(reversed(removed)),
        left_out=tuple(
            f"{record.case}: {record.verdict}: {what_happened(record)}"
            for record in missing
            if record.verdict in _NOT_OF_THE_ENGINE
        ),
    )


def _still_holding(
    entry: Expectation, run: RunFile, *, profile_cases: Sequence[str], today: dt.date
) -> list[CaseRecord] | None:
    """None if the entry can stay as it is; otherwise the cases for which it still holds."""
    surprises = judge(run, [entry], profile_cases=profile_cases, today=today).surprises
    wrong = {surprise.kind for surprise in surprises if surprise.kind in (Kind.UNMATCHED, Kind.CHANGED)}
    if not wrong:
        return None
    device = str((run.header.get("settings") or {}).get("device"))
    return [record for record in run.records if record.verdict == entry.verdict and entry.is_about(record, device)]


def _table(record: CaseRecord, run: RunFile, *, like: Expectation | None = None) -> Table:
    """An entry for the case; `like` is the one that it replaces, whose text it takes over."""
    described, settings = run.header.get("implementation") or {}, run.header.get("settings") or {}
    name = like.implementation if like else str(described.get("name") or settings.get("implementation"))
    values: dict[str, Any] = {
        "case": record.case,
        "verdict": record.verdict.value,
        "reason": like.reason if like else what_happened(record) or "not looked into yet",
        "implementation": name,
        "device": like.device if like else record.device or str(settings.get("device")),
        "torch": like.torch if like else "",
        "expires": like.expires if like else None,
        "url": like.url if like else "",
    }
    table = tomlkit.table()
    for key, value in values.items():
        if value:
            table.add(key, value)
    table.add(tomlkit.nl())
    return table


def _expectation(table: Table) -> Expectation:
    return Expectation(**table.unwrap())


def _new_document() -> tomlkit.TOMLDocument:
    document = tomlkit.document()
    for line in _PREAMBLE.splitlines():
        document.add(tomlkit.comment(line))
    document.add(tomlkit.nl())
    return document
