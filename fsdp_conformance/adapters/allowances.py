"""The most that an adapter may declare where that loosens what its engine is held to. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

#: The largest `Adapter.padding`. Measured on layers of 1 kB to 6 kB: 0 in FSDP2, at most 1 % in FSDP1, DeepSpeed and
#: megatron-fsdp, 16 % in BMTrain, which aligns to 512 bytes; larger layers need less. A second pass over the
#: parameters, or one in a dtype twice as wide, would need 100 %.
MAX_PADDING: Final = 0.25
#: That of an adapter which declares none.
DEFAULT_PADDING: Final = 0.15
#: The largest `Adapter.alignment`, which BMTrain has.
MAX_ALIGNMENT: Final = 512
#: The largest `Adapter.kept_buffers`: two units that are gathered in turn, and their gradients.
MAX_KEPT_BUFFERS: Final = 4

#: Fields of `Adapter`, and of its description, to their largest values.
BOUNDED: Mapping[str, float] = {
    "padding": MAX_PADDING,
    "alignment": MAX_ALIGNMENT,
    "kept_buffers": MAX_KEPT_BUFFERS,
}


def excesses(declared: Mapping[str, Any]) -> list[str]:
    """How fields, given by name, are beyond these bounds; empty if none is."""
    problems = []
    for name, most in BOUNDED.items():
        value = declared.get(name, 0)
        is_whole = isinstance(most, int)
        is_number = isinstance(value, int if is_whole else int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value <= most:
            problems.append(f"{name} must be {'an int' if is_whole else 'a number'} from 0 to {most}, got {value!r}")
    return problems
