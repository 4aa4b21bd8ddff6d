"""Two runs side by side: the cases whose verdicts differ."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from fsdp_conformance.errors import UsageError
from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.report.run_content import RunFile
from fsdp_conformance.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Difference:
    """A case with different verdicts."""

    case: str
    old: str
    new: str
    old_reason: str
    new_reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The differences between two runs."""

    old: str
    """Path of the run file."""
    new: str
    compared: int
    """Cases that both runs have a verdict on."""
    differing: tuple[Difference, ...]
    only_old: tuple[str, ...]
    """Cases that only the old run has."""
    only_new: tuple[str, ...]
    counts: dict[str, tuple[int, int]]
    """Verdict to the number of cases in the old and in the new run."""


def compare(old: RunFile, new: RunFile, *, force: bool = False) -> Comparison:
    """
    The verdicts of two runs, case by case.

    Raises UsageError for runs of different implementations or devices, unless `force`.
    """
    if not force:
        for name in ("implementation", "device"):
            before, after = (run.header["settings"].get(name) for run in (old, new))
            if before != after:
                raise UsageError(f"the runs have different {name}s: {before!r} and {after!r}. Compare anyway: --force")
    before, after = _by_case(old), _by_case(new)
    differing = tuple(
        Difference(case, record.verdict, after[case].verdict, record.reason, after[case].reason)
        for case, record in before.items()
        if case in after and record.verdict is not after[case].verdict
    )
    counted = [Counter(record.verdict for record in records.values()) for records in (before, after)]
    return Comparison(
        old=old.path,
        new=new.path,
        compared=len(before.keys() & after.keys()),
        differing=differing,
        only_old=tuple(case for case in before if case not in after),
        only_new=tuple(case for case in after if case not in before),
        counts={
            verdict.value: (counted[0][verdict], counted[1][verdict])
            for verdict in Verdict
            if counted[0][verdict] or counted[1][verdict]
        },
    )


def text(comparison: Comparison) -> str:
    """The comparison for people; the last line has the result."""
    lines = [f"old: {comparison.old}", f"new: {comparison.new}", ""]
    for item in comparison.differing:
        lines.append(f"{item.case}: {item.old} -> {item.new}")
        lines += [
            f"  {label}: {reason}" for label, reason in (("old", item.old_reason), ("new", item.new_reason)) if reason
        ]
    for label, cases in (("old", comparison.only_old), ("new", comparison.only_new)):
        lines += [f"{case}: only in the {label} run" for case in cases]
    if comparison.differing or comparison.only_old or comparison.only_new:
        lines.append("")
    lines.append(f"{'verdict':<16}{'old':>6}{'new':>6}")
    lines += [f"{verdict:<16}{before:>6}{after:>6}" for verdict, (before, after) in comparison.counts.items()]
    only = len(comparison.only_old) + len(comparison.only_new)
    lines.append(
        f"{len(comparison.differing)} of {comparison.compared} verdicts differ"
        + (f"; {only} case{'s are' if only > 1 else ' is'} in only one of the runs" if only else "")
    )
    return "\n".join(lines)


def _by_case(run: RunFile) -> dict[str, CaseRecord]:
    return {record.case: record for record in run.records}
