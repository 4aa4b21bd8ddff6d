"""
The exploration: draw, run, shrink what fails, leave it out, and go on until the time is over.

Hypothesis draws and shrinks; each round ends with one shrunk failure or with the budget. What has been found is not
found again: an example with the same signature does not end a round, and an example that has everything that the shrunk
one needed to fail is not run, except for one in ten, in case it hides something else.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Flaky

from fsdp_conformance.explore.example import Example, axes, features
from fsdp_conformance.explore.pool import Outcome
from fsdp_conformance.explore.signature import Signature, signature_of
from fsdp_conformance.explore.simplify import simpler
from fsdp_conformance.explore.strategies import examples

#: How often an example may be run to make a failure smaller.
MAX_SHRINKS = 60

#: How often it may be run after that, with one thing more made plain.
_MAX_SIMPLIFICATIONS = 40

#: How many examples one round of Hypothesis draws at most: more than fit into any budget.
_ENDLESS = 1_000_000

#: Of the examples that have what a known failure needs, one in this many is run.
_RUN_ANYWAY = 10


class Runs(Protocol):
    """Runs examples."""

    def run(self, example: Example) -> Outcome: ...


@dataclass(kw_only=True, slots=True)
class Failure:
    """One way in which the engine fails, by its smallest example."""

    signature: Signature
    example: Example
    outcome: Outcome
    drawn: Example
    """The example in which it was seen first."""
    shrinks: int = 0
    """How many examples were run to shrink it."""
    seen: int = 1
    """How many of the drawn examples failed in this way, or were left out because of it."""

    @property
    def needs(self) -> frozenset[str]:
        """The features of the smallest example."""
        return features(self.example)


@dataclass(kw_only=True, slots=True)
class Budget:
    """When an exploration ends: after so many seconds, or so many examples."""

    seconds: float | None = None
    max_examples: int | None = None
    clock: Callable[[], float] = time.monotonic
    began: float = 0.0

    def begin(self) -> None:
        """From now on."""
        self.began = self.clock()

    def is_over(self, ran: int) -> bool:
        """True if no further example is to be drawn."""
        late = self.seconds is not None and self.clock() - self.began >= self.seconds
        return late or (self.max_examples is not None and ran >= self.max_examples)


@dataclass(kw_only=True, slots=True)
class Exploration:
    """The counts and failures of an exploration."""

    failures: list[Failure] = field(default_factory=list)
    ran: int = 0
    """Examples that were drawn and run, without those that were run to shrink another one."""
    passed: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    """Examples that could not be judged, by reason."""
    declined: Counter[str] = field(default_factory=Counter)
    """Combinations that the engine refused, by what it said."""
    left_out: int = 0
    """Examples that have all that a known failure needs, and were not run."""
    covered: dict[str, Counter[str]] = field(default_factory=dict)
    """Axis to value to the number of examples that ran and judged."""
    shrinks: int = 0
    seconds: float = 0.0
    fails_always: bool = False
    """The plainest example fails: nothing else can be explored."""


class _Over(BaseException):
    """Ends a round at once; Hypothesis passes it on."""


class _Failed(Exception):
    """An example failed in a way that is not known yet."""


class Explorer:
    """Draws examples for an engine and collects its failures."""

    def __init__(
        self,
        runs: Runs,
        declared: frozenset[str],
        budget: Budget,
        *,
        first_seed: int = 0,
        world_sizes: tuple[int, ...] = (2, 3, 1, 4, 5),
        max_shrinks: int = MAX_SHRINKS,
        max_failures: int | None = None,
        tell: Callable[[str, Any], None] = lambda what, about: None,
    ) -> None:
        self.runs = runs
        self.budget = budget
        self.result = Exploration()
        self._strategy = examples(declared, world_sizes)
        self._seed = first_seed
        self._max_shrinks = max_shrinks
        self._max_failures = max_failures
        self._tell = tell
        self._known: dict[Signature, Failure] = {}
        self._round: _Round | None = None

    def explore(self) -> Exploration:
        """Draw until the budget is used up."""
        self.budget.begin()
        number = 0
        while not self.budget.is_over(self.result.ran) and not self.result.fails_always:
            before = self.result.ran + self.result.left_out
            self._one_round(self._seed + number)
            number += 1
            if self.result.ran + self.result.left_out == before or len(self.result.failures) == self._max_failures:
                # Everything that can be drawn has been drawn, or enough is known.
                break
        self.result.seconds = self.budget.clock() - self.budget.began
        return self.result

    def _one_round(self, number: int) -> None:
        """Draw until an example fails in a new way, and shrink it."""
        self._round = _Round()

        @seed(number)
        @settings(
            max_examples=_ENDLESS,
            deadline=None,
            database=None,
            derandomize=False,
            report_multiple_bugs=False,
            print_blob=False,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        @given(self._strategy)
        def attempt(example: Example) -> None:
            try:
                fails = self._fails(example)
            except Exception as error:
                # Not the engine's: Hypothesis must neither shrink it nor take it for flaky.
                broken.append(error)
                raise _Over from error
            # From one line only: to Hypothesis, another line is another failure.
            if fails:
                raise _Failed

        broken: list[Exception] = []
        # What it takes for flaky is an engine that fails now and then; the failures are kept here.
        with suppress(_Failed, _Over, Flaky):
            attempt()
        if broken:
            raise broken[0]
        if self._round.smallest is not None:
            self._conclude(self._round)

    def _fails(self, example: Example) -> bool:
        """True if an example fails in a new way, or in the way that is being shrunk."""
        current = self._round
        assert current is not None, "an attempt belongs to a round"
        if current.target is not None:
            return self._shrinks(example, current)
        if self.budget.is_over(self.result.ran):
            raise _Over
        if example.digest in current.seen:
            return False
        current.seen.add(example.digest)
        earlier = next((failure for failure in self.result.failures if failure.needs <= features(example)), None)
        if earlier is not None and int(example.digest, 16) % _RUN_ANYWAY:
            earlier.seen += 1
            self.result.left_out += 1
            if self.result.left_out > 50 * (self.result.ran + 10):
                self.result.fails_always = True
                raise _Over
            return False
        outcome = self.runs.run(example)
        self._count(example, outcome)
        if not outcome.failed:
            return False
        signature = signature_of(outcome)
        if signature in self._known:
            self._known[signature].seen += 1
            return False
        current.target, current.drawn = signature, example
        current.keep(example, outcome)
        self._tell("failure", signature)
        return True

    def _shrinks(self, example: Example, current: _Round) -> bool:
        """True if another example fails in the same way. One that is not simpler is not run, and counts as passing."""
        if example.digest in current.failing:
            return True
        if example.digest in current.tried or current.smallest is None:
            return False
        if current.shrinks >= self._max_shrinks:
            raise _Over
        if example.size() > current.smallest[0].size():
            return False
        return self._fails_alike(example, current)

    def _simplify(self, current: _Round) -> None:
        """Make one thing after the other plain, as long as the example still fails in the same way."""
        assert current.smallest is not None, "the round has failed"
        left = _MAX_SIMPLIFICATIONS if self._max_shrinks else 0
        candidates = simpler(current.smallest[0])
        while left and (candidate := next(candidates, None)) is not None:
            if candidate.digest in current.tried or candidate.size() > current.smallest[0].size():
                continue
            left -= 1
            if self._fails_alike(candidate, current):
                candidates = simpler(candidate)

    def _fails_alike(self, example: Example, current: _Round) -> bool:
        """Run an example, and keep it if it fails in the way that is being shrunk."""
        current.shrinks += 1
        current.tried.add(example.digest)
        outcome = self.runs.run(example)
        self.result.shrinks += 1
        if not outcome.failed or signature_of(outcome) != current.target:
            return False
        current.keep(example, outcome)
        return True

    def _conclude(self, current: _Round) -> None:
        assert current.smallest is not None, "the round has failed"
        assert current.target is not None, "a failure has a signature"
        assert current.drawn is not None, "a failure was drawn"
        self._simplify(current)
        example, outcome = current.smallest
        failure = Failure(
            signature=current.target, example=example, outcome=outcome, drawn=current.drawn, shrinks=current.shrinks
        )
        self._known[current.target] = failure
        self.result.failures.append(failure)
        self._tell("shrunk", failure)
        if not failure.needs:
            self.result.fails_always = True

    def _count(self, example: Example, outcome: Outcome) -> None:
        self.result.ran += 1
        if outcome.rejected:
            self.result.rejected[outcome.rejected] += 1
            return
        if outcome.declined:
            self.result.declined[outcome.declined] += 1
            return
        self.result.passed += not outcome.failed
        for axis, value in axes(example).items():
            self.result.covered.setdefault(axis, Counter())[value] += 1
        self._tell("ran", outcome)


@dataclass(slots=True)
class _Round:
    """From one failure to the next."""

    target: Signature | None = None
    drawn: Example | None = None
    smallest: tuple[Example, Outcome] | None = None
    shrinks: int = 0
    seen: set[str] = field(default_factory=set)
    tried: set[str] = field(default_factory=set)
    failing: set[str] = field(default_factory=set)

    def keep(self, example: Example, outcome: Outcome) -> None:
        """Note that the example fails; the smallest one is reported."""
        self.failing.add(example.digest)
        if self.smallest is None or example.size() <= self.smallest[0].size():
            self.smallest = (example, outcome)
