"""
Guard: every requirement has a case, every case can fail, and the names in cases exist.

A requirement without a case is named in contract/uncovered.toml with a reason. A case names the known-wrong
implementations that it must fail; that it really fails them is shown by running them, not here.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping

import pytest

from fsdp_conformance import contract, mutants
from fsdp_conformance.capability import CAPABILITIES
from fsdp_conformance.contract import Contract, profile
from fsdp_conformance.contract.case import ENVIRONMENTS, Case
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.tests.guards import checkout

pytestmark = checkout.required

UNCOVERED = "fsdp_conformance/contract/uncovered.toml"


@functools.cache
def cases() -> tuple[Case, ...]:
    """Every case of every suite."""
    return tuple(profile.collect_cases())


def coverage_problems(judged: Contract, cases: Iterable[Case], excused: Mapping[str, str]) -> list[str]:
    """Contradictions between the contract, the cases and the list of excuses."""
    bound = {requirement for case in cases for requirement in case.requirements}
    problems = [
        f"{name} is bound by a case, but is not a requirement" for name in sorted(bound - judged.requirements.keys())
    ]
    for requirement in judged.requirements.values():
        if requirement.id in excused and requirement.id in bound:
            problems.append(f"{requirement.id} has a case now, so its entry in {UNCOVERED} should be deleted")
        elif requirement.id not in bound and requirement.id not in excused:
            problems.append(f"{requirement.id} ({requirement.name}) has neither a case nor an entry in {UNCOVERED}")
    for name, reason in excused.items():
        if name not in judged.requirements:
            problems.append(f"{name} is in {UNCOVERED}, but is not a requirement")
        if len(reason.split()) < 4:
            problems.append(f"{name}: reason in {UNCOVERED} must be a sentence, got {reason!r}")
    return problems


def test_bodies_catch_warnings_where_the_engine_is() -> None:
    """A body runs in the referee as well, where the engine warns of nothing."""
    imports = {
        module.place: {each.name for each in checkout.imports(module)}
        for module in checkout.modules()
        if module.part == "suites"
    }

    assert imports
    assert [place for place, names in imports.items() if "warnings" in names] == [], "use self.catching_warnings()"


def case_problems(judged: Contract, cases: Iterable[Case], wrong: Iterable[str]) -> list[str]:
    """Problems of single cases: names that do not exist, duplicate ids, cases that no mutant fails."""
    mutants = frozenset(wrong)
    problems = [
        f"{name}: the id comes {count} times" for name, count in Counter(case.id for case in cases).items() if count > 1
    ]
    for case in cases:
        problems += [
            f"{case.id}: needs={flag!r}, which is not a capability" for flag in case.needs if flag not in CAPABILITIES
        ]
        problems += [
            f"{case.id}: environment={name!r} is unknown" for name in case.environment if name not in ENVIRONMENTS
        ]
        problems += [f"{case.id}: kills={name!r}, which is not a mutant" for name in case.kills if name not in mutants]
        if not case.kills:
            problems.append(
                f"{case.id}: kills nothing, but a case that no known-wrong implementation fails proves nothing"
            )
        primary = judged.requirements.get(case.requirements[0])
        if primary is not None and primary.chapter != case.chapter:
            problems.append(f"{case.id}: chapter must be {primary.chapter!r}, got {case.chapter!r}")
    return problems


def test_there_are_cases() -> None:
    """The guards below have something to judge."""
    assert cases() != ()


def test_profiles_hold_the_cases_as_they_are() -> None:
    """Every shipped profile has the hash that it states, and says of each case what its suite says."""
    problems = []
    for name in profile.names():
        ours = profile.load_profile(name)
        # The others are parts of these.
        only = () if name.startswith((profile.CORE, profile.COMPONENTS)) else tuple(ours.by_id)
        theirs = profile.profile_of(name, cases(), only=only, certifies=ours.certifies)
        problems += [f"{name}: {problem}" for problem in profile.difference(ours, theirs)]

    assert {RunSettings().profile, "sample"} <= set(profile.names())
    assert problems == []


def test_every_requirement_has_a_case_or_a_reason() -> None:
    """No requirement is forgotten, and no excuse outlives its reason."""
    assert coverage_problems(contract.load(), cases(), contract.uncovered()) == []


def test_every_case_kills_a_mutant_that_exists() -> None:
    """
    Every case names at least one known-wrong implementation, and every name in a case exists.

    Rows of pairs are there for a combination each, not for a defect: some of them name engines for all.
    """
    rows = [case for case in cases() if case.id.startswith("R000/pairs-")]
    silent = {f"{case.id}: kills nothing" for case in rows if not case.kills}
    problems = case_problems(contract.load(), cases(), mutants.MUTANTS)

    assert [problem for problem in problems if problem.partition(",")[0] not in silent] == []
    assert len(rows) - len(silent) >= 2


def test_every_mutant_is_claimed_by_a_case() -> None:
    """A known-wrong implementation that no case must fail would show nothing."""
    assert set(mutants.MUTANTS) - {name for case in cases() for name in case.kills} == set()


_RIGHT = Case(
    id="R001/some-ws2", requirements=("R001",), chapter="A", world_size=2, title="It holds.", kills=("sum-not-mean",)
)


def _changed(**fields: object) -> Case:
    return Case(**{**{name: getattr(_RIGHT, name) for name in Case.__dataclass_fields__}, **fields})


@pytest.mark.parametrize(
    "wrong",
    [
        (_RIGHT, _RIGHT),
        (_changed(kills=()),),
        (_changed(kills=("no-such-mutant",)),),
        (_changed(needs=("no_such_flag",)),),
        (_changed(environment=("moon",)),),
        (_changed(chapter="Z"),),
    ],
    ids=["id twice", "kills nothing", "unknown mutant", "unknown flag", "unknown environment", "wrong chapter"],
)
def test_the_case_guard_speaks(wrong: tuple[Case, ...]) -> None:
    """Each mistake in a case is one problem; the case without it has none."""
    judged = contract.load()

    assert case_problems(judged, [_RIGHT], ["sum-not-mean"]) == []
    assert len(case_problems(judged, wrong, ["sum-not-mean"])) == 1


def test_the_coverage_guard_speaks() -> None:
    """A requirement without case or reason, a stale excuse and an empty reason are each named."""
    judged = contract.load()
    excused = dict.fromkeys(judged.requirements, "It waits for its part.")
    forgotten, *_ = (name for name in judged.requirements if name != "R001")

    assert coverage_problems(judged, [], excused) == []
    assert coverage_problems(judged, [_RIGHT], excused) != []
    assert coverage_problems(judged, [], {**excused, "R001": "Later."}) != []
    assert any(forgotten in problem for problem in coverage_problems(judged, [], {"R001": "It waits for its part."}))
