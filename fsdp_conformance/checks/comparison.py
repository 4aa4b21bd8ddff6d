"""One tensor against another: how many elements differ, where the first one is, and by how much."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdp_conformance.references.tolerance import Bound


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """How two tensors differ, beyond the allowed bound."""

    element: tuple[int, ...]
    """The first element that differs; empty for a 0-dim tensor."""
    got: float
    expected: float
    ratio: float | None
    ulps: float | None
    differing: int
    elements: int
    worst: float
    """The largest distance of any element."""

    def place(self) -> dict[str, Any]:
        """Where and by how much they differ, as fields of a `Finding`."""
        return {
            "element": self.element or None,
            "ratio": self.ratio,
            "ulps": self.ulps,
            "differing": self.differing,
            "elements": self.elements,
        }


def compare(got: Tensor, expected: Tensor, bound: Bound) -> Difference | None:
    """The difference of two tensors of equal shape, or None if every element is within the bound. NaN never is."""
    if not expected.numel():
        return None
    wide_got, wide_expected = got.double(), expected.double()
    distance = (wide_got - wide_expected).abs()
    within = wide_got == wide_expected if bound.limit is None else distance <= bound.limit
    if bool(within.all()):
        return None
    outside = ~within
    index = int(outside.flatten().nonzero()[0])
    element = tuple(int(i) for i in torch.unravel_index(torch.tensor(index), expected.shape)) if expected.dim() else ()
    first_got, first_expected = wide_got.flatten()[index].item(), wide_expected.flatten()[index].item()
    finite = distance[distance.isfinite()]
    return Difference(
        element=element,
        got=first_got,
        expected=first_expected,
        ratio=_ratio(first_got, first_expected),
        ulps=_ulps(first_got, first_expected, got.dtype),
        differing=int(outside.sum()),
        elements=expected.numel(),
        worst=finite.max().item() if finite.numel() == distance.numel() else math.inf,
    )


def numbers(got: float, expected: float) -> tuple[str, str]:
    """Both values as text, with enough digits to tell any two float32 values apart, and always these two."""
    digits = 9 if f"{got:.9g}" != f"{expected:.9g}" else 17
    return f"{got:.{digits}g}", f"{expected:.{digits}g}"


def _ratio(got: float, expected: float) -> float | None:
    # Adding 0.0 turns -0.0 into 0.0.
    return got / expected + 0.0 if expected != 0 and math.isfinite(got) else None


def _ulps(got: float, expected: float, dtype: torch.dtype) -> float | None:
    """
    The distance in units in the last place of the expected value; None for integers, near zero, and if not finite.
    """
    if not dtype.is_floating_point or not (math.isfinite(got) and math.isfinite(expected)):
        return None
    info = torch.finfo(dtype)
    if abs(expected) < info.tiny:
        # One ulp is 1e-45 there, so the count would be meaningless.
        return None
    return abs(got - expected) / (info.eps * 2.0 ** math.floor(math.log2(abs(expected))))
