"""An engine that runs on accelerators only, in a run on the CPU: nothing that it refuses there is held against it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import pytest

from fsdp_conformance.adapters.vendors.torch_fsdp2 import TorchFSDP2
from fsdp_conformance.selftest.cases import bound_case, run_case
from fsdp_conformance.verdict import Verdict


class AcceleratorsOnly(TorchFSDP2):
    """FSDP2, which declines to compute on the CPU."""

    declines_on: ClassVar[Mapping[str, frozenset[str]]] = {"cpu": frozenset({"cpu_compute"})}


@pytest.mark.slow
@pytest.mark.nightly_params("R140/made-after-a-forward-evaluation-ws2", "R160/exception-reaches-the-caller-forward-ws2")
@pytest.mark.parametrize(
    "case",
    [
        "R001/exact-probe-ws2",
        # Its subject is an exception, for which it would take the refusal.
        "R160/exception-reaches-the-caller-forward-ws2",
        # It makes its plan itself.
        "R140/made-after-a-forward-evaluation-ws2",
    ],
)
def test_a_case_on_the_cpu_is_unsupported(case: str) -> None:
    record = run_case(bound_case(case), f"{__name__}:{AcceleratorsOnly.__name__}")

    assert record.verdict is Verdict.UNSUPPORTED, record.reason
    assert "cpu_compute" in record.reason
