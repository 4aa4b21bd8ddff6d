"""A rank's part of a tensor: cut into boxes, saved and loaded without communication."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from fsdp_conformance.engine.fully_sharded.local_pieces import Box, LocalPieces, boxes
from fsdp_conformance.errors import Unsupported

SHAPES = ((7,), (4, 5), (3, 2, 4), (2, 3, 2, 2), (1,), (1, 1), (5, 1, 3))


def _cut(whole: Tensor, box: Box) -> Tensor:
    for dim, (offset, size) in enumerate(zip(*box, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_boxes_have_every_element_of_a_range_once_and_in_order(shape: tuple[int, ...]) -> None:
    """Every range of the tensor is covered, with at most two boxes for each dim but the last."""
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for begin in range(whole.numel() + 1):
        for end in range(begin, whole.numel() + 1):
            pieces = list(boxes(shape, begin, end))

            assert [number for box in pieces for number in _cut(whole, box).flatten().tolist()] == list(
                range(begin, end)
            )
            assert len(pieces) <= max(1, 2 * len(shape) - 1)
            assert sum(box.numel for box in pieces) == end - begin


def test_a_scalar_is_one_box() -> None:
    """A scalar is one box, or none on a rank that does not have it."""
    assert list(boxes((), 0, 1)) == [Box((), ())]
    assert list(boxes((), 0, 0)) == []


def test_pieces_are_views() -> None:
    """Values loaded into a piece are in the shard."""
    part = torch.arange(13.0)
    pieces = LocalPieces(part, torch.Size((4, 5)), 3)
    for piece in pieces.local_shards():
        piece.fill_(-1.0)

    assert pieces.shape == (4, 5)
    assert part.tolist() == [-1.0] * 13


def test_a_part_computes_nothing() -> None:
    """An operation on it would be one on values that the rank does not have."""
    pieces = LocalPieces(torch.ones(3), torch.Size((5,)), 0)

    with pytest.raises(Unsupported, match="only be saved and loaded"):
        pieces.add(1)
    assert "LocalPieces" in repr(pieces)


def test_another_division_reads_it(tmp_path: Path) -> None:
    """A tensor that was saved as one part is loaded in three, and as a plain tensor."""
    whole = torch.arange(20.0).view(4, 5)
    flat = whole.flatten()
    save({"weight": LocalPieces(flat, whole.shape, 0)}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    for begin, end in ((0, 7), (7, 14), (14, 20)):
        part = torch.zeros(end - begin)
        load({"weight": LocalPieces(part, whole.shape, begin)}, storage_reader=FileSystemReader(tmp_path), no_dist=True)

        assert part.tolist() == flat[begin:end].tolist()
    read = {"weight": torch.zeros(4, 5)}
    load(read, storage_reader=FileSystemReader(tmp_path), no_dist=True)

    assert torch.equal(read["weight"], whole)
