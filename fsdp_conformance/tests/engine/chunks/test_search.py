"""The search for a chunk size: exact against trying every size, within the budget, in order, and explained."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from fsdp_conformance.engine.chunks.search import ChunkSize, TensorSize, module_uses, search_chunk_size
from fsdp_conformance.engine.errors import NoChunkSize
from fsdp_conformance.errors import ConfigError

FLOAT, HALF = torch.float32, torch.float16


def sizes(*numels: int, dtype: torch.dtype = FLOAT) -> list[TensorSize]:
    """Tensors of one dtype."""
    return [TensorSize(numel, dtype) for numel in numels]


def by_hand(tensors: list[TensorSize], nbytes: int) -> list[tuple[int, ...]]:
    """Chunks of a size, filled tensor by tensor: the next one is opened where a tensor does not fit."""
    chunks: dict[torch.dtype, list[list[int]]] = {}
    left: dict[torch.dtype, int] = {}
    for index, tensor in enumerate(tensors):
        if tensor.dtype not in chunks or tensor.nbytes > left[tensor.dtype]:
            chunks.setdefault(tensor.dtype, []).append([])
            left[tensor.dtype] = nbytes
        chunks[tensor.dtype][-1].append(index)
        left[tensor.dtype] -= tensor.nbytes
    return sorted(tuple(chunk) for found in chunks.values() for chunk in found)


def waste(tensors: list[TensorSize], nbytes: int) -> int:
    """Bytes of chunks without a tensor in them."""
    return len(by_hand(tensors, nbytes)) * nbytes - sum(tensor.nbytes for tensor in tensors)


def test_the_worked_example() -> None:
    """
    5, 3, 4, 4, 8 elements over two ranks: chunks of 8 hold (5, 3), (4, 4), (8) and waste nothing. So do chunks of 24,
    but take more memory.
    """
    found = search_chunk_size(sizes(5, 3, 4, 4, 8), world_size=2)

    assert (32, 3, 0) == (found.best.nbytes, found.best.num_chunks, found.best.waste_bytes)
    assert ((0, 1), (2, 3), (4,)) == found.chunks
    assert 8 == found.numel(FLOAT)
    assert 32 + 3 * 16 == found.best.memory_bytes


@pytest.mark.parametrize("seed", range(20))
def test_no_size_wastes_less(seed: int) -> None:
    """Against every size there is, for random tensors of two dtypes: none wastes less than the one found."""
    rng = random.Random(seed)
    tensors = [TensorSize(rng.randint(0, 40), rng.choice([FLOAT, HALF])) for _ in range(rng.randint(1, 12))]
    world_size = rng.randint(1, 4)
    found = search_chunk_size(tensors, world_size=world_size)
    unit = world_size * max(tensor.dtype.itemsize for tensor in tensors)
    largest = max(tensor.nbytes for tensor in tensors)
    every = range(max(-(-largest // unit) * unit, unit), sum(tensor.nbytes for tensor in tensors) + 2 * unit, unit)

    assert min(waste(tensors, nbytes) for nbytes in every) == found.best.waste_bytes, f"seed {seed}"
    assert tuple(by_hand(tensors, found.best.nbytes)) == found.chunks
    assert waste(tensors, found.best.nbytes) == found.best.waste_bytes


def test_order_and_dtype_are_kept() -> None:
    """Chunks hold tensors of one dtype, in order; together all of them, each once."""
    tensors = [*sizes(6, 2), *sizes(4, 12, dtype=HALF), *sizes(8)]
    found = search_chunk_size(tensors, world_size=2)

    assert [0, 1, 2, 3, 4] == sorted(index for chunk in found.chunks for index in chunk)
    for chunk, dtype in zip(found.chunks, found.dtypes, strict=True):
        assert {dtype} == {tensors[index].dtype for index in chunk}
        assert sorted(chunk) == list(chunk)
    assert 2 * found.numel(FLOAT) == found.numel(HALF)


def test_a_size_is_divided_by_the_group() -> None:
    """In elements of every dtype: 7 elements over 3 ranks are padded to 9."""
    found = search_chunk_size(sizes(7), world_size=3)

    assert (9, 8) == (found.numel(FLOAT), found.best.waste_bytes)


def test_the_budget() -> None:
    """
    Two of 6 elements, over two ranks, used at once: one chunk of 12 wastes nothing and needs 12 + 6 elements; chunks
    of 6 too, and need 2 x 6 + 6. With 17 elements of budget nothing fits, and the error says what would.
    """
    tensors = sizes(6, 6)
    found = search_chunk_size(tensors, world_size=2, budget_bytes=72, uses=[[0, 1]])
    assert (0, 72) == (found.best.waste_bytes, found.best.memory_bytes)

    with pytest.raises(
        NoChunkSize, match=r"budget_bytes=68, but should be at least 72.*chunks of 24 bytes, of which 2"
    ):
        search_chunk_size(tensors, world_size=2, budget_bytes=68, uses=[[0, 1]])


def test_a_budget_costs_waste() -> None:
    """5, 5, 6: one chunk wastes nothing; where it is too large, three of 6 waste 2 elements, two of 10 waste 4."""
    tensors = sizes(5, 5, 6)
    chosen = {
        budget: (found.numel(FLOAT), found.best.waste_bytes // 4)
        for budget in (200, 90, 60)
        for found in [search_chunk_size(tensors, world_size=2, budget_bytes=budget)]
    }

    assert {200: (16, 0), 90: (6, 2), 60: (6, 2)} == chosen


def test_blocks_for_what_is_used_at_once() -> None:
    """Tensors of one operation in two chunks need two blocks; prefetching adds, never beyond the number of chunks."""
    tensors = sizes(4, 4, 4)
    blocks = [
        [one.num_blocks for one in search_chunk_size(tensors, world_size=1, uses=uses, num_prefetched=ahead).considered]
        for uses, ahead in (([[0], [1], [2]], 0), ([[0, 1], [2]], 0), ([[0, 1], [2]], 1), ([], 9))
    ]

    assert [[1, 1, 1], [2, 1, 1], [3, 2, 1], [3, 2, 1]] == blocks


def test_the_choice_is_explained() -> None:
    """Size, chunks, waste, memory, budget, the runner-up, and how many were too large."""
    text = search_chunk_size(sizes(5, 5, 6), world_size=2, budget_bytes=90).explain()

    assert text == (
        "chunk size 24 bytes: 3 chunks for 64 bytes of tensors, 8 bytes wasted (12.5 %)\n"
        "  memory: 1 blocks of 24 and the shards, 60 bytes, a budget of 90\n"
        "  next best: 40 bytes, 2 chunks, 16 wasted, memory 80\n"
        "  sizes tried: 3, of which 1 over the budget"
    )


def test_empty_tensors() -> None:
    """They take no room, and are in a chunk all the same."""
    found = search_chunk_size(sizes(0, 4, 0), world_size=2)
    assert ((0, 1, 2),) == found.chunks
    nothing = search_chunk_size(sizes(0), world_size=4)

    assert (16, ((0,),)) == (nothing.best.nbytes, nothing.chunks)
    assert "all of it" in nothing.explain()


def test_the_same_every_time() -> None:
    """Equal arguments give equal results; tensors and their sizes are the same argument."""
    tensors = [torch.empty(numel) for numel in (5, 3, 4, 4, 8)]
    first, second = (search_chunk_size(given, world_size=2) for given in (tensors, sizes(5, 3, 4, 4, 8)))

    assert isinstance(first, ChunkSize)
    assert first == second


def test_uses_of_a_module() -> None:
    """What a submodule owns is used at once; shared parameters are one, modules without parameters nothing."""
    module = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3))
    module[2].bias = module[0].bias
    parameters, uses = module_uses(module)

    assert [(3, 2), (3,), (3, 3)] == [tuple(parameter.shape) for parameter in parameters]
    assert [[0, 1], [2, 1]] == uses


def test_arguments_out_of_range_are_all_named() -> None:
    """One error for all of them."""
    with pytest.raises(ConfigError) as caught:
        search_chunk_size([], world_size=0, budget_bytes=-1, uses=[[3]], num_prefetched=-2)

    assert 5 == len(caught.value.problems)
    with pytest.raises(ConfigError, match="less than 0 elements"):
        search_chunk_size(sizes(-1), world_size=1)


def test_a_large_model_is_searched_in_time() -> None:
    """Hundreds of tensors: the sizes that are tried are fewer than the tensors, smallest first."""
    rng = random.Random(7)
    found = search_chunk_size(sizes(*(rng.randint(1, 10**6) for _ in range(300))), world_size=8)
    tried = [one.nbytes for one in found.considered]

    assert sorted(set(tried)) == tried
    assert len(tried) <= 300
    assert 1 == found.considered[-1].num_chunks
