"""The suite's hash covers what a verdict can depend on, wherever it lies."""

from __future__ import annotations

from fsdp_conformance.contract import fingerprint


def test_cases_and_fixtures_are_covered() -> None:
    """In a checkout they are next to the package, in a wheel inside it; the names are the same."""
    names = set(fingerprint._files())

    assert {"suites/test_a_parity.py", "fixtures/probes.py", "checks/parity.py", "__init__.py"} <= names
    assert "contract/requirements.toml" in names


def test_tests_and_documents_are_left_out() -> None:
    """They change no verdict."""
    assert not [name for name in fingerprint._files() if {"tests", "docs", "__pycache__"} & set(name.split("/"))]
