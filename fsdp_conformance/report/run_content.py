"""The content of a run file: the lines that are not records, and the whole file as it was read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fsdp_conformance.contract.fingerprint import suite_sha256
from fsdp_conformance.outcome.records import REFERENCES, CaseId, CaseRecord, Seconds

#: Raised when readers of the old format cannot read the new one. Records of format 1 have no evidence.
FORMAT = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """A case starts."""

    case: CaseId
    world_size: int
    worker: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume:
    """The run was ended before its end, and goes on here. Cases that were running begin again."""

    at: str
    """UTC, ISO 8601."""
    seconds: Seconds
    """How long the run had taken until it was ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """Something that a reader of the certificate should know."""

    text: str
    refuses: bool = False


@dataclass(kw_only=True, slots=True)
class RunFile:
    """A run file that was read."""

    path: str
    header: dict[str, Any]
    records: list[CaseRecord] = field(default_factory=list)
    """In the order of their arrival."""
    started: list[str] = field(default_factory=list)
    """Case ids."""
    parts: list[Resume] = field(default_factory=list)
    """The parts after the first, of a run that was ended before its end and continued."""
    interrupted: list[str] = field(default_factory=list)
    """The cases that were running then, which began again."""
    notes: list[dict[str, Any]] = field(default_factory=list)
    footer: dict[str, Any] | None = None
    chain: str = ""
    """The hash of the last intact line."""
    problems: list[str] = field(default_factory=list)
    """Lines that are torn, edited or out of place."""
    misplaced: list[str] = field(default_factory=list)
    """Lines that no run writes in this order: a verdict on a case that had not started, a time that runs backwards."""

    @property
    def is_of_this_suite(self) -> bool:
        """True if this version of the suite has made the run, to the byte."""
        return bool(self.header.get("suite_sha256") == suite_sha256())

    @property
    def aborted(self) -> bool:
        """True if the run did not finish."""
        return self.footer is None

    @property
    def seconds(self) -> float:
        """How long the run took; without a footer, the time of its cases."""
        return float((self.footer or {}).get("seconds") or sum(record.seconds for record in self.records))

    def reference_counts(self) -> dict[str, int]:
        """How many references the cases computed, took from the store, and checked, by the first rank of each."""
        total = {"computed": 0, "shared": 0, "checked": 0}
        for record in self.records:
            reported = record.measurements.get(REFERENCES, {})
            counts = reported.get("rank 0", reported)
            for name in total:
                total[name] += int(counts.get(name, 0))
        return total

    def unfinished(self) -> list[str]:
        """Cases that started and have no verdict."""
        done = {record.case for record in self.records}
        return [case for case in self.started if case not in done]
