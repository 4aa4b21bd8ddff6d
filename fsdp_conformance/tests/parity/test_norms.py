"""Norms that are wrong, from the norms of the tensors and shards that they were made of."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_conformance.parity.norms import gathered_tensors, why_norm

#: The norms of two tensors on two ranks.
SHARDS = [[3.0, 11.0], [7.0, 5.0]]
WHOLE = [math.hypot(3.0, 7.0), math.hypot(11.0, 5.0)]
RIGHT = math.hypot(*WHOLE)


def values(norms: list[float]) -> dict[str, Any]:
    return {str(place): SimpleNamespace(square=norm**2) for place, norm in enumerate(norms)}


def step_of(norm: float, tensors: int | None = 2, strangers: int = 0, gathered: int = 0) -> Any:
    given = {"tensors": tensors, "strangers": strangers, "gathered": gathered}
    clips = [[SimpleNamespace(gradients=values(of_rank), norm=norm, kind=2.0, **given)] for of_rank in SHARDS]
    return SimpleNamespace(clips=clips, unclipped=SimpleNamespace(values=values(WHOLE)), steps=[])


LARGEST = "the largest one: of this rank only, or a maximum over the ranks"


@pytest.mark.parametrize(
    ("norm", "likely"),
    [
        (math.hypot(*SHARDS[1]), "it is the norm of the shards of rank 1 alone"),
        (math.hypot(*SHARDS[0]), f"it is the norm of the shards of rank 0 alone, {LARGEST}"),
        (sum(WHOLE), "the norms of the tensors are added up, and not their squares"),
        (math.hypot(14.0, 12.0), "on each rank the norms of the tensors are added up, and not their squares"),
        (
            math.hypot(3.0, 11.0) + math.hypot(7.0, 5.0),
            "the norms of the ranks are added up, and not their squares",
        ),
        (RIGHT / math.sqrt(2), "the squares of the ranks' norms are averaged, and not added up"),
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
    assert why_norm(step_of(norm), step_of(RIGHT), norm, RIGHT, 1e-3) == (False, likely)


@pytest.mark.parametrize("by_script", [True, False])
def test_each_rank_takes_the_norm_of_its_own_shards(by_script: bool) -> None:
    """FSDP1's shards are plain tensors to torch's function; its own one should add them up."""
    step = step_of(0.0, tensors=2 if by_script else None)
    for [clip], of_rank in zip(step.clips, SHARDS, strict=True):
        clip.norm = math.hypot(*of_rank)
    step.steps = [SimpleNamespace(gradients={"": SimpleNamespace(shape=(4, 4), elements=8, region="0:8")})]

    by, why = why_norm(step, step_of(RIGHT), math.hypot(*SHARDS[0]), RIGHT, 1e-3)

    assert (by, why.startswith("each rank computed the norm of only its own shards")) == (by_script, True)


@pytest.mark.parametrize(("is_meant", "why"), [(True, "the model must be resharded"), (False, "the engine has not")])
def test_a_norm_of_gathered_parameters(is_meant: bool, why: str) -> None:
    """It is the script's only if that has kept units gathered."""
    assert gathered_tensors(step_of(3.0), is_meant=is_meant) is None
    shown = gathered_tensors(step_of(3.0, tensors=0, gathered=2), is_meant=is_meant)
    assert shown is not None
    assert shown[0] is is_meant
    assert shown[1].startswith("2 of the tensors that it was given are gathered parameters, and the gradients are ")
    assert why in shown[1]


@pytest.mark.parametrize(
    ("given", "likely"),
    [
        ({"tensors": 0, "strangers": 2}, "2 of the tensors that it was given belong to no module: they were collected"),
        ({"tensors": 1}, "the gradients of 1 tensors are clipped, and in the reference those of 2"),
    ],
)
def test_a_norm_of_other_tensors_is_the_scripts(given: dict[str, int], likely: str) -> None:
    by_script, why = why_norm(step_of(3.0, **given), step_of(RIGHT), 3.0, RIGHT, 1e-3)

    assert by_script
    assert why.startswith(likely)
