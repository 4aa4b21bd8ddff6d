"""
Checks that all ranks of a group agree on the parameters whose gradients are reduced by position, and collects values of
all ranks that are compared elsewhere.

Every rank comes to the same answer, so either all raise or none does. A rank that carried on alone would hang in the
first collective that its peers never issue.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_conformance.engine.communication import all_gather
from fsdp_conformance.engine.errors import StructureMismatch

#: How many problems an error lists.
PROBLEMS_LISTED = 20


class ParameterFacts(NamedTuple):
    """The facts that must be equal on every rank."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    requires_grad: bool


def verify_parameters(
    named: Sequence[tuple[str, Tensor]], group: ProcessGroup, *, device: torch.device, names_matter: bool = True
) -> None:
    """
    Compare names, order, shapes, strides, dtypes and `requires_grad` of parameters over a group. Collective.

    Sends nothing in a group of one. `device` is one that the group can communicate from. Where `names_matter` is False
    on any rank, names are not compared, only positions. Raises StructureMismatch on every rank if one of them differs
    from the first, naming ranks and parameters.
    """
    facts = [
        ParameterFacts(
            name,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            str(tensor.dtype).removeprefix("torch."),
            tensor.requires_grad,
        )
        for name, tensor in named
    ]
    texts = texts_unless_equal(json.dumps([names_matter, facts]), group, device=device)
    if texts is None:
        return
    messages = [json.loads(text) for text in texts]
    by_rank = [[ParameterFacts(*_tuples(entry)) for entry in entries] for _, entries in messages]
    if not all(matter for matter, _ in messages):
        by_rank = [
            [each._replace(name=f"parameter {place}") for place, each in enumerate(entries)] for entries in by_rank
        ]
    first, *others = by_rank
    ranks = dist.get_process_group_ranks(group)
    problems = [
        f"rank {rank}: {difference}"
        for rank, mine in zip(ranks[1:], others, strict=True)
        for difference in _differences(mine, first, f"as on rank {ranks[0]}")
    ]
    if not problems:
        return
    more = len(problems) - PROBLEMS_LISTED
    raise StructureMismatch(
        problems[:PROBLEMS_LISTED] + ([f"and {more} more"] if more > 0 else []),
        where=f"verify_parameters, rank {dist.get_rank()}",
    )


def values_of_ranks(value: object, group: ProcessGroup) -> list[Any]:
    """
    The value of every rank in group order: anything that can be pickled. Collective; sends nothing in a group of one.

    Tensors in the value should be on the CPU.
    """
    values: list[Any] = [value] * group.size()
    if group.size() > 1:
        dist.all_gather_object(values, value, group=group)
    return values


def texts_unless_equal(text: str, group: ProcessGroup, *, device: torch.device) -> list[str] | None:
    """
    The text of every rank in group order, or None if all are equal. Collective; sends nothing in a group of one.

    Digests are compared first; the texts are only gathered if they differ. `device` is one that the group can
    communicate from.
    """
    if group.size() == 1:
        return None
    encoded = text.encode()
    digests = _gathered(hashlib.sha256(encoded).digest(), group, device)
    if len(set(digests)) == 1:
        return None
    lengths = [int.from_bytes(length) for length in _gathered(len(encoded).to_bytes(8), group, device)]
    padded = _gathered(encoded.ljust(max(lengths), b"\0"), group, device)
    return [each[:length].decode() for each, length in zip(padded, lengths, strict=True)]


def _gathered(mine: bytes, group: ProcessGroup, device: torch.device) -> list[bytes]:
    """The bytes of every rank, of which all have equally many. Collective."""
    sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    received = sent.new_empty(group.size() * len(mine))
    all_gather(received, sent, group).wait()
    return [bytes(part.tolist()) for part in received.cpu().view(group.size(), -1)]


def _differences(mine: Sequence[ParameterFacts], first: Sequence[ParameterFacts], source: str) -> list[str]:
    """A sentence for each difference between a rank and the first one, which `source` names."""

    def differs(what: str, expected: object, got: object) -> str:
        return f"{what}: expected {expected}, {source}, got {got}"

    problems = []
    if len(mine) != len(first):
        problems.append(differs("number of parameters", len(first), len(mine)))
    own_facts, expected_facts = {facts.name: facts for facts in mine}, {facts.name: facts for facts in first}
    absent, foreign = (
        [name for name in expected_facts if name not in own_facts],
        [name for name in own_facts if name not in expected_facts],
    )
    if absent or foreign:
        problems.append(differs("parameters", ", ".join(absent) or "no others", ", ".join(foreign) or "no others"))
    elif list(own_facts) != list(expected_facts):
        problems.append(differs("order", ", ".join(expected_facts), ", ".join(own_facts)))
    for name, facts in own_facts.items():
        if name in expected_facts:
            problems += [
                differs(f"{field} of {name}", expected, got)
                for field, got, expected in zip(ParameterFacts._fields, facts, expected_facts[name], strict=True)
                if got != expected
            ]
    return problems


def _tuples(entry: Sequence[Any]) -> list[Any]:
    """JSON turns tuples into lists: turn them back."""
    return [tuple(value) if isinstance(value, list) else value for value in entry]
