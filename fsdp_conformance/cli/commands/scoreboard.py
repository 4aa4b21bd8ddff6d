"""`fsdp-conformance scoreboard`: the runs of several engines side by side."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from fsdp_conformance.cli import messages, report_dir
from fsdp_conformance.contract.profile import FULL, load_profile
from fsdp_conformance.report import coverage
from fsdp_conformance.report.scoreboard_page import markdown, scoreboard
from fsdp_conformance.report.tally import tallies_of
from fsdp_conformance.report.verify import Verification, verify
from fsdp_conformance.status import Status


def main(arguments: argparse.Namespace) -> int:
    """
    Print the table, in Markdown or as JSON. Returns 0, whatever the engines fail.

    Raises RunFileError for a file that is not a finished run, or was edited.
    """
    profile = load_profile(arguments.profile) if arguments.profile else None
    runs = [verify(report_dir.named_run(path), profile) for path in arguments.run_files]
    table = _coverage(runs) if arguments.coverage else scoreboard(runs)
    if arguments.json:
        messages.say_json(table.to_json())
    elif isinstance(table, coverage.Coverage):
        print(coverage.markdown(table), end="")
    else:
        print(markdown(table, whole=arguments.all), end="")
    return Status.CERTIFIED


def _coverage(runs: Sequence[Verification]) -> coverage.Coverage:
    """The whole contract, with the engines that ran and what they declared then."""
    tallies = tallies_of(runs)
    return coverage.coverage(tallies, load_profile(FULL).entries, {each.name: each.declares for each in tallies})
