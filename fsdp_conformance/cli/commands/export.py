"""`fsdp-conformance export`: a run in a format that another program reads."""

from __future__ import annotations

import argparse
import fnmatch
from pathlib import Path

from fsdp_conformance.cli import messages, report_dir
from fsdp_conformance.cli.expected import expected_by
from fsdp_conformance.contract.profile import load_profile
from fsdp_conformance.errors import UsageError
from fsdp_conformance.report.formats import FORMATS
from fsdp_conformance.report.verify import verify
from fsdp_conformance.status import Status


def main(arguments: argparse.Namespace) -> int:
    """
    Print the run, or write it to a file. Returns 0, whatever the run shows, unless the file contradicts itself.

    Raises RunFileError for a file that is not a run, UsageError for cases that the run does not have, and
    EnvironmentUnavailable for a file that cannot be written.
    """
    expected = expected_by(arguments)
    profile = load_profile(arguments.profile) if arguments.profile else None
    verification = verify(report_dir.named_run(arguments.run_file), profile)
    judged = expected.judged(verification, verification.profile)
    run, certificate = verification.run, verification.certificate
    if arguments.case:
        run.records = [record for record in run.records if _is_named(record.case, arguments.case)]
        if not run.records:
            raise UsageError(f"--case {' '.join(arguments.case)} names no case that has a verdict in {run.path}")
    text = FORMATS[arguments.format](run, certificate, judged)
    if arguments.output:
        report_dir.write_text(Path(arguments.output), text, option="--output")
    else:
        print(text, end="")
    for discrepancy in verification.discrepancies:
        messages.complain(discrepancy)
    return verification.status if verification.discrepancies else Status.CERTIFIED


def _is_named(case: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatchcase(case, pattern) for pattern in patterns)
