"""
Check that runs found exactly what ci/known-findings.toml lists: known defects of the bundled engines. For runs with
other versions of torch, ci/known-findings-versions.toml is read as well.

    python ci/known_findings.py RUN_FILE...

Exit status: 0 if every run is as expected; 1 for anything new, changed or expired; 2 for an invalid list.
"""

from __future__ import annotations

import datetime as dt
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from fsdp_conformance.contract.profile import known_cases
from fsdp_conformance.errors import UsageError
from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.report import runfile
from fsdp_conformance.report.expectations import Expectation, judge, load_expectations
from fsdp_conformance.report.recorder import version_of
from fsdp_conformance.report.verify import profile_of

LIST = Path(__file__).parent / "known-findings.toml"
#: Defects of other versions of torch than the one that ci/constraints.txt names.
VERSIONS = Path(__file__).parent / "known-findings-versions.toml"


def known_findings(path: Path = LIST) -> tuple[Expectation, ...]:
    """The list. Raises UsageError with every invalid entry."""
    return load_expectations(path)


def is_known(implementation: str, record: CaseRecord, expectations: Iterable[Expectation]) -> bool:
    """True if the list has this verdict of the case."""
    return any(
        entry.is_for(implementation, version_of("torch"))
        and entry.is_about(record, record.device)
        and entry.verdict == record.verdict
        for entry in expectations
    )


def main(paths: Sequence[str]) -> int:
    """The exit status for these run files."""
    try:
        expectations = known_findings() + known_findings(VERSIONS)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    surprises: list[str] = []
    today = dt.datetime.now(dt.UTC).date()
    for path in paths:
        run = runfile.read(Path(path))
        name = (run.header.get("settings") or {}).get("implementation")
        if run.aborted or run.problems:
            surprises.append(f"{path}: {'; '.join(run.problems) or 'the run did not finish'}")
        device = (run.header.get("settings") or {}).get("device")
        if expectations and device not in {entry.device for entry in expectations}:
            # Lists are per device: what an engine does wrong on one, it may do right on another, and more besides.
            surprises.append(
                f"{path}: {LIST.name} has no entry for device {device!r}. Once you have looked at what this "
                f"first run found: fsdp-conformance update-expectations {path} --file ci/{LIST.name}"
            )
        judged = judge(run, expectations, profile_cases=known_cases(profile_of(run)), today=today)
        surprises += [f"{name}: {surprise.sentence()}" for surprise in judged.surprises]
    print("\n".join(surprises) or f"nothing new: {len(paths)} runs found exactly what {LIST.name} lists")
    return 1 if surprises else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
