"""Which cases a run selects: by id, glob, requirement, chapter, scope, world size and last failure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdp_conformance.contract.profile import Profile, load_profile, profile_of
from fsdp_conformance.contract.selection import left_out_by, selected, selection_options
from fsdp_conformance.errors import ConfigError, SuiteError, UsageError
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.tests.pytest_plugin import mini_suite
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
                needs=("prefetch_explicit",) if case_id.startswith("R070") else (),
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
        ({"capabilities": ("prefetch_explicit",)}, ["R070/order-ws2"]),
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
        ({"cases": ("R904/*",)}, "case must match at least one case, got 'R904/*'. Did you mean R0"),
        (
            {"requirements": ("R907",)},
            "requirement must be one that cases are named after, got 'R907'. Did you mean",
        ),
        ({"bindings": ("R923",)}, "binding must be a requirement that has cases, got 'R923'. Did you mean R003"),
        ({"chapters": ("B",)}, "chapter must be one of A, G, got 'B'"),
        ({"scopes": ("offlod",)}, "scope must be one of base"),
        (
            {"capabilities": ("prefetch_explicitly",)},
            "capability must be one that cases need, got 'prefetch_explicitly'. Did you mean prefetch_explicit",
        ),
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


@pytest.mark.parametrize(
    ("name", "settings", "problem"),
    [
        (
            "core",
            {"cases": ("R163/assignment-by-size-ws1",)},
            (
                "case 'R163/assignment-by-size-ws1' is in the suites, but not in profile core-2026.11. "
                "Use --profile components-2026.11 or full-2026.11"
            ),
        ),
        (
            "quick",
            {"cases": ("R001/exact-probe-ws[34]",)},
            (
                "case 'R001/exact-probe-ws[34]' is in the suites, but not in profile quick-2026.11. "
                "Use --profile core-2026.11 or full-2026.11"
            ),
        ),
        (
            "components",
            {"cases": ("R001",)},
            (
                "case 'R001' is in the suites, but not in profile components-2026.11. "
                "Use --profile core-2026.11 or full-2026.11"
            ),
        ),
        (
            "core",
            {"requirements": ("R163",)},
            "named after, got 'R163'. Use --profile components-2026.11 or full-2026.11",
        ),
        ("core", {"bindings": ("R163",)}, "has cases, got 'R163'. Use --profile components-2026.11 or full-2026.11"),
        ("core", {"chapters": ("AA",)}, "got 'AA'. Use --profile components-2026.11 or full-2026.11"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_is_in_another_profile_is_not_called_missing(name: str, settings: dict[str, Any], problem: str) -> None:
    """The profiles that have it are named."""
    with pytest.raises(ConfigError) as raised:
        ids(load_profile(name), **settings)

    (text,) = raised.value.problems
    assert text.endswith(problem)


@pytest.mark.parametrize("pattern", ["R001/probe-ws2", "R001/pro*", "R*/probe-*"])
def test_a_case_that_no_profile_has_yet_is_to_be_written_into_one(pattern: str, tmp_path: Path) -> None:
    """As for every new case: it is in the suites, and can only be selected once a profile has it."""
    mini_suite.write(tmp_path)

    with (
        mini_suite.importable(tmp_path),
        pytest.raises(ConfigError) as raised,
    ):
        selected(load_profile("quick"), RunSettings(cases=(pattern,)), suites=mini_suite.PACKAGE)

    assert raised.value.problems == (
        (
            f"case {pattern!r} is in the suites, but not in profile quick-2026.11. Write it there with "
            "`python -m fsdp_conformance.contract.profile --write core-2026.11`. Then use --profile core-2026.11."
        ),
    )


def test_a_mistyped_case_imports_no_suite(tmp_path: Path) -> None:
    """It would take seconds; the text of the suites shows that no case has such a name."""
    suite = mini_suite.write(tmp_path)
    (suite.package / "test_cases.py").write_text("def test_probe(self): ...\nraise RuntimeError('imported')\n")

    with mini_suite.importable(tmp_path):
        with pytest.raises(ConfigError, match=r"got 'R001/prob-ws2'\. Did you mean R001/"):
            selected(load_profile("core"), RunSettings(cases=("R001/prob-ws2",)), suites=mini_suite.PACKAGE)
        with pytest.raises(SuiteError, match=r"which may have case R001/probe-ws2, cannot be imported: imported"):
            selected(load_profile("core"), RunSettings(cases=("R001/probe-ws2",)), suites=mini_suite.PACKAGE)


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
