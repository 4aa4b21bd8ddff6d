"""Correct engines that do unusual things pass the cases whose checks could mistake them for wrong ones."""

from __future__ import annotations

import pytest

from fsdp_conformance.mutants import VARIANTS
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.selftest import bound_case, run_case
from fsdp_conformance.verdict import Verdict

#: Cases that look at traffic, need no more than the variant declares, and run on simulated ranks.
CASES = (
    "R001/exact-probe-ws3",
    "R005/sharding-degree-full-ws2",
    "R005/sharding-degree-grad-optim-ws2",
    "R010/eval-between-backward-and-step-ws2",
    "R065/deferred-reduction-ws2",
    "R068/total-volume-ws2",
    "R069/world-alone-ws3",
    "R069/hybrid-groups-ws4",
    "R069/expert-groups-ws2",
    "R072/frozen-unit-ws2",
    "R188/it-shards-ws3",
)
#: What is run whenever tests are: numbers, volume, and groups.
_QUICK = ("R001/exact-probe-ws3", "R068/total-volume-ws2", "R069/expert-groups-ws2")


@pytest.mark.nightly
@pytest.mark.nightly_params("R068/total-volume-ws2")
@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in _QUICK else [pytest.mark.nightly]) for case in CASES]
)
def test_exchanged_gradients_are_right(case: str) -> None:
    """Gradients that are exchanged and added on each rank are reduced, by whatever collective."""
    spec = VARIANTS["adds-after-all-to-all"].spec
    record = run_case(bound_case(case), spec, base=RunSettings(ranks="simulated"))

    assert (Verdict.PASS, []) == (record.verdict, list(record.findings)), record.reason
