"""
The exploration: draw, run, shrink what fails, leave it out, and go on until the time is over.

Drawn are scenarios that have many triples of values which nothing has had so far. A scenario that has everything that a
known failure needs is changed until it has not, so that the failure does not hide what else is wrong. A failure is
shrunk by making one value after the other plain, as long as the scenario still fails in the same way; then each of the
values that are left is needed.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.explore.pool import Outcome
from fsdp_conformance.explore.signature import Signature, signature_of
from fsdp_conformance.scenarios.axes import PROCESSES_ALONE, SPACE
from fsdp_conformance.scenarios.covering import Coverage, best_row
from fsdp_conformance.scenarios.scenario import Extent, Scenario
from fsdp_conformance.scenarios.space import Space

#: How often a scenario may be run to make a failure smaller.
MAX_SHRINKS = 60

#: Models with other numbers that a drawn scenario may have. That of the user has its own.
_SALTS = 8

#: How often a scenario is drawn again because it has what a known failure needs.
_REDRAWS = 20


class Runs(Protocol):
    """Runs scenarios."""

    def run(self, scenario: Scenario) -> Outcome: ...


@dataclass(kw_only=True, slots=True)
class Failure:
    """One way in which the engine fails, by its smallest scenario."""

    signature: Signature
    scenario: Scenario
    outcome: Outcome
    drawn: Scenario
    """The scenario in which it was seen first."""
    shrinks: int = 0
    """How many scenarios were run to shrink it."""
    seen: int = 1
    """How many of the drawn scenarios failed in this way."""

    @property
    def needs(self) -> frozenset[str]:
        """The values that it takes to fail."""
        return self.scenario.features


@dataclass(kw_only=True, slots=True)
class Budget:
    """When an exploration ends: after so many seconds, or so many scenarios."""

    seconds: float | None = None
    max_examples: int | None = None
    clock: Callable[[], float] = time.monotonic
    began: float = 0.0

    def begin(self) -> None:
        """From now on."""
        self.began = self.clock()

    def is_late(self) -> bool:
        """True if the time is over."""
        return self.seconds is not None and self.clock() - self.began >= self.seconds

    def is_over(self, ran: int) -> bool:
        """True if no further scenario is to be drawn."""
        return self.is_late() or (self.max_examples is not None and ran >= self.max_examples)


@dataclass(kw_only=True, slots=True)
class Exploration:
    """The counts and failures of an exploration."""

    failures: list[Failure] = field(default_factory=list)
    ran: int = 0
    """Scenarios that were drawn and run, without those that were run to shrink another one."""
    passed: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    """Scenarios that could not be judged, by reason."""
    declined: Counter[str] = field(default_factory=Counter)
    """Combinations that the engine refused, by what it said."""
    left_out: int = 0
    """Scenarios that have all that a known failure needs, and were not run."""
    covered: dict[str, Counter[str]] = field(default_factory=dict)
    """Axis to value to the number of scenarios that ran and were judged."""
    pairs: tuple[int, int] = (0, 0)
    """Pairs of values that were judged, and that there are for this engine."""
    triples: tuple[int, int] = (0, 0)
    """The same for triples."""
    shrinks: int = 0
    seconds: float = 0.0
    fails_always: bool = False
    """The plainest scenario fails: nothing else can be explored."""


def shrunk(scenario: Scenario, fails: Callable[[Scenario], bool], *, most: int = MAX_SHRINKS) -> tuple[Scenario, int]:
    """
    The scenario without the values that it does not take to make `fails` true; each value that is left is needed.

    Also returns how many scenarios were tried, at most `most`. Most failures take two of thirty values, so the search
    is by halves (QuickXplain: Junker, "Preferred explanations and relaxations for over-constrained problems", 2004).
    """
    search = _Shrinking(scenario, fails, most)
    search.extent()
    search.by_halves()
    search.one_by_one()
    return search.smallest, search.tries


class _Shrinking:
    """The search for the values that a failure takes. `smallest` fails, and so has every value of it before."""

    def __init__(self, scenario: Scenario, fails: Callable[[Scenario], bool], most: int) -> None:
        self.smallest = scenario
        self.tries = 0
        self._fails = fails
        self._most = most
        self._results: dict[Scenario, bool] = {scenario: True}

    def extent(self) -> None:
        """Make the training as small as the others, unless it takes its size to fail."""
        for name, usual in asdict(Extent()).items():
            smaller = replace(self.smallest.extent, **{name: usual})
            candidate = replace(self.smallest, extent=smaller)
            if self._holds(candidate):
                self.smallest = candidate

    def by_halves(self) -> None:
        """Find a few values with which it fails, if a failure does not go away when values are added."""
        axes = [axis for axis, _ in self.smallest.values]
        if axes:
            values = dict(self.smallest.values)
            needed = self._needed([], axes, values, added=True)
            self._try({axis: values[axis] for axis in needed})

    def one_by_one(self) -> None:
        """Make one value after the other plain, until each is needed."""
        while any(self._is_plainer(choice) for choice in SPACE.simpler(self.smallest.choice)):
            pass

    def _needed(self, given: list[str], axes: list[str], values: dict[str, str], *, added: bool) -> list[str]:
        """Those of the axes that it takes beside the given ones. `added`: the given ones alone were not tried."""
        if added and self._try({axis: values[axis] for axis in given}):
            return []
        if len(axes) == 1:
            return axes
        half = len(axes) // 2
        first, second = axes[:half], axes[half:]
        of_second = self._needed([*given, *first], second, values, added=True)
        of_first = self._needed([*given, *of_second], first, values, added=bool(of_second))
        return of_first + of_second

    def _is_plainer(self, choice: dict[str, str]) -> bool:
        before = self.smallest
        return self._try(choice) and self.smallest != before

    def _try(self, choice: dict[str, str]) -> bool:
        """True if the scenario with these values, and without those that then make no sense, fails as well."""
        whole = SPACE.without_orphans(SPACE.whole(choice))
        if SPACE.why_impossible(whole) is not None:
            return False
        candidate = replace(self.smallest, values=tuple(SPACE.special(whole).items()))
        holds = self._holds(candidate)
        if holds and len(candidate.values) < len(self.smallest.values):
            self.smallest = candidate
        return holds

    def _holds(self, candidate: Scenario) -> bool:
        """True if a scenario fails as well; False also if no more may be tried."""
        if candidate not in self._results:
            if self.tries >= self._most:
                return False
            self.tries += 1
            self._results[candidate] = self._fails(candidate)
        return self._results[candidate]


class Explorer:
    """
    Draws scenarios for an engine and collects its failures.

    `known`: what known failures take, as sets of `axis: value`; they are neither drawn nor reported. `workload`: the
    user's own model, which `space` is limited to.
    """

    def __init__(
        self,
        runs: Runs,
        declared: frozenset[str],
        budget: Budget,
        *,
        space: Space = SPACE,
        workload: str = "",
        first_seed: int = 0,
        world_sizes: tuple[int, ...] = (2, 3, 1, 4),
        max_shrinks: int = MAX_SHRINKS,
        max_failures: int | None = None,
        known: Iterable[frozenset[str]] = (),
        tell: Callable[[str, Any], None] = lambda what, about: None,
    ) -> None:
        self.runs = runs
        self.budget = budget
        self.result = Exploration()
        self._random = random.Random(first_seed)
        sizes = frozenset(map(str, world_sizes))
        ranks = [value.name for value in SPACE.by_name["ranks"].values]
        if not sizes or not sizes <= set(ranks):
            raise ConfigError([f"world sizes must be among {', '.join(ranks)}, got {world_sizes}"], where="explore")
        # Scenarios run on simulated ranks.
        self._declared = declared - PROCESSES_ALONE
        self._space = space
        self._workload = workload
        self._pairs = Coverage(space, self._declared)
        self._triples: Coverage | None = None
        self._sizes = sizes
        self._max_shrinks = max_shrinks
        self._max_failures = max_failures
        self._tell = tell
        self.avoided = [features for features in known if features]
        """Sets of values that lead to a failure which is known, or has been shrunk."""
        self._failures: dict[Signature, Failure] = {}
        self._seen: set[Scenario] = set()

    def explore(self) -> Exploration:
        """Draw until the budget is used up."""
        self.budget.begin()
        try:
            while not self.budget.is_over(self.result.ran) and not self.result.fails_always:
                scenario = self._drawn()
                if scenario is None or len(self.result.failures) == self._max_failures:
                    break
                self._attempt(scenario)
        finally:
            self.result.seconds = self.budget.clock() - self.budget.began
            self.result.pairs = (self._pairs.covered, self._pairs.possible)
            if self._triples is not None:
                self.result.triples = (self._triples.covered, self._triples.possible)
        return self.result

    def _drawn(self) -> Scenario | None:
        """A scenario that has not run yet; None if there is none left to draw."""
        if not self._seen and "2" in self._sizes:
            # Whether anything passes at all.
            return Scenario(workload=self._workload)
        for _ in range(_REDRAWS):
            ranks = self._random.choice(sorted(self._sizes))
            row = best_row(self._triples or self._pairs, self._random, start={"ranks": ranks}, candidates=1)
            if row is None:
                continue
            if self._triples is None and self._has_few_pairs(row):
                # They take seconds to count.
                self._triples = Coverage(
                    self._space, self._declared, strength=3, rows=[each.choice for each in self._seen]
                )
            scenario = self._without_known(row)
            if scenario is not None and scenario not in self._seen:
                return scenario
        return None

    def _has_few_pairs(self, row: dict[str, str]) -> bool:
        """True if hardly any pair of values is left, or none that goes with the numbers of ranks."""
        return self._pairs.left < self._pairs.possible // 50 or not self._pairs.gain_of(row)

    def _without_known(self, row: dict[str, str]) -> Scenario | None:
        """The scenario of a row, without what known failures need; None if too many of them are in it."""
        for _ in range(_REDRAWS):
            salt = 0 if self._workload else self._random.randrange(_SALTS)
            scenario = Scenario.of(row, salt=salt, workload=self._workload)
            known = next((known for known in self.avoided if known <= scenario.features), None)
            if known is None:
                return scenario if scenario.choice["ranks"] in self._sizes else None
            self.result.left_out += 1
            axis = self._random.choice(sorted(known)).partition(": ")[0]
            row = SPACE.without_orphans({**row, axis: SPACE.by_name[axis].plain})
        return None

    def _attempt(self, scenario: Scenario) -> None:
        """Run a scenario; if it fails in a new way, shrink it."""
        self._seen.add(scenario)
        outcome = self.runs.run(scenario)
        self._count(scenario, outcome)
        if not outcome.failed:
            return
        signature = signature_of(outcome)
        if signature in self._failures:
            self._failures[signature].seen += 1
            self._avoid(self._failures[signature], scenario)
            return
        self._tell("failure", signature)
        smallest: dict[Scenario, Outcome] = {scenario: outcome}

        def fails(candidate: Scenario) -> bool:
            same = self._failing_alike(candidate, signature)
            if same is not None:
                smallest[candidate] = same
            return same is not None

        last, number = shrunk(scenario, fails, most=self._max_shrinks)
        failure = Failure(signature=signature, scenario=last, outcome=smallest[last], drawn=scenario, shrinks=number)
        self._failures[signature] = failure
        # Its report may begin with another finding than that of the larger one.
        self._failures.setdefault(signature_of(smallest[last]), failure)
        self.result.failures.append(failure)
        self._tell("shrunk", failure)
        if failure.needs:
            self.avoided.append(failure.needs)
        else:
            self.result.fails_always = True

    def _avoid(self, failure: Failure, scenario: Scenario) -> None:
        """Find out what else leads to a failure that is known, so that it hides nothing in later scenarios."""

        def fails(candidate: Scenario) -> bool:
            return self._failing_alike(candidate, failure.signature) is not None

        last, _ = shrunk(scenario, fails, most=self._max_shrinks // 2)
        if last.features and last.features not in self.avoided:
            self.avoided.append(last.features)

    def _failing_alike(self, candidate: Scenario, signature: Signature) -> Outcome | None:
        """The outcome of a plainer scenario; None if it does not fail in that way, or is not to be run."""
        if self.budget.is_late() or candidate.choice["ranks"] not in self._sizes:
            return None
        outcome = self.runs.run(candidate)
        self.result.shrinks += 1
        return outcome if signature.is_shown_in(outcome) else None

    def _count(self, scenario: Scenario, outcome: Outcome) -> None:
        self.result.ran += 1
        if outcome.rejected:
            self.result.rejected[outcome.rejected] += 1
            return
        choice = scenario.choice
        self._pairs.add(choice)
        if self._triples is not None:
            self._triples.add(choice)
        if outcome.declined:
            self.result.declined[outcome.declined] += 1
            return
        self.result.passed += not outcome.failed
        for axis in self._space.by_name:
            self.result.covered.setdefault(axis, Counter())[choice[axis]] += 1
        self._tell("ran", outcome)
