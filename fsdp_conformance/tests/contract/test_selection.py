"""Which cases a run selects: by id, glob, requirement, chapter, scope, world size and last failure."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_conformance.contract.profile import Profile, profile_of
from fsdp_conformance.contract.selection import left_out_by, selected, selection_options
from fsdp_conformance.errors import ConfigError, UsageError
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.tests.report.evidence import a_case

#: Case id to what it covers besides the requirement that it is named after.
CASES = {
    "R001/probe-ws2": ("R003",),
    "R001/probe-ws3": ("R003",),
    "R003/once-ws2": (),
    "R005/hybrid-ws4": ("R001", "R003"),
    "R070/order-ws2": (),
}


@pytest.fixture(name="profile")
def _profile() -> Profile:
    return profile_of(
        "some",
        [
            a_case(
                id=case_id, requirements=(case_id[:4], *more), world_size=int(case_id[-1]),
                chapter="G" if case_id.startswith("R070") else "A",
            )
            for case_id, more in CASES.items()
        ],
    )  # fmt: skip


def ids(profile: Profile, **settings: Any) -> list[str]:
    """The selected ids."""
    return [entry.id for entry in selected(profile, RunSettings(**settings))]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, list(CASES)),
        ({"cases": ("R001/probe-ws3",)}, ["R001/probe-ws3"]),
        ({"cases": ("R001",)}, ["R001/probe-ws2", "R001/probe-ws3", "R005/hybrid-ws4"]),
        ({"cases": ("*-ws2",)}, ["R001/probe-ws2", "R003/once-ws2", "R070/order-ws2"]),
        ({"cases": ("R00[35]/*", "R070")}, ["R003/once-ws2", "R005/hybrid-ws4", "R070/order-ws2"]),
        ({"requirements": ("R003",)}, ["R003/once-ws2"]),
        ({"bindings": ("R003",)}, ["R001/probe-ws2", "R001/probe-ws3", "R003/once-ws2", "R005/hybrid-ws4"]),
        ({"chapters": ("G",)}, ["R070/order-ws2"]),
        ({"scopes": ("base",)}, ["R001/probe-ws2", "R001/probe-ws3", "R003/once-ws2"]),
        ({"scopes": ("zero-1",)}, ["R005/hybrid-ws4"]),
        ({"chapters": ("A", "G"), "world_sizes": (3, 4)}, ["R001/probe-ws3", "R005/hybrid-ws4"]),
        ({"last_failed": ("R070/order-ws2", "R999/gone-ws2")}, ["R070/order-ws2"]),
        ({"requirements": ("R001", "R003"), "bindings": ("R003",), "cases": ("*-ws2",)},
         ["R001/probe-ws2", "R003/once-ws2"]),
    ],
    ids=str,
)  # fmt: skip
def test_values_add_up_and_kinds_narrow_down(profile: Profile, settings: dict[str, Any], expected: list[str]) -> None:
    """Union within a kind, intersection across kinds."""
    assert ids(profile, **settings) == expected
    assert len(selection_options(RunSettings(**settings))) == len(settings)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"cases": ("R001/prob-ws2",)},
            (
                "case must be a case id, a requirement that has cases, or a glob such as 'R005/*-ws2', "
                "got 'R001/prob-ws2'. Did you mean R001/probe-ws2, R001/probe-ws3"
            ),
        ),
        ({"cases": ("R003/onec*",)}, "case must match at least one case, got 'R003/onec*'. Did you mean R003/once-ws2"),
        ({"cases": ("R004/*",)}, "case must match at least one case, got 'R004/*'. Did you mean R0"),
        (
            {"requirements": ("R007",)},
            "requirement must be one that cases are named after, got 'R007'. Did you mean",
        ),
        ({"bindings": ("R123",)}, "binding must be a requirement that has cases, got 'R123'. Did you mean R003"),
        ({"chapters": ("B",)}, "chapter must be one of A, G, got 'B'"),
        ({"scopes": ("offlod",)}, "scope must be one of base"),
        ({"world_sizes": (7,)}, "world_size must be one of 2, 3, 4, got 7"),
        (
            {"last_failed": ("R999/a-ws2",)},
            "no case that failed in the last run is in this profile, for example R999/a-ws2",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_value_that_selects_nothing_is_refused(profile: Profile, settings: dict[str, Any], problem: str) -> None:
    """With what is nearest: a mistyped id must not become a run of nothing."""
    with pytest.raises(ConfigError) as raised:
        ids(profile, **settings)

    (text,) = raised.value.problems
    assert text.startswith(problem)


def test_a_requirement_that_is_only_covered_points_to_the_other_option() -> None:
    """No case is named after it."""
    profile = profile_of("some", [a_case(requirements=("R001", "R003"))])
    with pytest.raises(ConfigError, match=r"got 'R003'\. --binding R003 selects the cases that cover it"):
        ids(profile, requirements=("R003",))


def test_all_problems_come_at_once(profile: Profile) -> None:
    """The error has one problem for each value."""
    with pytest.raises(ConfigError) as raised:
        ids(profile, cases=("R9", "x*"), chapters=("Z",), world_sizes=(9,))

    assert len(raised.value.problems) == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"cases": ("R070",), "world_sizes": (3, 4)},
            "no selected case uses world size 3, 4: .* use 2",
        ),
        ({"chapters": ("G",), "requirements": ("R001",)}, "no case of some satisfies all of --requirement, --chapter"),
    ],
)
def test_a_combination_that_selects_nothing_is_refused(
    profile: Profile, settings: dict[str, Any], message: str
) -> None:
    """Each of them alone selects something."""
    with pytest.raises(UsageError, match=message):
        ids(profile, **settings)


def test_the_first_option_that_leaves_a_case_out_is_named() -> None:
    """World sizes last: such a case is DISABLED in the run, not dropped from it."""
    case = a_case(requirements=("R001", "R003"))

    assert left_out_by(case, RunSettings(world_sizes=(2,), chapters=("A",))) == ""
    assert left_out_by(case, RunSettings(world_sizes=(4,), chapters=("A",))) == "--world-size"
    assert left_out_by(case, RunSettings(world_sizes=(4,), chapters=("G",))) == "--chapter"
