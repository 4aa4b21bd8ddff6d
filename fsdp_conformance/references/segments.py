"""Many small tensors as one vector: elementwise arithmetic, and a figure for each tensor, in a few calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segments:
    """
    The tensors that a vector is made of. A vector is one-dimensional, float64, and has all elements of all tensors.

    `join` makes a vector from tensors, `spread` makes one from a number per tensor, and `split` returns its tensors.
    """

    shapes: tuple[torch.Size, ...]
    tensor_of: Tensor
    """The number of the tensor that each element belongs to: 1D, int64."""

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> Segments:
        """The segments of these tensors, all of them on one device."""
        sizes = torch.tensor([tensor.numel() for tensor in tensors], dtype=torch.int64)
        index_E = torch.arange(len(tensors)).repeat_interleave(sizes)
        return Segments(
            tuple(tensor.shape for tensor in tensors), index_E.to(tensors[0].device) if tensors else index_E
        )

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """The elements of tensors with these shapes; a new vector."""
        if not tensors:
            return torch.zeros(0, dtype=torch.float64)
        return torch.cat([tensor.reshape(-1) for tensor in tensors]).double()

    def spread(self, figures: Sequence[float]) -> Tensor:
        """A vector in which each element has the figure of its tensor."""
        return torch.tensor(figures, dtype=torch.float64, device=self.tensor_of.device)[self.tensor_of]

    def split(self, vector: Tensor) -> list[Tensor]:
        """The vector's tensors: views of it."""
        parts = torch.split(vector, [shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def largest(self, vector: Tensor) -> list[float]:
        """The largest absolute value of each tensor: 0 for an empty one, NaN if any element is."""
        zeros = torch.zeros(len(self.shapes), dtype=torch.float64, device=vector.device)
        return zeros.scatter_reduce_(0, self.tensor_of, vector.abs(), "amax").tolist()

    def counts(self, mask_E: Tensor) -> list[int]:
        """The number of elements of each tensor that are True."""
        zeros = torch.zeros(len(self.shapes), dtype=torch.int64, device=mask_E.device)
        return zeros.index_add_(0, self.tensor_of, mask_E.long()).tolist()
