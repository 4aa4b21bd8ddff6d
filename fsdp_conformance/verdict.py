"""
The twelve things a run can say about a case, and the order in which they outrank each other.

PASS is the only verdict that says "the requirement was seen to hold". Everything that could not be told apart from a
failure (a reference that disagrees with itself, a rank that never answered, a device that is not there) has a verdict
of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class Verdict(StrEnum):
    """What a run says about one case. Members are listed from best to worst."""

    PASS = "PASS"
    """The case ran on every rank, made comparisons, and each of them held."""
    XFAIL = "XFAIL"
    """The case failed as the implementer's expectation file says it does."""
    UNSUPPORTED = "UNSUPPORTED"
    """The implementation does not offer what the case needs, and refuses it loudly."""
    DISABLED = "DISABLED"
    """The user switched the case off."""
    NOT_RUN_ENV = "NOT_RUN_ENV"
    """This machine cannot tell: a device, a backend or a compiler is absent."""
    INCONCLUSIVE = "INCONCLUSIVE"
    """The references disagree with each other, so nobody can be judged by them."""
    XPASS = "XPASS"
    """The expectation file says that the case fails, and it passed: the entry is stale."""
    FAIL = "FAIL"
    """A comparison did not hold, or the implementation raised where it had to train."""
    HANG = "HANG"
    """A rank passed its deadline."""
    CRASH = "CRASH"
    """A rank ended by a signal or with an exit code of its own, before its report was in."""
    ERROR_ADAPTER = "ERROR_ADAPTER"
    """The adapter broke the protocol: nothing is known about the implementation."""
    ERROR_SUITE = "ERROR_SUITE"
    """The suite's own mistake: a case that compared nothing, a probe that is not exact, an oracle that raised."""


_RANK = {verdict: index for index, verdict in enumerate(Verdict)}

#: Verdicts that leave a certificate possible. NOT_RUN_ENV is allowed only for cases whose manifest entry names the
#: missing environment, UNSUPPORTED only where the requirement's level admits it: `report.certificate` decides.
CERTIFIABLE = frozenset({Verdict.PASS, Verdict.UNSUPPORTED, Verdict.NOT_RUN_ENV})

#: Verdicts that need nobody's attention. `--fail-fast` stops at any other, and `--last-failed` runs the others again.
FINE = CERTIFIABLE | {Verdict.XFAIL, Verdict.DISABLED}

#: Verdicts in which the case's body ran to its end on every rank.
RAN = frozenset({Verdict.PASS, Verdict.XFAIL, Verdict.XPASS, Verdict.FAIL, Verdict.INCONCLUSIVE})


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict that outranks the others; PASS for none at all is a lie, so an empty iterable raises ValueError."""
    found = list(verdicts)
    if not found:
        raise ValueError("worst() of no verdicts: a group without cases has no verdict")
    return max(found, key=_RANK.__getitem__)
