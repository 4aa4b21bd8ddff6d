"""The pairs of values that a run's rows of the pair profile cover, for what the implementation declares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_conformance.capability import offered
from fsdp_conformance.outcome.records import DECLINED, CaseRecord
from fsdp_conformance.scenarios import rows
from fsdp_conformance.verdict import FINE, Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class PairCoverage:
    """Counts of pairs of values, each of two axes."""

    possible: int
    """Pairs that the implementation can be asked for."""
    covered: int
    """Pairs in rows that passed."""
    failing: int
    """The other pairs in rows that were judged, but failed: each of them may be right."""
    refused: int
    """The other pairs in rows that the implementation refused as a whole."""
    avoided: int
    """Combinations that it avoids."""

    def sentence(self) -> str:
        """One sentence for a report."""
        rest = {
            "only in rows that fail": self.failing,
            "only in rows that are refused": self.refused,
            "in no row of this run": self.possible - self.covered - self.failing - self.refused,
        }
        others = [f"{count} {where}" for where, count in rest.items() if count]
        avoided = f"; combinations that it avoids: {self.avoided}" if self.avoided else ""
        return (
            f"pairs of features: of {self.possible} that this engine can be asked for, {self.covered} are in rows that "
            "pass" + "".join(f", {other}" for other in others) + avoided
        )


def pair_coverage(records: Iterable[CaseRecord], implementation: Mapping[str, Any], device: str) -> PairCoverage | None:
    """The coverage by the rows among some records; None if there are none. `implementation`: as a run file has it."""
    by_number = {rows.number_of(record.case): record for record in records}
    known = {number: record for number, record in by_number.items() if number and number <= len(rows.pairs())}
    if not known:
        return None
    declared = offered(
        device,
        implementation.get("capabilities") or (),
        adds_on=implementation.get("adds_on") or {},
        declines_on=implementation.get("declines_on") or {},
    )
    avoids = implementation.get("avoids") or ()
    coverage = rows.coverage(declared, avoids, ())
    counts = []
    for is_counted in (_passes, _fails, _refuses):
        before = coverage.covered
        for number, record in known.items():
            if is_counted(record):
                coverage.add(rows.for_engine(number, declared, avoids).scenario.choice)
        counts.append(coverage.covered - before)
    return PairCoverage(
        possible=coverage.possible, covered=counts[0], failing=counts[1], refused=counts[2], avoided=len(avoids)
    )


def _refuses(record: CaseRecord) -> bool:
    return DECLINED in record.measurements


def _passes(record: CaseRecord) -> bool:
    # A row is UNSUPPORTED if it ran without what the engine avoids, and passed.
    is_right = record.verdict in FINE or (record.verdict is Verdict.UNSUPPORTED and record.comparisons > 0)
    return is_right and not _refuses(record)


def _fails(record: CaseRecord) -> bool:
    return not _passes(record) and not _refuses(record)
