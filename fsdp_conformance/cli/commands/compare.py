"""`fsdp-conformance compare`: which verdicts differ between two runs."""

from __future__ import annotations

import argparse

from fsdp_conformance import codec
from fsdp_conformance.cli import messages, report_dir
from fsdp_conformance.errors import RunFileError
from fsdp_conformance.report import comparison, runfile
from fsdp_conformance.report.run_content import RunFile
from fsdp_conformance.status import Status


def main(arguments: argparse.Namespace) -> int:
    """
    Print the verdicts that differ. Returns 0 if there are none, else 1.

    Raises RunFileError for a file that is not a finished run, and UsageError for runs of different things.
    """
    old, new = (_finished(path) for path in (arguments.old, arguments.new))
    differences = comparison.compare(old, new, force=arguments.force)
    if arguments.json:
        messages.say_json(codec.plain(differences))
    else:
        print(comparison.text(differences))
    return Status.NOT_CERTIFIED if differences.differing else Status.CERTIFIED


def _finished(path: str) -> RunFile:
    run = runfile.read(report_dir.named_run(path))
    problems = [*run.problems, *(["the run did not finish"] if run.aborted else [])]
    if problems:
        raise RunFileError(f"{run.path} cannot be compared: {'; '.join(problems)}")
    return run
