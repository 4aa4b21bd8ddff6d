"""
Check that runs found exactly what ci/known-findings.toml lists.

    python ci/known_findings.py RUN_FILE...

An entry is a known defect of an engine: implementation, device, case, verdict, reason and link. Entries change no
verdict and no certificate; they show what is new.

Exit status: 0 if nothing is new; 1 for a finding without an entry, or an entry whose case now has another verdict; 2
for an invalid list.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path

from fsdp_conformance.outcome import CaseRecord
from fsdp_conformance.report import runfile
from fsdp_conformance.verdict import CERTIFIABLE, Verdict

LIST = Path(__file__).parent / "known-findings.toml"

#: Verdicts of cases that were left out, which say nothing about an entry.
_SILENT = frozenset({Verdict.DISABLED, Verdict.NOT_RUN_ENV})


@dataclass(frozen=True, slots=True)
class Known:
    """One entry of the list."""

    implementation: str
    """A name, or a glob for several variants of an engine: torch-fsdp1*."""
    device: str
    """The device of the case: a run on the CPU has cases on sim."""
    case: str
    verdict: str
    reason: str
    url: str = ""


def known_findings(path: Path = LIST) -> list[Known]:
    """The list. Raises ValueError with every invalid entry."""
    entries = tomllib.loads(path.read_text(encoding="utf-8")).get("finding", [])
    names = {field.name for field in fields(Known)}
    problems = []
    for number, entry in enumerate(entries, start=1):
        missing = names - {"url"} - entry.keys()
        unknown = entry.keys() - names
        if missing or unknown:
            problems.append(f"entry {number}: missing {sorted(missing)}, unknown {sorted(unknown)}")
        elif entry["verdict"] not in tuple(Verdict) or Verdict(entry["verdict"]) in CERTIFIABLE:
            problems.append(
                f"entry {number}: verdict must be one that rules out a certificate, got {entry['verdict']!r}"
            )
    if problems:
        raise ValueError("; ".join(problems))
    return [Known(**entry) for entry in entries]


def is_known(implementation: str, record: CaseRecord, known: Sequence[Known]) -> bool:
    """Whether the list has this verdict of the case."""
    return any(
        fnmatchcase(implementation, entry.implementation)
        and (entry.case, entry.device, entry.verdict) == (record.case, record.device, record.verdict)
        for entry in known
    )


def differences(
    implementation: str, device: str, records: Iterable[CaseRecord], known: Sequence[Known]
) -> Iterator[str]:
    """What is new, and what is gone, a sentence each. `device` is for records that name none."""
    expected: Mapping[tuple[str, str], Known] = {
        (entry.case, entry.device): entry for entry in known if fnmatchcase(implementation, entry.implementation)
    }
    for record in records:
        device = record.device or device
        entry = expected.get((record.case, device))
        if entry is None and record.verdict not in CERTIFIABLE | _SILENT:
            yield f"NEW   {implementation} on {device}: {record.case} is {record.verdict}: {_why(record)}"
        elif entry is not None and record.verdict not in _SILENT and record.verdict != entry.verdict:
            now = f"{record.case} is {record.verdict}, no longer {entry.verdict}"
            yield f"GONE  {implementation} on {device}: {now} ({entry.reason})"


def _why(record: CaseRecord) -> str:
    return record.findings[0].sentence() if record.findings else record.reason


def main(paths: Sequence[str]) -> int:
    """The exit status for these run files."""
    try:
        known = known_findings()
    except ValueError as error:
        print(f"{LIST.name}: {error}", file=sys.stderr)
        return 2
    found: list[str] = []
    for path in paths:
        run = runfile.read(Path(path))
        settings = run.header["settings"]
        if run.aborted or run.problems:
            found.append(f"NEW   {path}: {'; '.join(run.problems) or 'the run did not finish'}")
        found += differences(settings["implementation"], settings["device"], run.records, known)
    print("\n".join(found) or f"nothing new: {len(paths)} runs found exactly what {LIST.name} lists")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
