"""`fsdp-conformance update-expectations`: write the failures of a run into a list of expectations."""

from __future__ import annotations

import argparse
import datetime as dt
from pathlib import Path

from fsdp_conformance.cli import report_dir
from fsdp_conformance.contract.profile import known_cases, load_profile
from fsdp_conformance.errors import RunFileError, UsageError
from fsdp_conformance.report.expectation_writer import Update, updated
from fsdp_conformance.report.last_run import last_run
from fsdp_conformance.report.verify import verify
from fsdp_conformance.status import Status


def main(arguments: argparse.Namespace) -> int:
    """
    Write the file, and print what changed in it. Returns 1 if a case failed that the list cannot have, else 0.

    Raises UsageError if there is no run, RunFileError for one that did not finish or was edited.
    """
    named = last_run() if arguments.run_file is None else report_dir.named_run(arguments.run_file)
    if named is None:
        raise UsageError("update-expectations needs a run, but there is none in .fsdp-conformance: name a run file")
    verification = verify(named, load_profile(arguments.profile) if arguments.profile else None)
    if verification.discrepancies:
        raise RunFileError(f"{named} cannot be used: {'; '.join(verification.discrepancies)}")
    path = Path(arguments.file)
    today = dt.datetime.now(dt.UTC).date()
    cases = known_cases(verification.profile)
    update = updated(path, verification.run, profile_cases=cases, today=today)
    for line in update.left_out:
        print(f"left out  {line}")
    if update.changes:
        path.write_text(update.text, encoding="utf-8")
        changes = [*(f"removed   {case}" for case in update.removed), *(f"added     {case}" for case in update.added)]
        print("\n".join(changes))
        print(f"{path}: {len(update.added)} added, {len(update.removed)} removed{_repair(update)}")
    elif update.left_out:
        print(f"{path}: nothing to change{_repair(update)}")
    else:
        print(f"{path}: nothing to change, the run is as expected")
    return Status.NOT_CERTIFIED if update.left_out else Status.CERTIFIED


def _repair(update: Update) -> str:
    """Advice on the cases that are left out."""
    count = len(update.left_out)
    return f"; repair the adapter or the suite for the {count} left out" if count else ""
