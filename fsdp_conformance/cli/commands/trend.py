"""`fsdp-conformance trend`: stored runs in the order of their dates."""

from __future__ import annotations

import argparse
from pathlib import Path

from fsdp_conformance import codec
from fsdp_conformance.cli import messages
from fsdp_conformance.report import trend
from fsdp_conformance.status import Status


def main(arguments: argparse.Namespace) -> int:
    """
    Print what fails since when, what was fixed, and what became slower. Returns 1 if the newest run of an
    implementation fails a case that earlier runs did not, else 0.

    Raises UsageError if there are no runs below the directory, and RunFileError for a file that was edited.
    """
    trends = trend.trends(trend.stored(Path(arguments.directory)))
    if arguments.json:
        messages.say_json({"trends": codec.plain(trends)})
    elif arguments.annotations:
        for each in trends:
            print(*trend.as_annotations(each), sep="\n", end="\n" if each.new else "")
    else:
        print("\n\n".join(map(trend.text, trends)))
    return Status.NOT_CERTIFIED if any(each.new for each in trends) else Status.CERTIFIED
