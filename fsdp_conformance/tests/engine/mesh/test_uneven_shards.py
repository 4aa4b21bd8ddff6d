"""Tensors cut into shards of unequal sizes, padded and cut back."""

from __future__ import annotations

import pytest
import torch

from fsdp_conformance.engine.errors import MeshError
from fsdp_conformance.engine.mesh.uneven_shards import (
    chunk_sizes,
    pad_tensor,
    size_problems,
    split_shards,
    unpad_tensor,
)
from fsdp_conformance.tests.engine.mesh.mesh_ranks import coded, sizes_of


@pytest.mark.parametrize("length", range(10))
@pytest.mark.parametrize("num_shards", range(1, 6))
def test_sizes_are_those_of_torch_chunk(length: int, num_shards: int) -> None:
    """The quotient rounded up, and possibly nothing for the last ranks: 5 over 4 is 2, 2, 1, 0, not 2, 1, 1, 1."""
    sizes = chunk_sizes(length, num_shards)

    assert sizes == sizes_of(length, num_shards)
    assert sum(sizes) == length


def test_shards_are_views_and_empty_ones_keep_the_other_dims() -> None:
    """3 columns over 4 ranks: one each, and (2, 0) for the last."""
    tensor = coded(0, 2, 3)
    shards = split_shards(tensor, 4, -1)

    assert [tuple(shard.shape) for shard in shards] == [(2, 1), (2, 1), (2, 1), (2, 0)]
    assert [shard.tolist() for shard in shards[:3]] == [[[1], [4]], [[2], [5]], [[3], [6]]]
    assert shards[1]._base is tensor


def test_padding_by_nothing_is_the_same_object() -> None:
    """Padding by nothing makes neither a copy nor a view."""
    tensor = coded(0, 2, 3)

    assert pad_tensor(tensor, 1, 0) is tensor
    assert unpad_tensor(tensor, 1, 0) is tensor


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
def test_padding_is_zeros_at_the_end(dim: int) -> None:
    """Along one dim; unpadding does not copy."""
    tensor = coded(0, 2, 3, 4)
    padded = pad_tensor(tensor, dim, 2)
    zeros = torch.zeros([size if at != dim % 3 else 2 for at, size in enumerate(tensor.shape)])

    assert torch.equal(torch.cat([tensor, zeros], dim), padded)
    assert torch.equal(tensor, unpad_tensor(padded, dim, 2))
    assert unpad_tensor(padded, dim, 2).data_ptr() == padded.data_ptr()
    assert pad_tensor(torch.zeros(0, 3), 0, 2).tolist() == [[0.0] * 3] * 2


def test_what_does_not_fit_is_refused() -> None:
    """Dims, amounts and sizes are named, with their requirements."""
    tensor = coded(0, 2, 3)
    for call, text in (
        (lambda: pad_tensor(tensor, 2, 1), "dim must be a dim of a 2-dim tensor, got 2 [pad_tensor]"),
        (lambda: pad_tensor(tensor, 0, -1), "amount must be at least 0, got -1 [pad_tensor]"),
        (lambda: unpad_tensor(tensor, 0, 3), "amount must be from 0 to 2, got 3 [unpad_tensor]"),
        (lambda: split_shards(torch.tensor(1.0), 2), "dim must be a dim of a 0-dim tensor, got 0"),
    ):
        with pytest.raises(MeshError) as caught:
            call()
        assert text in str(caught.value)
    assert size_problems([2, 1], 3, length=3) == ["sizes must be 3 non-negative numbers, got [2, 1]"]
    assert size_problems([2, -1], 2, length=3) == ["sizes must be 2 non-negative numbers, got [2, -1]"]
    assert size_problems([2, 1], 2, length=4) == ["length of the whole tensor: expected 3, by sizes [2, 1], got 4"]
    assert size_problems([2, 1], 2, length=2, shard=1) == ["length of shard 1: expected 1, by sizes [2, 1], got 2"]
    assert size_problems([2, 1], 2, length=1, shard=1) == size_problems(None, 2, length=9) == []
