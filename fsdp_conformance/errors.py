"""
Everything that can go wrong, one class per step of a run, harness faults apart from implementation faults.

    ConformanceError
    +-- UsageError                 the user's words: options, files, plans            exit status 2
    |   +-- ConfigError            a plan or an option out of range
    |   +-- AdapterNotFound        the implementation named cannot be imported
    |   +-- RunFileError           a run file that cannot be read
    +-- EnvironmentUnavailable     a device, backend or compiler that is absent       exit status 3
    +-- AdapterError               the adapter broke the protocol                     ERROR_ADAPTER
    +-- Unsupported                the implementation refuses what was asked          UNSUPPORTED
    +-- SuiteError                 our own fault                                      exit status 4, ERROR_SUITE
    |   +-- NotExact               a probe that is not exact must judge nobody
    |   +-- NothingCompared        an oracle that made no comparison
    +-- RequirementFailed          findings were made: carries them                   FAIL
    +-- HazardsFound               accesses that nothing orders: carries their texts  FAIL
    +-- RankFailed                 a rank ended early                                 CRASH
    |   +-- RankRaised, RankDied
    |   +-- RankTimedOut           ... or not at all                                  HANG
    +-- ReferencesDisagree         the references differ among themselves             INCONCLUSIVE

A message says `what=value, but should be expected [where]`, then what to do next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fsdp_conformance.status import Status

if TYPE_CHECKING:
    from fsdp_conformance.outcome import Finding


class ConformanceError(Exception):
    """The base of every error that this package raises on purpose."""

    exit_status = Status.SUITE


class UsageError(ConformanceError, ValueError):
    """What the user asked for cannot be done as asked."""

    exit_status = Status.USAGE


class ConfigError(UsageError):
    """A plan or an option is out of range. Carries every problem found, not only the first."""

    def __init__(self, problems: Sequence[str], *, where: str) -> None:
        self.problems = tuple(problems)
        self.where = where
        super().__init__("; ".join(f"{problem} [{where}]" for problem in self.problems))


class AdapterNotFound(UsageError):
    """The implementation that was named cannot be imported."""


class RunFileError(UsageError):
    """A run file cannot be read, or is not one."""


class EnvironmentUnavailable(ConformanceError):
    """This machine lacks what was asked for."""

    exit_status = Status.ENVIRONMENT


class AdapterError(ConformanceError):
    """The adapter broke the protocol. Carries every problem found."""

    def __init__(self, problems: Sequence[str] | str) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class Unsupported(ConformanceError, NotImplementedError):
    """
    The implementation (or its adapter) does not offer what the plan asks for.

    `capability` is the flag of `fsdp_conformance.capability` that is missing.
    """

    def __init__(self, capability: str, reason: str = "") -> None:
        self.capability = capability
        self.reason = reason
        super().__init__(f"{capability} is not supported" + (f": {reason}" if reason else ""))


class SuiteError(ConformanceError):
    """The suite's own mistake; nothing is said about the implementation."""


class NotExact(SuiteError):
    """A probe's float32 run differs from its float64 twin, so it must not demand bitwise equality of anybody."""


class NothingCompared(SuiteError):
    """A case ended without a comparison on a rank that should have made some."""


class RequirementFailed(ConformanceError, AssertionError):
    """At least one comparison did not hold. Carries the findings, first divergence first."""

    exit_status = Status.NOT_CERTIFIED

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = tuple(findings)
        super().__init__("\n".join(finding.sentence() for finding in self.findings))


class HazardsFound(ConformanceError, AssertionError):
    """The simulated accelerator saw accesses that nothing orders. Carries the explanation of each."""

    exit_status = Status.NOT_CERTIFIED

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = tuple(texts)
        number = "1 hazard" if len(self.texts) == 1 else f"{len(self.texts)} hazards"
        super().__init__("\n\n".join((f"{number}, but should be none", *self.texts)))


class ReferencesDisagree(ConformanceError):
    """The references differ among themselves by more than they may, so nobody can be judged by them."""


class RankFailed(ConformanceError):
    """A rank did not end as it should. `rank` is the first that failed."""

    exit_status = Status.NOT_CERTIFIED

    def __init__(self, message: str, *, rank: int) -> None:
        self.rank = rank
        super().__init__(message)


class RankRaised(RankFailed):
    """A rank's body raised."""


class RankDied(RankFailed):
    """A rank's process ended by a signal, or with an exit code of its own, before its report was in."""


class RankTimedOut(RankFailed):
    """A rank passed its deadline and was ended."""
