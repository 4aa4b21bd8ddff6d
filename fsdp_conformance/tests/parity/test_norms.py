"""Norms that are wrong, from the norms of the tensors and shards that they were made of."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_conformance.parity.norms import why_norm

#: The norms of two tensors on two ranks.
SHARDS = [[3.0, 11.0], [7.0, 5.0]]
WHOLE = [math.hypot(3.0, 7.0), math.hypot(11.0, 5.0)]
RIGHT = math.hypot(*WHOLE)


def tensors(norms: list[float]) -> dict[str, Any]:
    return {str(place): SimpleNamespace(square=norm**2) for place, norm in enumerate(norms)}


@pytest.mark.parametrize(
    ("norm", "likely"),
    [
        (math.hypot(*SHARDS[1]), "it is the norm of the shards of rank 1 alone"),
        (sum(WHOLE), "the norms of the tensors are added up, and not their squares"),
        (math.hypot(14.0, 12.0), "on each rank the norms of the tensors are added up, and not their squares"),
        (
            math.hypot(3.0, 11.0) + math.hypot(7.0, 5.0),
            "the norms of the ranks are added up, and not their squares",
        ),
        (RIGHT**2, "it is the square of the norm: the root was not taken"),
        (max(WHOLE), "it is the largest norm of a tensor"),
        (
            RIGHT * math.sqrt(2),
            "every rank has counted all gradients, and the squares are added up over the ranks",
        ),
        (RIGHT * 3, "it is 3 times the expected one, as of gradients that were counted several times"),
    ],
)
def test_how_a_wrong_norm_was_made_is_named(norm: float, likely: str) -> None:
    clips = [[SimpleNamespace(gradients=tensors(of_rank), norm=norm, kind=2.0)] for of_rank in SHARDS]
    step: Any = SimpleNamespace(clips=clips, unclipped=SimpleNamespace(values=tensors(WHOLE)), steps=[])

    assert why_norm(step, norm, RIGHT, 1e-3) == (False, likely)
