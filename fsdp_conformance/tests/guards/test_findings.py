"""Guard: ci/known-findings.toml can be read, and each of its entries names a case that exists."""

from __future__ import annotations

import re
import runpy
from fnmatch import fnmatchcase
from typing import Any

import pytest

from fsdp_conformance.tests.guards import checkout
from fsdp_conformance.tests.guards.checkout import ROOT

pytestmark = checkout.required


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    """The names that the script defines."""
    return runpy.run_path(str(ROOT / "ci/known_findings.py"))


def test_an_entry_names_a_case_that_exists(script: dict[str, Any]) -> None:
    """An entry whose case is in no suite would never be found stale."""
    from fsdp_conformance.tests.guards.test_cases import cases

    assert {entry.case for entry in script["known_findings"]()} - {case.id for case in cases()} == set()


def test_every_entry_names_its_engine_and_its_device(script: dict[str, Any]) -> None:
    """The list is for several engines: an entry for all of them would hide a new defect."""
    entries = script["known_findings"]()

    assert [entry.case for entry in entries if entry.implementation.startswith("*") or not entry.device] == []


def test_entries_of_other_versions_say_which(script: dict[str, Any]) -> None:
    """Their cases are patterns, since an old defect may be in almost every case; each is that of a case that exists."""
    from fsdp_conformance.tests.guards.test_cases import cases

    entries = script["known_findings"](script["VERSIONS"])
    ids = [case.id for case in cases()]

    assert entries
    assert [entry.case for entry in entries if not (entry.torch and entry.device and entry.implementation != "*")] == []
    assert [entry.case for entry in entries if not any(fnmatchcase(id_, entry.case) for id_ in ids)] == []


def test_no_entry_of_other_versions_is_for_the_tested_one(script: dict[str, Any]) -> None:
    """Those belong to the list that every night is compared with."""
    constraints = (ROOT / "ci/constraints.txt").read_text(encoding="utf-8")
    tested = re.search(r"^torch==(\S+)$", constraints, re.MULTILINE)

    assert tested
    assert [e.case for e in script["known_findings"](script["VERSIONS"]) if e.is_for(e.implementation, tested[1])] == []
