"""
This rank's part of a tensor, as torch.distributed.checkpoint saves and loads it without communication.

A shard of a flat parameter is a range of its elements, which need not be whole rows. Checkpoints consist of boxes, so
the range is cut into boxes: each is a view of the shard, so saving copies nothing and a load writes into the shard.

    shape (4, 5), elements 3 to 16     row 0: 3 4 | rows 1 and 2 | row 3: 0        three boxes
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from fsdp_conformance.errors import Unsupported


class Box(NamedTuple):
    """A part of a tensor: where it begins, and how long it is along each dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return torch.Size(self.sizes).numel()


def boxes(shape: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    """The elements [begin, end) of a tensor in row-major order, as boxes in that order: at most two for each dim."""
    if begin >= end:
        return
    if len(shape) <= 1:
        yield Box((begin,) * len(shape), (end - begin,) * len(shape))
        return
    row = torch.Size(shape[1:]).numel()
    first, last = begin // row, (end - 1) // row
    if first == last and end - begin < row:
        yield from _inside(shape, first, begin - first * row, end - first * row)
        return
    if begin % row:
        yield from _inside(shape, first, begin % row, row)
        first += 1
    whole = end // row
    if first < whole:
        yield Box((first, *(0 for _ in shape[1:])), (whole - first, *shape[1:]))
    if end % row:
        yield from _inside(shape, whole, 0, end % row)


def _inside(shape: Sequence[int], index: int, begin: int, end: int) -> Iterator[Box]:
    for box in boxes(shape[1:], begin, end):
        yield Box((index, *box.offsets), (1, *box.sizes))


class LocalPieces(Tensor):
    """
    A tensor of which this rank has the elements from `begin` on, in `part`: 1D, live storage.

    It has the shape of the whole tensor, but computes nothing: `torch.distributed.checkpoint` asks it for its boxes.
    """

    part: Tensor
    begin: int
    pieces: list[tuple[Box, Tensor]]

    @staticmethod
    def __new__(cls, part: Tensor, shape: torch.Size, begin: int) -> LocalPieces:
        make: Any = Tensor._make_wrapper_subclass  # type: ignore[attr-defined, unused-ignore]
        self: LocalPieces = make(cls, shape, dtype=part.dtype, device=part.device)
        self.part, self.begin = part, begin
        self.pieces = []
        offset = 0
        for box in boxes(shape, begin, begin + part.numel()):
            self.pieces.append((box, part[offset : offset + box.numel].view(box.sizes)))
            offset += box.numel
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override, unused-ignore]
        cls, func: object, types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> object:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise Unsupported("sharded_state_dict", f"{func} on a rank's part of a tensor: it can only be saved and loaded")

    def __repr__(self, **_: object) -> str:  # type: ignore[override, unused-ignore]
        return f"LocalPieces({tuple(self.shape)}, {[box for box, _ in self.pieces]})"

    def local_shards(self) -> list[Tensor]:
        """The boxes' values: views of this rank's shard."""
        return [piece for _, piece in self.pieces]

    # What torch.distributed.checkpoint calls: torch.distributed._checkpointable._Checkpointable.

    def __create_write_items__(self, fqn: str, object: Tensor) -> list[WriteItem]:  # noqa: A002 - torch's name
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=_chunk(box), properties=properties, size=self.shape),
            )
            for box, _ in self.pieces
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(box) for box, _ in self.pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for box, piece in self.pieces:
            if index.offset is not None and tuple(index.offset) == box.offsets:
                return piece
        raise KeyError(f"this rank has no part of {index.fqn} at {index.offset}")


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))
