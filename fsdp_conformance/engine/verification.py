"""
Do all ranks hold the same parameters? Asked before gradients are reduced by position.

Names, order, shapes, strides, dtypes and `requires_grad` are compared with those of the group's first rank.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_conformance.engine.errors import StructureMismatch
from fsdp_conformance.engine.mesh.agreement import texts_unless_equal

#: How many problems an error lists.
PROBLEMS_LISTED = 20


class ParameterFacts(NamedTuple):
    """What must be equal on every rank."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    requires_grad: bool


def facts_of(named: Sequence[tuple[str, Tensor]]) -> list[ParameterFacts]:
    """The facts of some parameters, in order."""
    return [
        ParameterFacts(
            name,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            str(tensor.dtype).removeprefix("torch."),
            tensor.requires_grad,
        )
        for name, tensor in named
    ]


def verify_parameters(named: Sequence[tuple[str, Tensor]], group: ProcessGroup, *, device: torch.device) -> None:
    """
    Compare parameters over the ranks of a group. Collective; nothing is sent in a group of one.

    `device` is one that the group can communicate from. Raises StructureMismatch on every rank if one of them differs
    from the first, naming ranks and parameters.
    """
    texts = texts_unless_equal(json.dumps(facts_of(named)), group, device=device)
    if texts is None:
        return
    facts = [[ParameterFacts(*_tuples(entry)) for entry in json.loads(text)] for text in texts]
    ranks = dist.get_process_group_ranks(group)
    problems = [
        f"rank {rank}: {difference} as on rank {ranks[0]}"
        for rank, mine in zip(ranks[1:], facts[1:], strict=True)
        for difference in differences(mine, facts[0])
    ]
    more = len(problems) - PROBLEMS_LISTED
    raise StructureMismatch(
        problems[:PROBLEMS_LISTED] + ([f"and {more} more"] if more > 0 else []),
        where=f"verify_parameters, rank {dist.get_rank()}",
    )


def agree_on_text(text: str, group: ProcessGroup, *, device: torch.device, what: str) -> None:
    """
    Raise StructureMismatch on every rank unless all ranks of a group have the same `text`. Collective.

    `device` is one that the group can communicate from; `what` is what the text describes.
    """
    texts = texts_unless_equal(text, group, device=device) or []
    other = [rank for rank, each in enumerate(texts) if each != texts[0]]
    if other:
        raise StructureMismatch(
            f"{what} of group ranks {other} differs, but should be that of the first rank",
            where=f"rank {dist.get_rank()}",
        )


def differences(mine: Sequence[ParameterFacts], first: Sequence[ParameterFacts]) -> list[str]:
    """Where the facts of a rank are not those of the first one, a sentence each."""
    problems = []
    if len(mine) != len(first):
        problems.append(f"number of parameters={len(mine)}, but should be {len(first)}")
    own, expected = {facts.name: facts for facts in mine}, {facts.name: facts for facts in first}
    absent, foreign = [name for name in expected if name not in own], [name for name in own if name not in expected]
    if absent or foreign:
        problems.append(
            f"parameters={', '.join(foreign) or 'none'}, but should be {', '.join(absent) or 'none'} in their place"
        )
    elif [facts.name for facts in mine] != [facts.name for facts in first]:
        problems.append(
            f"order={', '.join(facts.name for facts in mine)}, but should be {', '.join(facts.name for facts in first)}"
        )
    for name, facts in own.items():
        if name in expected:
            problems += [
                f"{field} of {name}={got}, but should be {wanted}"
                for field, got, wanted in zip(ParameterFacts._fields, facts, expected[name], strict=True)
                if got != wanted
            ]
    return problems


def _tuples(entry: Sequence[Any]) -> list[Any]:
    """What JSON made lists of are tuples again."""
    return [tuple(value) if isinstance(value, list) else value for value in entry]
