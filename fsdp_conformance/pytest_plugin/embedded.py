"""
Cases as tests of a user's own test suite, next to their other tests:

    from fsdp_conformance import conformance_tests

    Test = conformance_tests("my_pkg.adapter:MyFSDP", profile="quick")

pytest collects a test for each case, `Test::test_case[R003/rank-coded-ws2]`, marked `conformance`, and pytest-xdist
deals them out. A case that is not PASS fails with the report that `fsdp-conformance run` prints; one that the engine
declines, or that the machine cannot run, skips with the reason. Such tests write no run file and certify nothing.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_conformance.contract.profile import Entry, known_cases, load_profile
from fsdp_conformance.errors import UsageError
from fsdp_conformance.report.expectations import Expectation, judge, load_expectations
from fsdp_conformance.report.run_content import RunFile
from fsdp_conformance.report.terminal import render_failure
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.verdict import QUIET, Verdict

if TYPE_CHECKING:
    from fsdp_conformance.outcome.records import CaseRecord
    from fsdp_conformance.selftest.cases import BoundCase


def conformance_tests(
    implementation: str,
    *,
    profile: str = "quick",
    cases: Sequence[str] = (),
    expectations: str | Path | None = None,
    device: str = RunSettings().device,
    deadline_scale: float = 1.0,
) -> type:
    """
    A class with a test for each case of the profile, or for those whose ids match one of the globs in `cases`.

    `implementation` is what `fsdp-conformance run --implementation` takes. With `expectations`, a `conformance.toml`, a
    known failure is an expected failure (xfail), a known failure that is gone fails, and so does an entry that has
    expired or names no case. Raises UsageError for a profile, a selection or a list that cannot be used; the adapter
    itself is first imported when a test runs.
    """
    import pytest

    pinned = load_profile(profile)
    entries = [entry for entry in pinned.entries if not cases or _is_named(entry, cases)]
    if not entries:
        raise UsageError(f"cases must match at least one case of {pinned.name}, got {list(cases)} (conformance_tests)")
    listed = load_expectations(Path(expectations)) if expectations is not None else ()
    settings = RunSettings(implementation=implementation, profile=profile, device=device, deadline_scale=deadline_scale)

    @pytest.mark.parametrize("case", [pytest.param(entry.id, id=entry.id) for entry in entries])
    def test_case(self: object, case: str, record_property: Callable[[str, object], None]) -> None:
        """The case holds for the engine."""
        record = _ran(case, settings)
        record_property("conformance_verdict", record.verdict.value)
        record_property("conformance_requirements", " ".join(record.requirements))
        about = [entry for entry in listed if entry.is_about(record, device)]
        failed = record.verdict not in QUIET
        surprises = _surprises([record], about, settings, [case])
        if surprises:
            report = [render_failure(record)] if failed else []
            pytest.fail("\n\n".join([*(surprises if listed else ()), *report]), pytrace=False)
        if failed:
            pytest.xfail("; ".join(entry.reason for entry in about))
        if record.verdict is not Verdict.PASS:
            pytest.skip(f"{record.verdict}: {record.reason}")

    def test_expectations(self: object) -> None:
        """Every entry names a case, and none has expired."""
        stale = _surprises([], listed, settings, known_cases(pinned))
        if stale:
            pytest.fail("\n".join(stale), pytrace=False)

    body: dict[str, Any] = {"test_case": test_case, "__doc__": f"{pinned.name} on {implementation}."}
    if listed:
        body["test_expectations"] = test_expectations
    return pytest.mark.conformance(type("ConformanceTests", (), body))


def _is_named(entry: Entry, globs: Sequence[str]) -> bool:
    return any(fnmatchcase(entry.id, glob) for glob in globs)


def _surprises(
    records: list[CaseRecord], expectations: Sequence[Expectation], settings: RunSettings, cases: Sequence[str]
) -> list[str]:
    """How these records differ from what is expected of them, a sentence each. `cases`: what an entry may name."""
    import torch

    from fsdp_conformance.adapters import registry

    header = {
        "settings": {"implementation": settings.implementation, "device": settings.device},
        "implementation": {"name": registry.describe_once(settings.implementation).name},
        "environment": {"torch": torch.__version__},
    }
    run = RunFile(path="", header=header, records=records)
    comparison = judge(run, expectations, profile_cases=cases, today=dt.datetime.now(dt.UTC).date())
    return [surprise.sentence() for surprise in comparison.surprises]


def _ran(case: str, settings: RunSettings) -> CaseRecord:
    from fsdp_conformance.selftest.cases import run_case

    return run_case(_bound()[case], settings.implementation, base=settings)


@cache
def _bound() -> dict[str, BoundCase]:
    """Every case that the suites have, by id."""
    from fsdp_conformance.selftest.cases import bound_cases

    return {bound.case.id: bound for bound in bound_cases()}
