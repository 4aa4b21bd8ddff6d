"""A row of pairs sees the form of a state dict, which an engine that takes and loads it need not notice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from fsdp_conformance.adapters.base import LoadedKeys
from fsdp_conformance.adapters.vendors.reference import Reference
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.selftest import bound_case, run_case
from fsdp_conformance.verdict import Verdict


class AnotherKey(Reference):
    """Its state dicts have a key of the engine, which it leaves out when it loads them."""

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        return {**super().full_state_dict(rank0_only=rank0_only), "version": torch.ones(1)}

    def load_full_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> LoadedKeys:
        own = {name: value for name, value in state.items() if name != "version"}
        return super().load_full_state_dict(own, strict=strict)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_key_too_many() -> None:
    """The row takes the state dict and loads it again."""
    record = run_case(bound_case("R000/pairs-row19-ws2"), f"{__file__}:AnotherKey", base=RunSettings(ranks="simulated"))

    assert record.verdict is Verdict.FAIL
    assert {(finding.requirement, finding.fqn) for finding in record.findings} == {("R146", "version, taken 0")}
