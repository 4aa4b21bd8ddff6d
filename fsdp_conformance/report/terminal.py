"""
Findings and verdicts as plain text: what people read first when a run fails.

    ✗ R003  The gradient is the mean over the data-parallel ranks
        harm      trains silently wrong
        case      R003/rank-coded-ws3
        first     step 0 · reduce · '0.weight' · rank 2 · element [3, 1]
        got       0.75 · expected 0.5 · ratio 1.5 · on 16 of 16 elements (bitwise)
        seen      gradient of '0.weight': expected 0.5, got 0.75; 16 of 16 elements differ [gradient parity]
        likely    the total divisor is 2 instead of 3
        look at   The ratio got / expected: the world size means summed, ...
        same in   7 more cases: R003/..., ...
        violates  R003, R092
        repro     fsdp-conformance run --implementation my.py:Mine --case R003/rank-coded-ws3
        closer    fsdp-conformance debug R003/rank-coded-ws3 --implementation my.py:Mine
"""

from __future__ import annotations

import itertools
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fsdp_conformance import contract
from fsdp_conformance.contract.scopes import BASE
from fsdp_conformance.diagnosis.advice import look_at
from fsdp_conformance.diagnosis.grouping import Group, grouped, may_follow, requirement_of
from fsdp_conformance.diagnosis.headline import headline_of
from fsdp_conformance.diagnosis.severity import count_by_severity, severity_of, worst_of
from fsdp_conformance.listing import some
from fsdp_conformance.outcome.records import CaseRecord, Finding, RankExit
from fsdp_conformance.report.certificate import Certificate, Scope, State
from fsdp_conformance.report.expectations import Judged
from fsdp_conformance.report.folding import WIDTH, folded
from fsdp_conformance.report.runfile import NAME as RUN_FILE
from fsdp_conformance.run_settings import SHARED_DEVICES
from fsdp_conformance.stack import engine_frames, frames_of_stack, frames_of_traceback
from fsdp_conformance.verdict import ACCUSING, QUIET, Verdict

#: The sign in front of a headline.
SIGNS = {
    Verdict.PASS: "✓",
    Verdict.XFAIL: "x",
    Verdict.UNSUPPORTED: "-",
    Verdict.DISABLED: "-",
    Verdict.NOT_RUN_ENV: "-",
    Verdict.INCONCLUSIVE: "?",
    Verdict.XPASS: "!",
    Verdict.FAIL: "✗",
    Verdict.HANG: "⧗",
    Verdict.CRASH: "☠",
    Verdict.ERROR_ADAPTER: "!",
    Verdict.ERROR_SUITE: "!",
}

#: How the command begins that runs a case of a suite.
_RUN = ["fsdp-conformance", "run"]

_INDENT = 4
_LABEL = 10
_OTHERS_NAMED = 4
_CONSEQUENCES_SHOWN = 3

#: The label of the whole argument behind a finding, such as both stacks of a race.
DETAIL = "detail"

_FRAMES_SHOWN = 3
_EXTENSIONS_NAMED = 4


@dataclass(frozen=True, slots=True)
class Field:
    """One labelled text of a case's block."""

    label: str
    text: str
    verbatim: bool = False
    """True for a command, a frame or stacks: not folded."""


def render_findings(records: Iterable[CaseRecord], *, width: int = WIDTH, run: str = "") -> str:
    """
    Everything that went wrong, one block for each group, folded at `width` columns; empty if nothing did.

    `run` is the path of the run file, for commands that read it.

    What a common cause may explain, but nothing shows that it does, gets a line for each group at the end.
    """
    groups = grouped(records)
    later = may_follow(groups)
    blocks = [
        render_record(group.first, others=group.others, width=width, run=run) for group in groups if group not in later
    ]
    if later:
        cases = sum(len(group.cases) for group in later)
        heading = (
            f"{cases} more failure{'s' if cases > 1 else ''} without a known cause, which may follow from the above:"
        )
        lines = [*folded(heading, width), *(line for group in later for line in _brief(group, width))]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _brief(group: Group, width: int) -> list[str]:
    """A group in two lines, if they are not too long."""
    finding = headline_of(group.first)
    seen = f"{finding.message} [{finding.check}]" if finding is not None else group.first.reason
    more = f" and {len(group.others)} more" if group.others else ""
    indent = " " * _INDENT
    line = f"{group.first.case}{more}: {' '.join(seen.split())}"
    return [*_headlines(group.first, width), *folded(line, width, lead=indent, indent=indent)]


