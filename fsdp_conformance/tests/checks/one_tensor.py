"""Bounds of one tensor by itself, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fsdp_conformance.references.tolerance import Bound, calibrate


def calibrate_one(
    expected: Tensor,
    samples: Sequence[Tensor],
    *,
    base: Tensor | None = None,
    scale: float | None = None,
    floor: float,
    **options: Any,
) -> Bound:
    """The bound that `calibrate` returns for a single tensor."""
    (bound,) = calibrate(
        [expected],
        [[sample] for sample in samples],
        bases=None if base is None else [base],
        scales=None if scale is None else [scale],
        floors=[floor],
        **options,
    )
    return bound
