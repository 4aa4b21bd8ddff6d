"""
The twelve possible verdicts on a case, and which outranks which.

PASS is the only verdict that means the requirement was seen to hold. Inconclusive runs never pass: references that
disagree, a rank that never answered and a missing device each have their own verdict.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class Verdict(StrEnum):
    """The outcome of one case. Members are listed from best to worst."""

    PASS = "PASS"
    """The case ran on every rank, made comparisons, and each of them held."""
    XFAIL = "XFAIL"
    """The case failed as predicted by the implementer's expectation file."""
    UNSUPPORTED = "UNSUPPORTED"
    """The implementation does not offer what the case needs, and rejects it with an error."""
    DISABLED = "DISABLED"
    """The user switched the case off."""
    NOT_RUN_ENV = "NOT_RUN_ENV"
    """The case cannot run on this machine: a device, a backend or a compiler is missing."""
    INCONCLUSIVE = "INCONCLUSIVE"
    """The references disagree with each other, so they cannot judge the implementation."""
    XPASS = "XPASS"
    """The expectation file predicts a failure, but the case passed: the entry is stale."""
    FAIL = "FAIL"
    """A comparison did not hold, or the implementation raised where it had to train."""
    HANG = "HANG"
    """A rank passed its deadline."""
    CRASH = "CRASH"
    """A rank was ended by a signal, or exited before its report arrived."""
    ERROR_ADAPTER = "ERROR_ADAPTER"
    """The adapter broke the protocol: nothing is known about the implementation."""
    ERROR_SUITE = "ERROR_SUITE"
    """A mistake in the suite: a case that compared nothing, a probe that is not exact, an oracle that raised."""


_RANK = {verdict: index for index, verdict in enumerate(Verdict)}

#: Verdicts that accuse neither side. `report.certificate` decides what they mean for a certificate: PASS earns a scope,
#: the others leave it out.
CERTIFIABLE = frozenset({Verdict.PASS, Verdict.UNSUPPORTED, Verdict.NOT_RUN_ENV})

#: Verdicts that need no explanation.
QUIET = frozenset({Verdict.PASS, Verdict.UNSUPPORTED, Verdict.DISABLED, Verdict.NOT_RUN_ENV})

#: Verdicts that blame the implementation or its adapter.
ACCUSING = frozenset({Verdict.FAIL, Verdict.HANG, Verdict.CRASH, Verdict.ERROR_ADAPTER})

#: Verdicts that need no attention. `--fail-fast` stops at any other, and `--last-failed` runs the others again.
FINE = CERTIFIABLE | {Verdict.XFAIL, Verdict.DISABLED}

#: Verdicts in which the case's body ran to its end on every rank.
RAN = frozenset({Verdict.PASS, Verdict.XFAIL, Verdict.XPASS, Verdict.FAIL, Verdict.INCONCLUSIVE})


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict that outranks the others. Raises ValueError for no verdicts: PASS would claim what was not seen."""
    candidates = list(verdicts)
    if not candidates:
        raise ValueError("worst() needs at least one verdict: a group without cases has none")
    return max(candidates, key=_RANK.__getitem__)
