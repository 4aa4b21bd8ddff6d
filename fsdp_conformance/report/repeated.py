"""A case that was run again: how the verdict and the headline differ from the earlier ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from fsdp_conformance.diagnosis.headline import headline_of
from fsdp_conformance.outcome.records import CaseRecord, Finding
from fsdp_conformance.verdict import FINE

#: What tells two findings apart, in the order of reading: the field and its name.
_FIELDS = (
    ("requirement", "requirement"),
    ("check", "check"),
    ("step", "step"),
    ("phase", "phase"),
    ("fqn", "parameter"),
    ("rank", "rank"),
    ("element", "element"),
    ("got", "value"),
    ("expected", "expected value"),
    ("message", "message"),
)


def differences(then: CaseRecord, now: CaseRecord) -> list[str]:
    """The differences between two records of a case, one line each; empty if verdict and headline are the same."""
    lines = [] if then.verdict is now.verdict else [f"verdict: {then.verdict}, now {now.verdict}"]
    before, after = headline_of(then), headline_of(now)
    if before is None or after is None:
        if before is not after:
            lines.append(f"finding: {_as_text(before)}, now {_as_text(after)}")
        elif then.verdict not in FINE and then.reason != now.reason:
            lines.append(f"reason: {then.reason}, now {now.reason}")
        return lines
    changed = [
        f"{name}: {getattr(before, field)}, now {getattr(after, field)}"
        for field, name in _FIELDS
        if getattr(before, field) != getattr(after, field)
    ]
    # The message repeats the values.
    return lines + (changed[:-1] if len(changed) > 1 and changed[-1].startswith("message: ") else changed)


def has_failed(record: CaseRecord) -> bool:
    """True if the record needs attention."""
    return record.verdict not in FINE


def text(then: CaseRecord, again: Sequence[CaseRecord]) -> str:
    """The comparison for people: the verdict then, each verdict now with its differences, and how often it failed."""
    lines = [f"then       {_line(then)}"]
    for number, record in enumerate(again, 1):
        label = "now" if len(again) == 1 else f"now {number}"
        lines.append(f"{label.ljust(10)} {_line(record)}")
        lines += [f"           differs  {line}" for line in differences(then, record)]
    return "\n".join([*lines, *_conclusion(then, again)])


def _conclusion(then: CaseRecord, again: Sequence[CaseRecord]) -> Iterator[str]:
    failed, times = sum(map(has_failed, again)), len(again)
    same = sum(record.verdict is then.verdict for record in again)
    alike = sum(not differences(then, record) for record in again)
    yield (
        f"failed {failed} of {times} times; the verdict was the same {same} of {times} times, "
        f"with the same finding {alike}"
    )
    kinds = Counter(record.verdict for record in again)
    if 0 < failed < times:
        verdicts = ", ".join(f"{count} {verdict}" for verdict, count in kinds.items())
        yield f"flaky: {verdicts}. A race, or uninitialized memory: try `run --stress --case {then.case}`"
    elif failed and has_failed(then):
        yield (
            f"probably deterministic: it failed {failed} of {times} times"
            if times > 1
            else "it failed again; --times 10 tells a flaky failure from a deterministic one"
        )
    elif has_failed(then):
        yield f"not reproduced: it failed then, and not in {times} more"
    elif failed:
        yield "new: it did not fail then"


def _as_text(finding: Finding | None) -> str:
    return "none" if finding is None else finding.sentence()


def _line(record: CaseRecord) -> str:
    finding = headline_of(record)
    return " ".join(part for part in (str(record.verdict), finding.sentence() if finding else record.reason) if part)