def render_record(record: CaseRecord, *, others: Sequence[CaseRecord] = (), width: int = WIDTH, run: str = "") -> str:
    """The block of one case of a run file, if there is one, folded at `width` columns. `others` failed alike."""
    fields = record_fields(record, others, run=run)
    return "\n".join([*_headlines(record, width), *(line for one in fields for line in _lines(one, width))])


def render_failure(record: CaseRecord, *, width: int = WIDTH, run: str = "") -> str:
    """The block of one case, and the traceback of the rank that raised."""
    block = render_record(record, width=width, run=run)
    return "\n\n".join(part for part in (block, record.traceback.rstrip()) if part)


def record_fields(record: CaseRecord, others: Sequence[CaseRecord] = (), *, run: str = "") -> list[Field]:
    """
    The fields that describe a case, in the order in which people read them; none is empty.

    Every command in them is complete. Without a run file, there is none that reads it.
    """
    finding = headline_of(record)
    severity = worst_of(map(severity_of, (record, *others)))
    fields = [Field("harm", severity.words if severity is not None else "")]
    fields.append(Field("case", record.case + (f" · on {record.device}" if record.device not in ("", "cpu") else "")))
    if finding is not None:
        fields += _finding_fields(finding, record.findings[0])
    if finding is None or record.verdict is Verdict.INCONCLUSIVE:
        fields.append(Field("reason", record.reason))
    fields += _raised_at(record)
    if record.verdict is Verdict.HANG:
        fields += [Field(f"rank {end.rank}", _waits(end)) for end in record.exits]
    fields += [Field("then", sentence) for sentence in record.consequences[:_CONSEQUENCES_SHOWN]]
    if finding is not None:
        fields += [Field("likely", finding.likely or ""), Field("look at", look_at(record, finding))]
    if record.takes is not None:
        fields.append(Field("takes", record.takes.sentence()))
    if record.verdict not in QUIET and len(record.findings) > 1:
        further = len(record.findings) - 1
        findings = "finding" if further == 1 else "findings"
        fields.append(Field("and", f"{further} more {findings}"))
        # On a line of its own, which is not folded.
        fields.append(Field("", explain_command(record, run), verbatim=True))
    if others:
        ids = some([item.case for item in others], _OTHERS_NAMED)
        fields.append(Field("same in", f"{len(others)} more case{'s' if len(others) > 1 else ''}: {ids}"))
        violated = sorted({requirement_of(item) for item in (record, *others)})
        fields.append(Field("violates", ", ".join(violated) if len(violated) > 1 else ""))
    fields.append(Field("repro", record.repro, verbatim=True))
    if record.verdict in ACCUSING:
        fields.append(Field("closer", closer(record), verbatim=True))
    return [one for one in fields if one.text]


def explain_command(record: CaseRecord, run: str) -> str:
    """The command that shows all of a case; empty without a run file. Names the file: it may not be the last run's."""
    directory = run.removesuffix(f"/{RUN_FILE}") if run.endswith(f"/{RUN_FILE}") else run
    return f"fsdp-conformance explain {record.case} --report {shlex.quote(directory)}" if run else ""


