"""
Scores the cause that a report names first, on defects whose cause is known: see ci/causes.

Each pair of a defect and a case runs once and is kept with the evidence behind every explanation, so that other rules
for explaining can be scored on the same runs.
"""

from __future__ import annotations

import argparse
import os
import pickle
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))
os.environ["PYTHONPATH"] = os.pathsep.join([sys.path[0], os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)

from fsdp_conformance.contract.case import Case
from fsdp_conformance.diagnosis.causes import Evidence, causes
from fsdp_conformance.diagnosis.headline import most_telling
from fsdp_conformance.errors import SuiteError
from fsdp_conformance.judge import Observed, judge
from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.selftest import bound_case, run_case
from fsdp_conformance.verdict import Verdict
from studies import cause_recording
from studies.causes import TRUTHS, Defect, Score, causes_in, defects, scored


def main() -> int:
    """The exit status."""
    arguments = _arguments()
    chosen = [defect for defect in defects() if re.search(arguments.only, defect.name)]
    if not arguments.no_run:
        for defect in chosen:
            for case in defect.cases:
                _record(arguments.directory, defect, case)
    runs = [
        (defect, case, pickle.loads(path.read_bytes()))  # noqa: S301 - our own file
        for defect in chosen
        for case in defect.cases
        if (path := _path(arguments.directory, defect, case)).is_file()
    ]
    answers = [(defect, case, _answer(run)) for defect, case, run in runs]
    if arguments.verbose:
        for defect, case, likely in answers:
            print(f"{scored(defect.truth, likely):20} {defect.name:34} {case:42} {likely}")
    print(_table(answers))
    if arguments.leave_out:
        print(_left_out(runs))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ci/causes", description=(__doc__ or "").strip().partition("\n")[0])
    parser.add_argument("directory", type=Path, help="where runs are kept; those that are there are not made again")
    parser.add_argument("--only", default="", metavar="REGEX", help="defects whose name matches")
    parser.add_argument("--no-run", action="store_true", help="score the runs that are there")
    parser.add_argument("--leave-out", action="store_true", help="also without the rule for each class of defects")
    parser.add_argument("--verbose", action="store_true", help="print every answer")
    return parser.parse_args()


def _path(directory: Path, defect: Defect, case: str) -> Path:
    return directory / f"{defect.name}@{case.replace('/', '_')}.pickle"


def _record(directory: Path, defect: Defect, case: str) -> None:
    """Run a defect on a case and keep what the judge saw, unless that was done before."""
    path = _path(directory, defect, case)
    if path.is_file():
        return
    live = directory / "live"
    live.mkdir(parents=True, exist_ok=True)
    os.environ[cause_recording.VARIABLE] = str(live)
    seen: dict[str, Any] = {}

    def recording(case: Case, observed: Observed, settings: RunSettings) -> CaseRecord:
        seen.update(case=case, observed=observed, settings=settings)
        return judge(case, observed, settings)

    with mock.patch("fsdp_conformance.cases.controller.judge", recording):
        run_case(bound_case(case), f"studies.cause_recording:{defect.name}", base=RunSettings(ranks="simulated"))
    path.write_bytes(pickle.dumps((seen, cause_recording.collected(live))))
    print(f"ran {defect.name} on {case}", file=sys.stderr)


def _answer(run: Any, explained: Callable[[Evidence], str | None] | None = None) -> str | None:
    """The cause in the report's headline, with these rules."""
    seen, evidence = run
    rules = explained or (lambda found: next(causes(found), None))
    case, observed = seen["case"], seen["observed"]
    reports = [
        None if report is None else cause_recording.replayed(report, evidence, rules) for report in observed.reports
    ]
    record = judge(case, replace(observed, reports=reports), seen["settings"])
    if record.verdict is Verdict.PASS:
        raise SuiteError(f"{case.id} must fail, got PASS: the defect does not show in it")
    found = most_telling(record.findings)
    return found.likely if found is not None else None


def _table(answers: list[tuple[Defect, str, str | None]]) -> str:
    """Markdown: a row for each class of defects, and the sums."""
    counted: dict[str, Counter[Score]] = {}
    for defect, _, likely in answers:
        counted.setdefault(defect.truth, Counter())[scored(defect.truth, likely)] += 1
    lines = ["| defect | " + " | ".join(Score) + " |", "|---|" + "---:|" * len(Score)]
    lines += [_row(truth, counted[truth]) for truth in TRUTHS if truth in counted]
    total: Counter[Score] = sum(counted.values(), Counter())
    return "\n".join([*lines, _row("all", total)])


def _row(title: str, counts: Counter[Score]) -> str:
    return f"| {title} | " + " | ".join(str(counts[score] or "") for score in Score) + " |"


def _left_out(runs: list[Any]) -> str:
    """
    For each class of defects: its runs, without any rule that can name it.

    Only runs whose cause is read from values: a race or an exception names its own.
    """
    counts: Counter[Score] = Counter()
    lines = []
    for truth in dict.fromkeys(defect.truth for defect, _, _ in runs):

        def without(evidence: Evidence, truth: str = truth) -> str | None:
            rest = (text for text in causes(evidence) if not any(re.match(TRUTHS[truth], c) for c in causes_in(text)))
            return next(rest, None)

        for defect, case, run in runs:
            if defect.truth == truth and _answer(run, lambda evidence: None) is None:
                likely = _answer(run, without)
                score = scored(truth, likely)
                counts[score] += 1
                if score is not Score.UNKNOWN:
                    lines.append(f"{defect.name} ({case}): {likely}")
    return "\n".join(["", "without the class's own rule: " + ", ".join(f"{counts[s]} {s}" for s in Score), *lines])


if __name__ == "__main__":
    sys.exit(main())
