"""ci/bench/run simulated: it adds up processes, and measures no engine that is wrong."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from fsdp_conformance.mutants import MUTANTS
from fsdp_conformance.tests.guards import checkout
from fsdp_conformance.tests.guards.checkout import ROOT
from fsdp_conformance.tests.report.evidence import a_record

pytestmark = [checkout.required, pytest.mark.nightly]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The names that the script defines, while its cases can be imported."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield runpy.run_path(str(ROOT / "ci/bench/simulated.py"))
    sys.modules.pop("nested_parity", None)


def test_processes_are_counted_once(script: dict[str, Any]) -> None:
    """Ranks 0 and 1 live in one process, rank 2 in another: the largest of what each process has said."""
    read = [
        {"pid": 7, "cpu seconds": 1.0, "peak bytes": 300, "proportional bytes": 130},
        {"pid": 7, "cpu seconds": 1.5, "peak bytes": 301, "proportional bytes": 120},
        {"pid": 9, "cpu seconds": 0.5, "peak bytes": 200, "proportional bytes": 60},
    ]
    measurements = {f"process of rank {rank}": {f"rank {rank}": reading} for rank, reading in enumerate(read)}

    resources = script["processes"](a_record("R005/nested-parity-ws3", measurements=measurements))

    assert [{"pid": 7, "cpu seconds": 1.5, "peak bytes": 301, "proportional bytes": 130}, read[2]] == resources


@pytest.mark.slow
def test_a_right_engine_is_measured(script: dict[str, Any]) -> None:
    """Two simulated ranks are one process, and use less than two processes do."""
    simulated, apart = (script["measured"]("torch-fsdp2", ranks, 2) for ranks in ("simulated", "processes"))

    assert simulated.seconds > 0 < simulated.cpu_seconds
    assert simulated.proportional_bytes < apart.proportional_bytes < apart.peak_bytes
    assert simulated.peak_bytes < apart.peak_bytes


@pytest.mark.slow
def test_a_wrong_engine_is_not(script: dict[str, Any]) -> None:
    """The benchmark ends with the finding."""
    with pytest.raises(SystemExit, match=r"(?s)2 ranks \(simulated\) is FAIL.*R003"):
        script["measured"](MUTANTS["sum-instead-of-mean"].spec, "simulated", 2)