def closer(record: CaseRecord) -> str:
    """
    The command that gives a rank of the case the terminal, with every option of the run that can be debugged.

    Empty for a case of no suite, which `debug` does not know, and for ranks that are no processes of this command.
    """
    try:
        words = shlex.split(record.repro)
    except ValueError:  # a run file can say anything
        return ""
    if words[:2] != _RUN or record.ranks not in ("", "processes", SHARED_DEVICES):
        return ""
    options = itertools.takewhile(lambda word: word != "--case", words[len(_RUN) :])
    return shlex.join(["fsdp-conformance", "debug", record.case, *options])


def headline(record: CaseRecord) -> str:
    """The sign, the requirement that was violated, its name, and the verdict unless it is FAIL."""
    requirement = requirement_of(record)
    entry = contract.load().requirements.get(requirement)
    name = entry.name if entry is not None else "(not in this contract)"
    verdict = "" if record.verdict is Verdict.FAIL else f"   {record.verdict}"
    return f"{SIGNS[record.verdict]} {requirement}  {name}{verdict}"


def _headlines(record: CaseRecord, width: int) -> list[str]:
    return folded(headline(record), width, indent=" " * _INDENT)


def summary_line(certificate: Certificate, *, seconds: float) -> str:
    """CERTIFIED or not and for what, the profile, the counts, the time."""
    counts = " · ".join(f"{count} {verdict}" for verdict, count in certificate.counts.items()) or "nothing ran"
    return (
        f"{verdict_words(certificate)}  {certificate.profile}   {counts}   "
        f"{certificate.executed} of {certificate.expected} cases reported   {duration(seconds)}"
    )


def group_mark(group: Group, judged: Judged) -> str:
    """The standing of a group in a list of known failures: "known: why", "new", "3 of 5 cases new"; else empty."""
    marks = [judged.marks[record.case] for record in group.cases if record.case in judged.marks]
    if not marks:
        return ""
    if all(mark == marks[0] for mark in marks):
        return marks[0].sentence()
    counts = Counter(mark.standing for mark in marks)
    return "; ".join(f"{counts[standing]} of {len(group.cases)} cases {standing}" for standing in counts)


def harm_line(records: Iterable[CaseRecord]) -> str:
    """ "harm: trains silently wrong 12 · hangs 3", in cases; empty if no case accuses the engine."""
    counts = count_by_severity(records)
    return "harm: " + " · ".join(f"{severity.words} {count}" for severity, count in counts.items()) if counts else ""


def verdict_words(certificate: Certificate) -> str:
    """ "CERTIFIED base + offload (1 of 44 extensions)", or the word alone without a certificate."""
    if not certificate.certified:
        return certificate.word + (" (ranks shared devices)" if certificate.on_shared_devices else "")
    granted = [scope.title for scope in certificate.extensions if scope.state is State.PASSED]
    bases = [scope.title for scope in certificate.scopes if scope.names == BASE]
    count = f"{len(granted)} of {len(certificate.extensions)} {'extensions' if bases else 'components'}"
    if len(granted) > _EXTENSIONS_NAMED:
        return f"{certificate.word} {' + '.join([*bases, count])}"
    return f"{certificate.word} {' + '.join([*bases, *granted])} ({count})"


def certificate_text(certificate: Certificate, *, width: int = WIDTH) -> str:
    """Why there is no certificate, and what it rests on if there is one; folded at `width` columns."""
    sentences = [*(f"not certified because: {reason}" for reason in certificate.reasons), *basis(certificate)]
    return "\n".join(line for text in sentences for line in folded(text, width, lead="  ", indent="    "))


