"""
What a backend refuses before it communicates: roots, reductions, layouts and sizes that make no collective.

Ranks on gloo get an error from their own call. So do simulated ranks, each from its own arguments: otherwise elements
would be dropped, or another rank would be taken for the root, without a word. What ranks must agree on is compared when
they meet (`meeting`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from fsdp_conformance.errors import InvalidCollective
from fsdp_conformance.history.collective import Op

#: The reductions that simulated ranks can do.
REDUCTIONS: Final = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")

#: Collectives that have a root.
ROOTED: Final = frozenset({Op.BROADCAST, Op.SCATTER, Op.GATHER, Op.REDUCE})


def require_call(
    op: Op,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    *,
    reduce_op: str,
    root: int,
    rank: int,
    size: int,
) -> None:
    """Raise InvalidCollective unless rank `rank` of a group of `size` ranks can take part with these arguments."""
    problems: list[str] = []
    if reduce_op:
        problems += _of_reduction(reduce_op, inputs or outputs)
    if op in ROOTED and not 0 <= root < size:
        problems.append(f"the root must be a rank of the group, from 0 to {size - 1}, got {root}")
    problems += _of_layout(op, [*inputs, *outputs], reduce_op)
    if not problems:
        problems += _of_sizes(op, inputs, outputs, is_root=rank == root, size=size)
    if problems:
        raise InvalidCollective(problems, where=f"{op.value} of simulated ranks")


def _of_reduction(reduce_op: str, tensors: Sequence[Tensor]) -> Iterator[str]:
    if reduce_op not in REDUCTIONS:
        yield f"reduce_op must be one of {', '.join(REDUCTIONS)}, got {reduce_op}"
    floating = any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors)
    if floating and reduce_op in ("BAND", "BOR", "BXOR"):
        yield f"reduce_op={reduce_op} requires integer tensors, got floating-point ones"
    if not floating and reduce_op == "AVG":
        yield "reduce_op=AVG requires floating-point tensors, got integer ones"


def _of_layout(op: Op, tensors: Sequence[Tensor], reduce_op: str) -> Iterator[str]:
    if all(tensor.layout is torch.strided for tensor in tensors):
        return
    if op is not Op.ALL_REDUCE:
        yield "tensors must be dense, got a sparse one. Only all_reduce takes sparse tensors"
    elif reduce_op != "SUM":
        yield f"reduce_op must be SUM for sparse tensors, got {reduce_op}"
    elif any(tensor.layout is not torch.sparse_coo for tensor in tensors):
        layouts = ", ".join(sorted({str(tensor.layout) for tensor in tensors}))
        yield f"sparse tensors must have the layout torch.sparse_coo, got {layouts}"


def _of_sizes(
    op: Op, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, is_root: bool, size: int
) -> Iterator[str]:
    """Why what a rank gives does not fit what it gets."""
    if op is Op.ALL_GATHER:
        yield from _gathered("input", inputs, "output", outputs, size)
    elif op is Op.REDUCE_SCATTER:
        yield from _gathered("output", outputs, "input", inputs, size)
    elif op is Op.GATHER and is_root:
        yield from _listed("input", inputs, "output", outputs, size)
    elif op is Op.SCATTER and is_root:
        yield from _listed("output", outputs, "input", inputs, size)


def _gathered(one: str, parts: Sequence[Tensor], other: str, wholes: Sequence[Tensor], size: int) -> Iterator[str]:
    """The parts of one rank next to what has the parts of all: a whole tensor for each part, or a list of parts."""
    if len(parts) != len(wholes):
        yield from _listed(one, parts, other, wholes, size)
        return
    for part, whole in zip(parts, wholes, strict=True):
        if whole.numel() != size * part.numel():
            yield (
                f"the {other} must have {size} times the elements of the {one}, {size * part.numel()}, "
                f"got {whole.numel()}"
            )


def _listed(one: str, parts: Sequence[Tensor], other: str, listed: Sequence[Tensor], size: int) -> Iterator[str]:
    """The parts of one rank next to a list of the parts of all."""
    if len(listed) != size * len(parts):
        yield f"the {other} must be a list of {size * len(parts)} tensors, got {len(listed)}"
        return
    for index, tensor in enumerate(listed):
        if tensor.numel() != parts[index % len(parts)].numel():
            yield (
                f"the {other} must have tensors of {parts[index % len(parts)].numel()} elements, like the {one}, "
                f"got {tensor.numel()} at {index}"
            )
            return
