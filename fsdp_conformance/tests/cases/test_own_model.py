"""How exactly an engine is compared on a user's own model: bit for bit if the references agree so."""

from __future__ import annotations

import pytest

from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.selftest import bound_case, run_case
from fsdp_conformance.verdict import Verdict

_MODULE = "fsdp_conformance.tests.references.unfit_workloads"


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(("name", "comparison"), [("exact", "bitwise"), ("right", "calibrated")])
@pytest.mark.parametrize("implementation", ["torch-fsdp2", "reference"])
def test_comparisons_are_as_exact_as_the_references(implementation: str, name: str, comparison: str) -> None:
    """The user need not say that a model is exact, and a model that rounds is judged by its noise."""
    base = RunSettings(workload=f"{_MODULE}:{name}")

    record = run_case(bound_case("R001/own-model-ws2"), implementation, base=base)

    assert record.verdict is Verdict.PASS, record.reason
    # One figure for all ranks, or one for each.
    assert f"'comparison': '{comparison}'" in str(record.measurements["parameter parity"])
