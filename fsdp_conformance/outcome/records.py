"""
The results of a case: findings, a report per rank, how each rank's process ended, and the record in the run file.

Without torch: the controller, `verify` and the report read these. The schema of the run file follows from the types.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any

from msgspec import Meta

from fsdp_conformance import codec
from fsdp_conformance.verdict import Verdict
from fsdp_conformance.visible import visible, visible_content

#: For readers of the schema only: files with other ids, and records of cases that never ran, are read as well.
RequirementId = Annotated[str, Meta(extra_json_schema={"pattern": "^R[0-9]{3}$"})]
CaseId = Annotated[str, Meta(extra_json_schema={"pattern": "^R[0-9]{3}/[a-z0-9.-]+$"})]

#: Numbers in a run file are bounded, so that nothing that computes with them overflows, or loops for ever.
Count = Annotated[int, Meta(ge=0, le=2**53)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]

#: Figures of a finding that may be infinite or NaN, and what the run file has in their place then: JSON has neither.
FIGURES = ("ratio", "ulps")
NOT_FINITE = ("inf", "-inf", "nan")

#: `RankReport.measurements` has this: how many references were computed, taken from the store, and checked with it.
REFERENCES = "reference histories"

#: `RankReport.measurements` has this where the engine refused the combination of a scenario.
DECLINED = "declined"

#: `RankReport.measurements` has this where the scenario was chosen while the case ran: its JSON form.
SCENARIO = "scenario"

#: `CaseRecord.measurements` has these where a case could not be judged: the flags that are not declared, what the
#: machine lacks, and the faults of the case that had nothing to strike.
UNDECLARED = "undeclared"
ABSENT = "absent"
INAPPLICABLE = "inapplicable"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """
    One requirement that did not hold, with an argument that a person can check.

    The fields are data, and `sentence()` puts them into words. Unknown parts are None.
    """

    requirement: RequirementId
    check: str
    """The oracle, e.g. "gradient parity"."""
    message: str
    """The observation, as `WHAT: expected X, got Y; DETAILS`."""
    step: Count | None = None
    phase: str | None = None
    """init, forward, backward, reduce, step, reshard, eval or checkpoint."""
    fqn: str | None = None
    rank: Count | None = None
    element: tuple[Count, ...] | None = None
    """Index of the first differing element in the full tensor."""
    got: str | None = None
    expected: str | None = None
    ratio: float | None = None
    """got / expected at that element."""
    ulps: float | None = None
    """Distance in units in the last place of the expected value's dtype."""
    bound: str | None = None
    """"bitwise", or the tolerance with its derivation."""
    differing: Count | None = None
    """How many elements of the tensor differ."""
    elements: Count | None = None
    """How many elements the tensor has."""
    call: str | None = None
    """The collective or the call that last wrote the value, where known."""
    likely: str | None = None
    """The likely cause, from the signature of the difference."""
    detail: str | None = None
    """The whole argument, if it takes several lines: both stacks of a race."""

    def where(self) -> str:
        """Where results diverged: step, phase, tensor, rank, element."""
        parts = []
        if self.step is not None:
            parts.append(f"step {self.step}")
        if self.phase is not None:
            parts.append(self.phase)
        if self.fqn is not None:
            parts.append(f"{self.fqn!r}")
        if self.rank is not None:
            parts.append(f"rank {self.rank}")
        if self.element is not None:
            parts.append(f"element {list(self.element)}")
        return " · ".join(parts)

    def sentence(self) -> str:
        """The finding in one line."""
        place = self.where()
        return f"{self.requirement} ({self.check}): {self.message}" + (f" [{place}]" if place else "")


@dataclass(kw_only=True, slots=True)
class CheckCount:
    """How much an oracle compared: a check that compares nothing proves nothing."""

    comparisons: Count = 0
    elements: Count = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RankError:
    """An exception that ended a rank's body."""

    kind: str
    """Qualified name of the exception's class."""
    message: str
    traceback: str
    blame: str
    """implementation, adapter, suite, environment or refusal."""
    time: Seconds
    """time.monotonic() on this host when it was raised: the earliest failure is the headline."""
    problems: tuple[str, ...] = ()
    capability: str | None = None


