"""
Where the tensors of a storage lie in it, and which part of each is in which rank's shard. Arithmetic only.

    storage  [ tensor 0 | tensor 1 | gap | tensor 2 |     padding ]   numel = group size x shard_numel
    shards   [      rank 0      |      rank 1       |   rank 2    ]   consecutive, of one size

Offsets, lengths and ends count elements. Gaps exist only with an alignment above 1; gaps and padding are zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class TensorSlot(NamedTuple):
    """The place of a tensor in a storage."""

    shape: torch.Size
    offset: int
    end: int


class ShardSlice(NamedTuple):
    """The part of a tensor that is in a shard: elements [begin, end) of the flattened tensor, at `offset` there."""

    begin: int
    end: int
    offset: int


def pad_to_multiple(numel: int, multiple: int) -> int:
    """Round up to a multiple: 13 becomes 16 for a multiple of 4, and 16 stays 16."""
    return -(-numel // multiple) * multiple


def padded_numel(numels: Iterable[int], world_size: int, *, align: int = 1) -> int:
    """
    The length of the smallest storage that holds tensors of these lengths, in this order.

    It is a positive multiple of the group size, so that no shard is empty.
    """
    end = 0
    for numel in numels:
        end = pad_to_multiple(end, align) + numel
    return max(pad_to_multiple(end, world_size), world_size)


class StorageLayout:
    """
    The slots of one storage, and its shards over a group.

    `numel` is a multiple of `world_size`. Every tensor begins at a multiple of `align`.
    """

    def __init__(self, numel: int, *, world_size: int, rank: int, align: int = 1) -> None:
        self.numel = numel
        self.world_size = world_size
        self.rank = rank
        self.align = align
        self.shard_numel = numel // world_size
        self.slots: list[TensorSlot] = []
        self._gaps: tuple[int, list[tuple[int, int]]] = (-1, [])

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """Gaps and padding, as intervals [begin, end)."""
        if self._gaps[0] != len(self.slots):
            self._gaps = (len(self.slots), self.uncovered([True] * len(self.slots)))
        return self._gaps[1]

    @property
    def used_numel(self) -> int:
        """The end of the last tensor."""
        return self.slots[-1].end if self.slots else 0

    @property
    def shard_begin(self) -> int:
        """Where this rank's shard begins in the storage."""
        return self.rank * self.shard_numel

    @property
    def valid_numel(self) -> int:
        """How much of this rank's shard is used: all, part or none of it. The rest is padding."""
        return min(max(self.used_numel - self.shard_begin, 0), self.shard_numel)

    def next_offset(self) -> int:
        """Where the next tensor would begin."""
        return pad_to_multiple(self.used_numel, self.align)

    def append(self, shape: torch.Size) -> TensorSlot:
        """Add one tensor, which must fit. Returns its place."""
        offset = self.next_offset()
        slot = TensorSlot(shape, offset, offset + shape.numel())
        assert slot.end <= self.numel, f"slot end={slot.end} is beyond numel={self.numel}: check for room first"
        self.slots.append(slot)
        return slot

    def views(self, flat: Tensor) -> list[Tensor]:
        """The tensors, in their shapes, as views of the whole data `flat`."""
        return [flat[slot.offset : slot.end].view(slot.shape) for slot in self.slots]

    def stand_ins(self, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """Tensors of the same shapes, all NaN, which share one element of memory."""
        nothing = torch.full((), torch.nan, dtype=dtype, device=device)
        return [nothing.expand(slot.shape) for slot in self.slots]

    def own_slice(self, flat: Tensor) -> Tensor:
        """This rank's shard as a view of the whole data `flat`."""
        return flat.narrow(0, self.shard_begin, self.shard_numel)

    def shard_slice(self, index: int) -> ShardSlice:
        """The part of a tensor that is in this rank's shard. Empty (begin == end) if there is none."""
        slot = self.slots[index]
        begin = min(max(slot.offset, self.shard_begin), slot.end)
        end = max(min(slot.end, self.shard_begin + self.shard_numel), begin)
        return ShardSlice(begin - slot.offset, end - slot.offset, begin - self.shard_begin if begin < end else 0)

    def holders(self, index: int) -> range:
        """The ranks whose shards have elements of a tensor; all ranks if it has no elements."""
        slot = self.slots[index]
        if slot.offset == slot.end:
            return range(self.world_size)
        return range(slot.offset // self.shard_numel, (slot.end - 1) // self.shard_numel + 1)

    def shard_views(self, shard: Tensor) -> list[Tensor]:
        """The parts of the tensors in this rank's shard as 1D views of it, in order, including empty ones."""
        slices = map(self.shard_slice, range(len(self.slots)))
        return [shard.narrow(0, part.offset, part.end - part.begin) for part in slices]

    def parts(self, shard: Tensor) -> list[Tensor]:
        """The parts of the tensors in this rank's shard as views of it: 1D, or in their shapes in a group of one."""
        return self.views(shard) if self.world_size == 1 else self.shard_views(shard)

    def uncovered(self, present: Sequence[bool]) -> list[tuple[int, int]]:
        """Gaps, padding and the tensors that are not `present`, as intervals [begin, end). Neighbours are merged."""
        intervals = []
        begin = 0
        for index, slot in enumerate(self.slots):
            if present[index]:
                if begin < slot.offset:
                    intervals.append((begin, slot.offset))
                begin = slot.end
        if begin < self.numel:
            intervals.append((begin, self.numel))
        return intervals
