"""
A run compared with a list of expectations, or with an earlier run.

With either of them the exit status answers another question: not whether the implementation is certified, but whether
the run went as expected. The verdict is still printed.
"""

from __future__ import annotations

import argparse
import datetime as dt
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from fsdp_conformance.cli import report_dir
from fsdp_conformance.contract.profile import Profile, known_cases
from fsdp_conformance.report import baseline as baselines
from fsdp_conformance.report import expectations as listed
from fsdp_conformance.report import runfile
from fsdp_conformance.report.baseline import Changes
from fsdp_conformance.report.expectations import Expectation
from fsdp_conformance.report.html.page import page
from fsdp_conformance.report.run_content import RunFile
from fsdp_conformance.report.verify import Verification
from fsdp_conformance.status import Status


@dataclass(frozen=True, slots=True)
class Expected:
    """The list and the earlier run. Read before the run starts, so that a mistake in a file is reported at once."""

    path: Path | None = None
    expectations: tuple[Expectation, ...] = ()
    baseline: RunFile | None = None

    def status(
        self,
        verification: Verification,
        *,
        profile: Profile,
        selected: Collection[str],
        say: Callable[[str], object] = print,
    ) -> int:
        """
        Print how a finished run differs from expectations, and return the exit status.

        `selected`: ids of the selected cases. A run that the suite or the machine spoiled keeps its status.
        """
        derived = verification.status
        if verification.discrepancies or derived not in (Status.CERTIFIED, Status.NOT_CERTIFIED):
            return derived
        verdicts = []
        if self.path is not None:
            verdicts.append(self._against_list(verification, profile, say))
        changes = self.changes(verification, selected)
        if self.baseline is not None and changes is not None:
            say("\n".join([f"since {self.baseline.path}:", *(f"  {line}" for line in changes.lines())]))
            verdicts.append(not changes.worse)
        if not verdicts:
            return derived
        return Status.CERTIFIED if all(verdicts) else Status.NOT_CERTIFIED

    def changes(self, verification: Verification, selected: Collection[str]) -> Changes | None:
        """How the run differs from the baseline, if there is one."""
        if self.baseline is None:
            return None
        return baselines.changes(verification.run, self.baseline, selected=selected)

    def page(self, verification: Verification, selected: Collection[str]) -> str:
        """The run as an HTML page, next to its baseline."""
        baseline = str(self.baseline.path) if self.baseline is not None else ""
        changes = self.changes(verification, selected)
        return page(verification.run, verification.certificate, changes=changes, baseline=baseline)

    def _against_list(self, verification: Verification, profile: Profile, say: Callable[[str], object]) -> bool:
        today = dt.datetime.now(dt.UTC).date()
        judged = listed.judge(verification.run, self.expectations, profile_cases=known_cases(profile), today=today)
        if judged.as_expected:
            say(f"as expected: {judged.expected} known, nothing new ({self.path})")
            return True
        headline = f"not as expected ({self.path}): {judged.expected} known, {len(judged.surprises)} to look at"
        say("\n".join([headline, *(f"  {surprise.sentence()}" for surprise in judged.surprises)]))
        return False


def expected_by(arguments: argparse.Namespace, *, look: bool = True) -> Expected:
    """
    The files that the options name. With `look`, also `conformance.toml` in the working directory, if it exists.

    Raises UsageError for a list that cannot be used, RunFileError for a baseline that is not a run.
    """
    path = Path(arguments.expectations) if arguments.expectations else None
    if path is None and look and not arguments.no_expectations and Path(listed.NAME).is_file():
        path = Path(listed.NAME)
    baseline = runfile.read(report_dir.named_run(arguments.baseline)) if arguments.baseline else None
    return Expected(path, listed.load_expectations(path) if path is not None else (), baseline)
