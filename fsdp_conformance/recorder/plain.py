"""Numbers and settings of an optimizer in terms of JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

#: Settings that say how an optimizer computes, not what.
_NOT_SETTINGS = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a parameter group that say what its optimizer computes."""
    return {key: _plain(value) for key, value in group.items() if key not in _NOT_SETTINGS}


def finite(value: object) -> float | None:
    """A number, or a tensor of one element; None if it is not finite, or None."""
    if value is None:
        return None
    number = float(value)  # type: ignore[arg-type]  # a tensor of one element, or a number
    return number if math.isfinite(number) else None


def _plain(value: object) -> object:
    """A setting in terms of JSON."""
    if isinstance(value, Tensor):
        return finite(value) if value.numel() == 1 else value.tolist()
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return repr(value)
