"""`fsdp-conformance scoreboard`: the runs of several engines side by side."""

from __future__ import annotations

import argparse
import json

from fsdp_conformance.cli import report_dir
from fsdp_conformance.report.scoreboard import markdown, scoreboard
from fsdp_conformance.report.verify import verify
from fsdp_conformance.status import Status


def main(arguments: argparse.Namespace) -> int:
    """
    Print the table, in Markdown or as JSON. Returns 0, whatever the engines fail.

    Raises RunFileError for a file that is not a finished run, or was edited.
    """
    board = scoreboard([verify(report_dir.named_run(path)) for path in arguments.run_files])
    print(json.dumps(board.to_json(), indent=1) if arguments.json else markdown(board, whole=arguments.all), end="")
    return Status.CERTIFIED
