"""
Which of a case's findings says most about what is wrong: the one that a report puts first. Standard library only.

The first divergence shows where results went wrong, not always why. A loss that differs names no cause, while the
gradients of the same step do; and a race explains numbers that are not finite, whenever it was seen.

A cause is believed if the findings of its kind agree on it. Small tensors fit many causes by chance: if the others that
differ in the same step name another cause, or none, so does the report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from fsdp_conformance.outcome.records import CaseRecord, Finding

#: The check whose findings explain all others.
RACES = "stream safety"

#: The check of a rank that raised.
RAISED = "training"

#: Checks of how a case ended, whose finding comes first and decides.
ENDS = frozenset({RAISED, "deadline", "process end", "refusal", "loud refusal"})

#: Explanations that describe the difference, or refer to another one, and name no cause.
_VAGUE = ("scaled:", "elements permuted", "a consequence of")

#: Checks of values that later ones of the same step are computed from. Without a cause for these, there is none for the
#: others; a loss says little, and the gradients that follow from it more.
_NORMS = "norm parity"
_CONCLUSIVE = frozenset({"gradient parity", _NORMS, "clipped gradient parity"})

#: The fact of a cause that was tried: a step with this mistake in it, and nothing else, gives the value.
PROVEN = "the value is exactly what that gives"

#: Causes that can look like another one in a tensor, but hardly in all of them; the less likely ones last.
_LESS_SPECIFIC = ("not reduced", "every rank leaves itself out", "rows of a shard lost")

#: Causes that nearly every other one leads to: ranks that are wrong in different ways differ from each other, too.
_WEAK = ("ranks drift apart",)

#: How many findings must name a cause if only half of them do.
_ENOUGH = 2

#: The causes on which findings may agree; more of them explain nothing.
_MAX_NAMED = 3

_PARITY = " parity"
#: What an engine computes first; parameters, norms and later losses follow from it.
GRADIENTS = "gradient parity"
#: Values right after a load, from which all later ones are computed.
LOADED = "loaded parameters"
#: The random numbers that a forward has drawn; what it computes follows from them.
RANDOM = "random numbers"
#: One number per finding, which fits many causes by chance.
_SCALAR = frozenset({"loss parity"})


def causes_in(likely: str | None) -> tuple[str, ...]:
    """The causes that an explanation names, `this, or that: got / expected = 2`; none if it only describes."""
    if not likely or likely.startswith(_VAGUE):
        return ()
    return tuple(likely.partition(": ")[0].split(", or "))


def cause_and_fact(phrase: str) -> tuple[str, str]:
    """The parts of `cause: fact`. Without a fact, the value is what the cause gives."""
    cause, _, fact = phrase.partition(": ")
    return cause, fact or PROVEN


def is_explained(finding: Finding) -> bool:
    """True if a finding names a cause which is not a consequence of nearly every other one."""
    return not {*causes_in(finding.likely)} <= {*_WEAK}


def headline_of(record: CaseRecord) -> Finding | None:
    """
    The finding that every report of a case shows first; None if it has none.

    Among many values a cause may not show. If it does in the plainest training that fails in the same way, that is it;
    its numbers are not those of this finding.
    """
    finding = most_telling(record.findings)
    shown = record.takes.likely if record.takes is not None else None
    if finding is None or shown is None or is_explained(finding):
        return finding
    return replace(finding, likely=f"{shown}, in the plainest training that fails in this way")


def most_telling(findings: Sequence[Finding]) -> Finding | None:
    """The finding to read first; None if there are none. Reports take `headline_of`."""
    if not findings:
        return None
    if findings[0].check in ENDS:
        return findings[0]
    race = next((finding for finding in findings if finding.check == RACES), None)
    return race or _believed(findings) or _unexplained(findings[0])


def _unexplained(first: Finding) -> Finding:
    """The first finding, without a cause that its like do not share."""
    return replace(first, likely=None) if first.check.endswith(_PARITY) and causes_in(first.likely) else first


def _believed(findings: Sequence[Finding]) -> Finding | None:
    """
    The earliest finding of the first step that differs with a cause on which the others of its check agree.

    Causes that it names, but that do not fit as many of the others, are left out.
    """
    step = next((finding.step for finding in findings if finding.step is not None), None)
    early = [finding for finding in findings if finding.step in (step, None)]
    checks = dict.fromkeys(finding.check for finding in early)
    # A norm that nothing explains may be that of something else: then a step that one mistake gives exactly says more.
    only_proven = False
    # The gradients of a step have more numbers in them than its losses, and show the same mistake.
    for check in sorted(
        checks, key=lambda check: (check not in (LOADED, RANDOM), check in _SCALAR and GRADIENTS in checks)
    ):
        alike = [finding for finding in early if finding.check == check]
        cause = _agreed(alike, least=1.0 if check in _SCALAR else 0.0)
        if cause is not None and (_is_proven(cause) or not only_proven):
            return cause
        if check in _CONCLUSIVE:
            # What comes later in the step follows from it; a loss comes before it.
            of_losses = _agreed([finding for finding in early if finding.check in _SCALAR], least=1.0)
            if of_losses is not None or check != _NORMS:
                return of_losses
            only_proven = True
    return None


def _is_proven(finding: Finding) -> bool:
    """True if a value is exactly what its cause gives."""
    return (finding.likely or "").endswith(PROVEN)


def _agreed(findings: Sequence[Finding], *, least: float) -> Finding | None:
    """The first finding with a cause that most of them name, and at least this part."""
    votes = Counter(cause for finding in findings for cause in causes_in(finding.likely))
    most = max(votes.values(), default=0)
    half = len(findings) / 2
    if most < least * len(findings) or most < half or (most == half and most < _ENOUGH):
        return None
    best = _most_specific([cause for cause, count in votes.items() if count == most])
    if len(best) > _MAX_NAMED:
        return None
    naming = [finding for finding in findings if best & {*causes_in(finding.likely)}]
    # The fact that a finding gives is about the first of its causes.
    telling = next((finding for finding in naming if causes_in(finding.likely)[0] in best), naming[0])
    return _narrowed(telling, best)


def _most_specific(causes: Sequence[str]) -> set[str]:
    """Of causes that fit equally many findings, those that would have been refuted more easily."""
    specific = {cause for cause in causes if cause not in _LESS_SPECIFIC}
    return specific or {min(causes, key=_LESS_SPECIFIC.index)}


def _narrowed(finding: Finding, causes: set[str]) -> Finding:
    """The finding with only these of its causes."""
    names, colon, facts = (finding.likely or "").partition(": ")
    likely = [name for name in names.split(", or ") if name in causes]
    return replace(finding, likely=", or ".join(likely) + colon + facts)
