"""
The tag of a unit: its number, behind the last parameter of its chunk, gathered and averaged with the rest.

A rank whose peers run another unit finds it out with the first collective, at no message.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fsdp_conformance.engine.errors import ExecutionOrderError

#: Tags are below it, so that bfloat16 holds them exactly.
_NUM_TAGS = 251

#: Between two tags; what sixteen bits lose in an average is less.
_TAG_TOLERANCE = 0.3


def tag_of(ordinal: int) -> int:
    """The tag of the unit of that number."""
    return ordinal % _NUM_TAGS + 1


def averaged_tag(tag: int, dtype: torch.dtype) -> int:
    """What is averaged in `dtype` for a tag: its sum over ranks has to be exact in that, too."""
    return tag if dtype.itemsize > 2 else tag % 16


def check_tag(found: Tensor, expected: int, what: str, *, name: str) -> None:
    """Raise ExecutionOrderError where another unit's tag was gathered or averaged. Makes the host wait."""
    value = found.item()
    if not abs(value - expected) <= _TAG_TOLERANCE:
        raise ExecutionOrderError(
            f"unit {value:g} was {what}, but should be {expected}: {name}",
            where=f"{name}, rank {torch.distributed.get_rank()}",
            hint="All ranks must run the same units in the same order.",
        )