def basis(certificate: Certificate) -> list[str]:
    """Scopes, what was not observed, what was judged, what the adapter declared, and notes: a text for each."""
    lines: list[str] = []
    # Nothing is claimed for what a partial run has left out.
    for state in (state for state in State if state is not State.LEFT_OUT):
        names = [_with_example(scope) for scope in certificate.extensions if scope.state is state]
        if names:
            lines.append(f"{state}: {', '.join(names)}")
    together = certificate.combinations
    if any(scope.state is not State.LEFT_OUT for scope in together):
        granted = sum(scope.state is State.PASSED for scope in together)
        others = [
            "; " + f"{state}: " + ", ".join(_with_example(scope) for scope in together if scope.state is state)
            for state in State
            if state not in (State.PASSED, State.LEFT_OUT) and any(scope.state is state for scope in together)
        ]
        lines.append(f"combinations passed: {granted} of {len(together)}{''.join(others)}")
    if certificate.certified and certificate.unobserved:
        lines.append(f"mandatory, but not observed: {', '.join(certificate.unobserved)}")
    if certificate.certified:
        lines.append(f"judged: {_subject(certificate.subject)}")
    if certificate.executed == certificate.expected:
        lines += [f"declared: {phrase}" for phrase in certificate.declarations]
    return lines + [f"note: {remark}" for remark in certificate.remarks]


def _with_example(scope: Scope) -> str:
    example = f" ({scope.example})" if scope.state in (State.FAILED, State.UNJUDGED) else ""
    return f"{scope.title}{example}"


def _subject(subject: Mapping[str, str]) -> str:
    judged = f"{subject['implementation']} {subject['version']}".rstrip()
    by = f"suite {subject['suite']} {subject['suite_sha256'][:12]}"
    return f"{judged}, adapter {subject['adapter'][:12]}, by {by}, torch {subject['torch']}, Python {subject['python']}"


def duration(seconds: float) -> str:
    """ "0.4 s", "48 s", "3 min 05 s"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _finding_fields(finding: Finding, first: Finding) -> list[Field]:
    """Where results first diverged, and the finding that says most."""
    if (first.where(), first.message) == (finding.where(), finding.message):
        fields = [Field("first", finding.where())]
    else:
        fields = [Field("first", " · ".join(part for part in (first.where(), first.message) if part))]
        fields.append(Field("shown at", finding.where()))
    if finding.got is not None or finding.expected is not None:
        figures = [f"{finding.got}", f"expected {finding.expected}"]
        if finding.ratio is not None:
            figures.append(f"ratio {finding.ratio:.4g}")
        if finding.ulps is not None:
            figures.append(f"{finding.ulps:g} ulps")
        if finding.differing is not None and finding.elements:
            figures.append(f"on {finding.differing} of {finding.elements} elements")
        bound = f" ({finding.bound})" if finding.bound else ""
        fields.append(Field("got", " · ".join(figures) + bound))
    fields.append(Field("seen", f"{finding.message} [{finding.check}]"))
    return [*fields, Field("call", finding.call or ""), Field(DETAIL, finding.detail or "", verbatim=True)]


def _waits(end: RankExit) -> str:
    """Where a rank was when it was ended."""
    if end.reported:
        return "had finished"
    last = end.last_collectives[-1] if end.last_collectives else "no collective"
    site = next(iter(engine_frames(frames_of_stack(end.stack or ""))), None)
    return f"last: {last}" + (f"   at {site.name}:{site.line} in {site.function}" if site is not None else "")


def _raised_at(record: CaseRecord) -> list[Field]:
    """The innermost frames of an exception: the engine's, or torch's and the model's if no engine code was running."""
    if record.verdict in QUIET or record.verdict is Verdict.ERROR_SUITE:
        return []
    frames = frames_of_traceback(record.traceback)
    frames = (engine_frames(frames) or frames)[:_FRAMES_SHOWN]
    labels = ("raised at", *["called at"] * len(frames))
    return [Field(label, str(frame), verbatim=True) for label, frame in zip(labels, frames, strict=False)]


def _lines(one: Field, width: int) -> list[str]:
    """A labelled text, folded unless it is verbatim; a detail has no label, and keeps its lines."""
    if one.label == DETAIL:
        return [" " * (_INDENT + 2) + line for line in one.text.splitlines()]
    lead = " " * _INDENT + one.label.ljust(_LABEL)
    if one.verbatim:
        return [lead + one.text]
    return folded(" ".join(one.text.split()), width, lead=lead, indent=" " * (_INDENT + _LABEL))
