"""The order of a step's passes."""

from __future__ import annotations

import pytest

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.workload.definition import Regime


@pytest.mark.parametrize(
    ("pipeline", "order"),
    [("", "F0 B0 F1 B1 F2 B2"), ("1f1b", "F0 F1 B0 F2 B1 B2"), ("forwards-first", "F0 F1 F2 B0 B1 B2")],
)
def test_passes(pipeline: str, order: str) -> None:
    """Each micro-batch has one forward and then one backward, and neither overtakes another micro-batch's."""
    passes = Regime(micro_batches=3, pipeline=pipeline).passes()
    assert " ".join(f"{kind[0].upper()}{micro}" for kind, micro in passes) == order


def test_one_micro_batch() -> None:
    """With one micro-batch every order is the same."""
    orders = [list(Regime(pipeline=pipeline).passes()) for pipeline in ("", "1f1b", "forwards-first")]
    assert orders == [[("forward", 0), ("backward", 0)]] * 3


def test_an_unknown_order() -> None:
    """Only the three are known."""
    with pytest.raises(ConfigError, match="pipeline must be '', 'forwards-first' or '1f1b', got 'zigzag'"):
        Regime(pipeline="zigzag")
