"""
The defects of engines that the stored runs show: the part of docs/scoreboard.md that says why cases failed.

A failed case is known if ci/known-findings.toml has an entry for it. Its reason names the script under ci/findings that
shows the defect without this package; entries of one engine that name the same script are one defect. A reason that
names none begins with "By design:", or with "Not settled:" until it is known whether the engine is wrong.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from finding_scripts import ROOT, read_script

from fsdp_conformance.contract.profile import Entry
from fsdp_conformance.diagnosis.severity import Severity
from fsdp_conformance.report.expectations import Expectation
from fsdp_conformance.report.tally import Tally, digest_of
from fsdp_conformance.verdict import ACCUSING, Verdict

#: Foretold or not, it is a failure.
_FAILED = ACCUSING | {Verdict.XFAIL}
_BY_DESIGN, _UNSETTLED = "By design: ", "Not settled: "
_SCRIPT = re.compile(r"\s*\((ci/findings/\S+\.py)\)")
_THREAD = re.compile(r"https://github\.com/[\w.-]+/([\w.-]+)/(?:issues|pull)/(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Defect:
    """A defect of one engine."""

    engine: str
    reason: str
    """A sentence."""
    script: str
    """Its path; "" for what is by design or not settled."""
    cases: tuple[str, ...]
    """Those that fail because of it."""
    upstream: str
    """The script's note on reports to the engine's authors."""

    @property
    def found_upstream(self) -> bool:
        """True if a search found a report of it."""
        return not self.upstream.startswith("no ")


@dataclass(frozen=True, kw_only=True, slots=True)
class Failures:
    """The failures in the runs of one engine."""

    engine: str
    passed: int
    declined: int
    failed: int
    left: int
    """Not possible on that machine, or inconclusive."""
    defects: tuple[Defect, ...]
    unknown: tuple[str, ...]
    """Failed cases without an entry that says why."""
    harm: Mapping[Severity, int]
    """Failed cases by the worst harm that they show, where the run says so; the worst first."""

    @property
    def proven(self) -> int:
        """How many of the defects have a script."""
        return sum(bool(defect.script) for defect in self.defects)

    @property
    def unsettled(self) -> int:
        """Failed cases for which it is not known yet whether the engine is wrong."""
        open_ones = [defect for defect in self.defects if defect.reason.startswith(_UNSETTLED)]
        return len(self.unknown) + sum(len(defect.cases) for defect in open_ones)


def failures(tally: Tally, entries: Collection[Entry], expectations: Sequence[Expectation]) -> Failures:
    """The engine's cases that are still what they were when it ran, and why they failed."""
    now = {entry.id: digest_of(entry) for entry in entries}
    verdicts = {case: shown.verdict for case, shown in tally.cases.items() if now.get(case) == shown.digest}
    failed = {case: verdict for case, verdict in verdicts.items() if verdict in _FAILED}
    harm = Counter(tally.cases[case].severity for case in failed)
    mine = [entry for entry in expectations if entry.is_for(tally.name, tally.torch)]
    defects: dict[tuple[str, str], tuple[str, list[str]]] = {}
    unknown = []
    for case, verdict in failed.items():
        entry = next((each for each in mine if fnmatchcase(case, each.case) and each.verdict == verdict), None)
        reason, script = script_in(entry.reason) if entry is not None else ("", "")
        if not (script or reason.startswith((_BY_DESIGN, _UNSETTLED))):
            unknown.append(case)
            continue
        key = (script, "") if script else ("", reason)
        defects.setdefault(key, (reason, []))[1].append(case)
    return Failures(
        engine=tally.name,
        passed=sum(verdict is Verdict.PASS for verdict in verdicts.values()),
        declined=sum(verdict is Verdict.UNSUPPORTED for verdict in verdicts.values()),
        failed=len(failed),
        left=sum(verdict not in _FAILED | {Verdict.PASS, Verdict.UNSUPPORTED} for verdict in verdicts.values()),
        defects=tuple(
            Defect(
                engine=tally.name,
                reason=reason,
                script=script,
                cases=tuple(cases),
                upstream=" ".join(read_script(ROOT / script).upstream.split()) if script else "",
            )
            for (script, _), (reason, cases) in sorted(defects.items())
        ),
        unknown=tuple(unknown),
        harm={severity: harm[severity] for severity in Severity if harm[severity]},
    )


def script_in(reason: str) -> tuple[str, str]:
    """The reason without the script that it names, and the script's path; "" if it names none."""
    reference = _SCRIPT.search(reason)
    return _SCRIPT.sub("", reason), reference[1] if reference else ""


def markdown(engines: Sequence[Failures]) -> str:
    """Two tables: the engines, and what they do wrong."""
    return "\n".join(_lines(engines)) + "\n"


def _lines(engines: Sequence[Failures]) -> Iterator[str]:
    defects = [defect for each in engines for defect in each.defects]
    scripts = {defect.script: defect for defect in defects if defect.script}
    new = sum(not defect.found_upstream for defect in scripts.values())
    yield f"{len(scripts)} defects, {new} of which were not found upstream. A defect that engines share counts once."
    yield ""
    yield "| engine | passed | declined | failed | harm, in cases | not judged | failed, not settled | defects |"
    yield "|---|--:|--:|--:|---|--:|--:|--:|"
    for each in engines:
        harm = ", ".join(f"{severity} {count}" for severity, count in each.harm.items())
        counts = (each.passed, each.declined, each.failed, harm, each.left, each.unsettled, each.proven)
        yield f"| {each.engine} | " + " | ".join(map(str, counts)) + " |"
    yield ""
    yield "| engine | what is wrong | cases | script | upstream |"
    yield "|---|---|--:|---|---|"
    for defect in defects:
        script = f"[`{defect.script.rpartition('/')[2]}`](../{defect.script})" if defect.script else ""
        yield f"| {defect.engine} | {defect.reason} | {len(defect.cases)} | {script} | {_upstream(defect)} |"


def _upstream(defect: Defect) -> str:
    """A few words, and the first thread."""
    if not defect.script:
        return ""
    thread = _THREAD.search(defect.upstream)
    link = f"[{thread[1]}#{thread[2]}]({thread[0]})" if thread else ""
    if defect.found_upstream:
        return link or "documented"
    return f"not found; nearest {link}" if link else "not found"
