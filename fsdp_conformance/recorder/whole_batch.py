"""
One batch for all ranks: each computes the forward of the samples of all of them, and gets the part that is its own.

That is what one process would compute with the whole batch. Where samples have a part in each other's results, as in
batch normalisation or in a loss that the model averages over its tokens, it differs from ranks that each compute their
own. Gradients are averaged over the ranks as before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

#: The dims of an input are sent as this many numbers.
_DIMS = 8


class CannotConcatenate(RuntimeError):
    """The ranks' inputs do not make one batch."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the ranks' inputs must make one batch for --reference one-process: {why}")


@dataclass(frozen=True, slots=True)
class OwnSamples:
    """Which samples of the whole batch are this rank's."""

    begin: int
    end: int
    total: int

    def rows_of(self, leaf: object) -> Tensor | None:
        """This rank's rows of a tensor that has a row for each sample of the whole batch; else None."""
        if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == self.total:
            return leaf[self.begin : self.end]
        return None

    def of(self, value: Any) -> Any:
        """This rank's samples in a result of the whole batch. What has no row for each sample stays as it is."""

        def own(leaf: object) -> object:
            rows = self.rows_of(leaf)
            return leaf if rows is None else rows

        return pytree.tree_map(own, value)


def whole_batch(arguments: Any) -> tuple[Any, OwnSamples]:
    """
    The arguments of all ranks' forwards as those of one, and this rank's samples. All ranks call it.

    The largest tensor's first dim is that of the samples; tensors of another size there stay this rank's. Raises
    CannotConcatenate, on all ranks, if they have other tensors or other sizes in the other dims.
    """
    leaves, spec = pytree.tree_flatten(arguments)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
    main = max(tensors, key=lambda tensor: tensor.numel(), default=None)
    count = main.shape[0] if main is not None else 0
    places = [
        place
        for place, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and 0 < leaf.dim() < _DIMS and leaf.shape[0] == count
    ]
    counts = _counts([leaves[place] for place in places])
    for place in places:
        leaves[place] = _of_all_ranks(leaves[place], counts)
    rank = dist.get_rank()
    begin = sum(counts[:rank])
    return pytree.tree_unflatten(leaves, spec), OwnSamples(begin, begin + counts[rank], sum(counts))


def _counts(tensors: list[Tensor]) -> list[int]:
    """How many samples each rank has. Raises CannotConcatenate."""
    # A rank with too many or too few tensors is seen before anything of a fixed size is exchanged.
    device = tensors[0].device if tensors else torch.device("cpu")
    numbers = _exchange(torch.tensor([len(tensors)], device=device))
    if len(set(numbers.flatten().tolist())) > 1 or not tensors:
        raise CannotConcatenate(f"they have {', '.join(map(str, numbers.flatten().tolist()))} tensors")
    shapes = torch.tensor([[*tensor.shape, *[-1] * (_DIMS - tensor.dim())] for tensor in tensors], device=device)
    of_ranks = _exchange(shapes)
    for index in range(len(tensors)):
        if len(set(map(tuple, of_ranks[:, index, 1:].tolist()))) > 1:
            seen = [[size for size in shape if size >= 0] for shape in of_ranks[:, index].tolist()]
            raise CannotConcatenate(f"tensor {index} has the shapes {', '.join(map(str, seen))}")
    return [int(count) for count in of_ranks[:, 0, 0].tolist()]


def _exchange(own: Tensor) -> Tensor:
    """The tensors of all ranks, which have one shape, along a new first dim."""
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own.contiguous())
    return torch.stack(parts)


def _of_all_ranks(own: Tensor, counts: list[int]) -> Tensor:
    """All ranks' rows. Gradients flow to the own ones."""
    with torch.no_grad():
        padded = own.new_zeros((max(counts), *own.shape[1:]))
        padded[: own.shape[0]] = own
        # gloo has no collectives of booleans.
        sent = padded.to(torch.uint8) if own.dtype is torch.bool else padded
        rows = [each[:count].to(own.dtype) for each, count in zip(_exchange(sent), counts, strict=True)]
    rows[dist.get_rank()] = own
    return torch.cat(rows)
