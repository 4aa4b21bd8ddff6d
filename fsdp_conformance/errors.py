"""
Everything that can go wrong, with the suite's own faults apart from the implementation's.

    ConformanceError
    +-- UsageError                 options, files and plans that make no sense        exit status 2
    |   +-- ConfigError            a plan or an option out of range
    |   |   +-- InvalidCollective  a collective of simulated ranks that no rank can take part in
    |   |       +-- ScalarCollective
    |   +-- AdapterNotFound        the named implementation cannot be imported
    |   +-- RunFileError           a run file that cannot be read
    +-- EnvironmentUnavailable     a device, backend or compiler that is absent       exit status 3
    +-- AdapterError               the adapter broke the protocol                     ERROR_ADAPTER
    +-- Unsupported                the implementation refuses what was asked          UNSUPPORTED
    +-- SuiteError                 our own fault                                      exit status 4, ERROR_SUITE
    |   +-- NotExact               a probe is not exact, so it cannot judge
    |   +-- NothingCompared        an oracle made no comparison
    +-- RequirementFailed          requirements did not hold: carries the findings    FAIL
    +-- HazardsFound               unordered accesses: carries their descriptions     FAIL
    +-- RankFailed                 a rank ended early                                 CRASH
    |   +-- RankRaised, RankDied
    |   +-- RankTimedOut           ... or not at all                                  HANG
    +-- ReferencesDisagree         the references disagree with each other            INCONCLUSIVE

Messages name the thing and both values: `world_size must be a positive integer, got 0 [Plan]` for an argument,
`gradient of 'fc.weight': expected 1, got 0` for a comparison. What to do next follows, if it helps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fsdp_conformance.status import Status

if TYPE_CHECKING:
    from fsdp_conformance.outcome.records import Finding


class ConformanceError(Exception):
    """The base of every error that this package raises deliberately."""

    exit_status = Status.SUITE


class UsageError(ConformanceError, ValueError):
    """The user asked for something that cannot be done."""

    exit_status = Status.USAGE


class ConfigError(UsageError):
    """
    A plan or an option is out of range. Carries every problem, not only the first.

    `where` is empty if the problems name the place themselves.
    """

    def __init__(self, problems: Sequence[str], *, where: str = "") -> None:
        self.problems = tuple(problems)
        self.where = where
        super().__init__("; ".join(self.sentences()))

    def sentences(self) -> list[str]:
        """Each problem, with its place."""
        return [f"{problem} [{self.where}]" if self.where else problem for problem in self.problems]


class InvalidCollective(ConfigError, RuntimeError):
    """A collective of simulated ranks that no rank can take part in. A RuntimeError, as it is with torch's backends."""


class ScalarCollective(InvalidCollective, IndexError):
    """An all-to-all of a tensor without dimensions. With gloo it is an IndexError since torch 2.14."""


class AdapterNotFound(UsageError):
    """The named implementation cannot be imported."""


class RunFileError(UsageError):
    """A file cannot be read, or is not a run file."""


class EnvironmentUnavailable(ConformanceError):
    """This machine lacks what was asked for."""

    exit_status = Status.ENVIRONMENT


class AdapterError(ConformanceError):
    """The adapter broke the protocol. Carries every problem."""

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
    """The suite's own mistake, which says nothing about the implementation."""


class NotExact(SuiteError):
    """A probe's float32 run differs from its float64 twin, so it cannot demand bitwise equality."""


class NothingCompared(SuiteError):
    """A case ended without a comparison on a rank that had to make some."""


class RequirementFailed(ConformanceError, AssertionError):
    """At least one comparison failed. Carries the findings, first divergence first."""

    exit_status = Status.NOT_CERTIFIED

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = tuple(findings)
        super().__init__("\n".join(finding.sentence() for finding in self.findings))


class HazardsFound(ConformanceError, AssertionError):
    """The simulated accelerator saw unordered accesses to the same memory. Carries the explanation of each."""

    exit_status = Status.NOT_CERTIFIED

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = tuple(texts)
        number = "1 hazard" if len(self.texts) == 1 else f"{len(self.texts)} hazards"
        super().__init__("\n\n".join((f"{number} found", *self.texts)))


class ReferencesDisagree(ConformanceError):
    """The references differ from each other by more than the bound, so they cannot judge an implementation."""


class RankFailed(ConformanceError):
    """A rank ended badly. `rank` is the first that failed."""

    exit_status = Status.NOT_CERTIFIED

    def __init__(self, message: str, *, rank: int) -> None:
        self.rank = rank
        super().__init__(message)


class RankRaised(RankFailed):
    """A rank's body raised."""


class RankDied(RankFailed):
    """A rank's process was killed by a signal, or exited, before it had reported."""


class RankTimedOut(RankFailed):
    """A rank passed its deadline and was terminated."""