@dataclass(kw_only=True, slots=True)
class RankReport:
    """The report of one rank at the end of its body, before it shuts down."""

    rank: Count
    findings: list[Finding] = field(default_factory=list)
    checks: dict[str, CheckCount] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    """Capability flags that this body's plans and models asked for."""
    unobserved: list[str] = field(default_factory=list)
    """
    Undeclared capability flags without which the case cannot see what its requirement demands, and combinations that
    the adapter avoids, in words.
    """
    digests: dict[str, str] = field(default_factory=dict)
    """Label ("params step 2 0.weight") to hash, which must be equal on all ranks that have the label."""
    digest_requirements: dict[str, str] = field(default_factory=dict)
    """Label prefix ("params", "schedule") to the id of the requirement that demands equality."""
    schedule: list[str] = field(default_factory=list)
    """The collectives of this rank, one line each, in order."""
    unmet: dict[str, list[str]] = field(default_factory=dict)
    """Descriptions of faults that could not strike on this rank, with the ops that they strike: it saw none of them."""
    notes: list[str] = field(default_factory=list)
    """For readers of the certificate: under-declared capabilities, bounds used, shims."""
    measurements: dict[str, Any] = field(default_factory=dict)
    """Figures for the report: noise floors, bytes held, traffic."""
    error: RankError | None = None
    not_run: str | None = None
    """Why the case cannot run in this environment (NOT_RUN_ENV)."""
    inconclusive: str | None = None
    """Why the references cannot judge (INCONCLUSIVE)."""
    environment: dict[str, Any] = field(default_factory=dict)
    """Seeds, thread counts, determinism settings and variables, as applied in the rank."""
    seconds: dict[str, Seconds] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class RankExit:
    """How one rank's process ended, as the controller saw it."""

    rank: Count
    pid: Count | None
    exitcode: Annotated[int, Meta(ge=-(2**31), le=2**31)] | None
    """0, a positive exit code, minus the signal number, or None if it had not ended."""
    time: Seconds
    """time.monotonic() of the end."""
    reported: bool
    """True if the rank's report had arrived before it ended."""
    ended_by_controller: bool = False
    """True if the controller terminated it (deadline, or a peer had failed)."""
    suite_was_late: bool = False
    """True if the suite's own work on this rank took longer than its deadline, so that the case had to end."""
    stack: str | None = None
    """Python stacks of all its threads, taken when a deadline expired."""
    last_collectives: list[str] = field(default_factory=list)
    output: str = ""
    """The tail of what the rank wrote to stdout and stderr."""

    def __post_init__(self) -> None:
        """Make visible all text that comes from the rank."""
        self.stack = None if self.stack is None else visible(self.stack, lines=True)
        self.output = visible(self.output, lines=True)
        self.last_collectives = [visible(line) for line in self.last_collectives]


@dataclass(frozen=True, kw_only=True, slots=True)
class Takes:
    """The values of a scenario that it takes to fail, found by making one value after the other plain."""

    values: tuple[str, ...] = ()
    """`axis: value` each; none if the plainest training fails in the same way."""
    trainings: Count = 0
    """How many plainer trainings were tried."""
    complete: bool = True
    """False if the time was over before each value had been tried: then some of them may not be needed."""
    like: str = ""
    """The case that was shrunk, if this one was not, because it has the same values and fails in the same way."""
    likely: str | None = None
    """The likely cause of the plainest failure, if the values of the case itself show none."""

    def sentence(self) -> str:
        """The values, and what is known of plainer trainings."""
        if not self.values:
            return "nothing special: the plainest training fails in the same way"
        together = "; ".join(self.values)
        if self.like:
            return f"{together} (as {self.like})"
        tried = f"{self.trainings} plainer training{'s' if self.trainings != 1 else ''} tried"
        if not self.complete:
            return f"at most {together} ({tried}, then the time was over)"
        if len(self.values) == 1:
            return f"{together} ({tried})"
        without = "either of them" if len(self.values) == 2 else "any one of them"
        return f"{together}; without {without} it does not fail in this way ({tried})"


@dataclass(kw_only=True, slots=True)
class CaseRecord:
    """One line of the run file: the verdict on one case, and why."""

    case: CaseId
    requirements: Annotated[list[RequirementId], Meta(min_length=1)]
    chapter: str
    verdict: Verdict
    reason: str = ""
    """One sentence; empty for a plain pass."""
    findings: list[Finding] = field(default_factory=list)
    consequences: list[str] = field(default_factory=list)
    """The failures of the other ranks, which the first failure explains."""
    takes: Takes | None = None
    """Of a training with many features that failed, those that it takes; None if that is not known."""
    traceback: str = ""
    """The traceback of the first rank that raised."""
    world_size: Annotated[int, Meta(ge=0, le=2**20, extra_json_schema={"minimum": 1})] = 0
    adapter: str = ""
    """The identity of the adapter that was judged: `AdapterDescription.identity`. Empty if it was not known."""
    device: str = ""
    ranks: str = "processes"
    refereed: bool = False
    """True if a referee judged the case, a process that no code under test has entered, and not its ranks."""
    comparisons: Count = 0
    elements: Count = 0
    notes: list[str] = field(default_factory=list)
    measurements: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    exits: list[RankExit] = field(default_factory=list)
    evidence: list[RankReport] = field(default_factory=list)
    """
    The report of each rank, reduced to what the verdict follows from. Only for verdicts that could do an implementation
    good; `judge.evidence` derives the verdict from it again.
    """
    schedule: list[str] = field(default_factory=list)
    """Rank 0's collectives."""
    repro: str = ""
    """The command that runs this case again."""
    seconds: Seconds = 0.0
    training_seconds: Seconds = 0.0

    def to_json(self) -> dict[str, Any]:
        """The record in terms of JSON; `case_record_from_json` is the inverse."""
        content: dict[str, Any] = codec.plain(self)
        # Most fields of a reduced report are empty.
        content["evidence"] = [
            {name: value for name, value in report.items() if name == "rank" or value} for report in content["evidence"]
        ]
        return content


def case_record_from_json(content: dict[str, Any]) -> CaseRecord:
    """The record in a line of the run file. Changes `content`. Raises ValueError if it is invalid."""
    # What is not of the right type is refused below, with its place.
    with suppress(AttributeError, TypeError):
        for holder in (content, *content.get("evidence", ())):
            for finding in holder.get("findings", ()):
                finding.update({key: float(finding[key]) for key in FIGURES if finding.get(key) in NOT_FINITE})
    return codec.typed(CaseRecord, content)


def rank_report_from_json(content: Any) -> RankReport:
    """The report that a rank has sent. Raises ValueError if it is invalid."""
    return codec.typed(RankReport, visible_content(content))
