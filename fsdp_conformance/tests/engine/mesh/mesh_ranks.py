"""Four ranks on a mesh of 2 x 2, and values that show their rank and their place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_conformance.engine.errors import MeshError
from fsdp_conformance.harness.recording import process_group
from fsdp_conformance.history.collective import Op
from fsdp_conformance.tests.engine.chunks.chunk_ranks import ChunkTestCase


def coded(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Element i of rank r is 100 r + i + 1."""
    return (torch.arange(torch.Size(shape).numel()).view(shape) + 100 * rank + 1).to(dtype)


def by_columns(tensor: Tensor) -> Tensor:
    """The same values in another memory layout."""
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


class MeshTestCase(ChunkTestCase):
    """Every test method runs in four ranks: [[0, 1], [2, 3]]."""

    def init_rank(self) -> None:
        super().init_rank()
        self.square = init_device_mesh(self.device_type, (2, 2), mesh_dim_names=("replicate", "shard"))
        self.line = init_device_mesh(self.device_type, (4,))
        self.sent()

    def row(self, axis: int) -> list[int]:
        """The ranks of this rank's row of the square, worked out by hand."""
        return [[self.rank % 2, self.rank % 2 + 2], [self.rank // 2 * 2, self.rank // 2 * 2 + 1]][axis]

    def sent(self) -> list[tuple[Op, int, tuple[int, ...]]]:
        """The collectives since the last call: operation, bytes, ranks."""
        traffic = [(record.op, record.nbytes, record.group) for record in process_group.log().records]
        process_group.log().clear()
        return traffic

    @contextmanager
    def refused(self, *problems: str) -> Iterator[None]:
        """The call in this context raises MeshError with these problems, in this order."""
        with self.assertRaises(MeshError) as caught:
            yield
        self.assertEqual(list(problems), list(caught.exception.problems))

    def axes(self) -> list[tuple[tuple[DeviceMesh, int | str], list[int]]]:
        """Every axis, with the ranks of this rank's row."""
        return [
            ((self.square, 0), self.row(0)),
            ((self.square, "shard"), self.row(1)),
            ((self.square, -1), self.row(1)),
            ((self.line, 0), [0, 1, 2, 3]),
        ]


def sizes_of(length: int, num_ranks: int) -> Sequence[int]:
    """The lengths of torch's chunks, and zeros for the ranks that it leaves out."""
    sizes = [chunk.numel() for chunk in torch.arange(length).chunk(num_ranks)] if length else []
    return sizes + [0] * (num_ranks - len(sizes))
