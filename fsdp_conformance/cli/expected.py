"""
A run compared with a list of expectations, or with an earlier run, or with the harm that a user can accept.

With any of them the exit status answers another question: not whether the implementation is certified, but whether the
run went as expected, or did such harm. The verdict is still printed.
"""

from __future__ import annotations

import argparse
import datetime as dt
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from fsdp_conformance.cli import report_dir
from fsdp_conformance.contract.profile import Profile, known_cases
from fsdp_conformance.diagnosis.severity import Severity, severities_in, severity_of
from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.report import baseline as baselines
from fsdp_conformance.report import expectations as listed
from fsdp_conformance.report import runfile
from fsdp_conformance.report.baseline import Changes
from fsdp_conformance.report.expectations import NO_LIST, Expectation, Judged
from fsdp_conformance.report.html.page import page
from fsdp_conformance.report.run_content import RunFile
from fsdp_conformance.report.verify import Verification
from fsdp_conformance.status import Status
from fsdp_conformance.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Expected:
    """The list and the earlier run. Read before the run starts, so that a mistake in a file is reported at once."""

    path: Path | None = None
    expectations: tuple[Expectation, ...] = ()
    baseline: RunFile | None = None
    fail_on: frozenset[Severity] = frozenset()
    """If any, only failures of these severities count, and of them those that neither the list nor the run has."""

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
        judged = self.judged(verification, profile)
        if self.path is not None:
            say("\n".join(self._differences(judged)))
            verdicts.append(judged.as_expected)
        changes = self.changes(verification, selected)
        if self.baseline is not None and changes is not None:
            say("\n".join([f"since {self.baseline.path}:", *(f"  {line}" for line in changes.lines())]))
            verdicts.append(not changes.worse)
        if self.fail_on:
            counting = self._counting(verification.run, judged)
            names = ",".join(severity for severity in Severity if severity in self.fail_on)
            cases = ", ".join(record.case for record in counting)
            say(
                f"--fail-on {names}: "
                + (f"{len(counting)} of the failures count: {cases}" if counting else "no failure counts")
            )
            verdicts = [not counting]
        if not verdicts:
            return derived
        return Status.CERTIFIED if all(verdicts) else Status.NOT_CERTIFIED

    def changes(self, verification: Verification, selected: Collection[str]) -> Changes | None:
        """How the run differs from the baseline, if there is one."""
        if self.baseline is None:
            return None
        return baselines.changes(verification.run, self.baseline, selected=selected)

    def judged(self, verification: Verification, profile: Profile) -> Judged:
        """The run next to the list; nothing is known without one."""
        if self.path is None:
            return NO_LIST
        today = dt.datetime.now(dt.UTC).date()
        return listed.judge(verification.run, self.expectations, profile_cases=known_cases(profile), today=today)

    def page(self, verification: Verification, judged: Judged, selected: Collection[str]) -> str:
        """The run as an HTML page, next to the list, as `judged` has it, and to its baseline."""
        baseline = str(self.baseline.path) if self.baseline is not None else ""
        changes = self.changes(verification, selected)
        return page(verification.run, verification.certificate, judged, changes=changes, baseline=baseline)

    def _differences(self, judged: Judged) -> list[str]:
        if judged.as_expected:
            return [f"as expected: {judged.expected} known, nothing new ({self.path})"]
        headline = f"not as expected ({self.path}): {judged.expected} known, {len(judged.surprises)} to look at"
        return [headline, *(f"  {surprise.sentence()}" for surprise in judged.surprises)]

    def _counting(self, run: RunFile, judged: Judged) -> list[CaseRecord]:
        """The failures that count. Where the adapter is wrong, the harm is not known, and the failure counts."""
        before = {record.case: record.verdict for record in self.baseline.records} if self.baseline else {}
        return [
            record
            for record in run.records
            if (record.verdict is Verdict.ERROR_ADAPTER or severity_of(record) in self.fail_on)
            and not judged.is_known(record)
            and before.get(record.case) is not record.verdict
        ]


def expected_by(arguments: argparse.Namespace, *, look: bool = True) -> Expected:
    """
    The files that the options name. With `look`, also `conformance.toml` in the working directory, if it exists.

    Raises UsageError for a list that cannot be used, RunFileError for a baseline that is not a run.
    """
    path = Path(arguments.expectations) if arguments.expectations else None
    if path is None and look and not arguments.no_expectations and Path(listed.NAME).is_file():
        path = Path(listed.NAME)
    baseline = runfile.read(report_dir.named_run(arguments.baseline)) if arguments.baseline else None
    expectations = listed.load_expectations(path) if path is not None else ()
    fail_on = severities_in(arguments.fail_on) if arguments.fail_on is not None else frozenset()
    return Expected(path, expectations, baseline, fail_on)
