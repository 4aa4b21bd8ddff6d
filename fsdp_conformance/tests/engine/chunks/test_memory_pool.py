"""
The memory pool: who gets which block, what is refused, counters that hold under every exception, streams in order.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsdp_conformance.engine.chunks import memory_pool
from fsdp_conformance.engine.chunks.memory_pool import Block, BlockKind, MemoryPool
from fsdp_conformance.engine.errors import EngineError, PoolError, PoolExhausted

FLOAT = torch.float32


def held_bytes(pool: MemoryPool) -> int:
    """The bytes behind every block that the pool knows of, counted from their storages."""
    free = [block for blocks in pool._private_free.values() for block in blocks]
    blocks = {*pool._public_free, *pool._leased, *pool._cached(), *free, *pool._private_taken}
    return sum(block.payload.untyped_storage().nbytes() for block in blocks)


def check(pool: MemoryPool) -> None:
    """The counters say what is there."""
    counters = pool.counters

    assert held_bytes(pool) == counters.held_bytes
    assert sum(block.nbytes for block in (*pool._leased, *pool._private_taken)) == counters.leased_bytes


# --- public blocks ---------------------------------------------------------------------------------------------------


def test_public_blocks_are_of_one_size_and_dtype() -> None:
    """Each block is flat memory of the size and dtype that was asked for."""
    pool = MemoryPool("cpu")
    pool.allocate_public(2, 1024, torch.bfloat16)
    block = pool.lease_public()

    assert (BlockKind.PUBLIC, (1024,), torch.bfloat16, 2048) == (
        block.kind, tuple(block.payload.shape), block.payload.dtype, block.nbytes
    )  # fmt: skip
    assert (1024, torch.bfloat16) == pool.public_spec
    check(pool)


def test_free_and_leased_add_up() -> None:
    """Free and leased public blocks are together what was allocated, after every lease and release."""
    pool = MemoryPool("cpu")
    pool.allocate_public(3, 8, FLOAT)
    first, second = pool.lease_public(), pool.lease_public()

    assert (1, 2) == (pool.counters.public_free, pool.counters.public_leased)
    pool.release(first)
    assert (2, 1) == (pool.counters.public_free, pool.counters.public_leased)
    pool.release(second)
    assert (3, 0) == (pool.counters.public_free, pool.counters.public_leased)
    assert (96, 0, 96) == (pool.counters.held_bytes, pool.counters.leased_bytes, pool.counters.peak_held_bytes)
    check(pool)


def test_a_lease_too_many_leaves_the_counters_intact() -> None:
    """The third of two blocks is refused with a typed error, which says what to do; then a released one can be had."""
    pool = MemoryPool("cpu")
    pool.allocate_public(2, 8, FLOAT)
    block, _ = pool.lease_public(), pool.lease_public()
    before = pool.counters

    with pytest.raises(PoolExhausted, match="no public block is free: 2 are leased"):
        pool.lease_public()
    assert before == pool.counters
    pool.release(block)
    assert pool.lease_public() is block


def test_public_blocks_go_round() -> None:
    """The block that has been free for longest is given out first."""
    pool = MemoryPool("cpu")
    pool.allocate_public(3, 8, FLOAT)
    first, second, third = (pool.lease_public() for _ in range(3))
    for block in (second, third, first):
        pool.release(block)

    assert [second, third, first] == [pool.lease_public() for _ in range(3)]


def test_public_blocks_are_allocated_once() -> None:
    """A second call is refused, and the blocks that are there stay."""
    pool = MemoryPool("cpu")
    pool.allocate_public(1, 8, FLOAT)
    before = pool.counters

    with pytest.raises(PoolError, match="public blocks are already allocated"):
        pool.allocate_public(1, 8, FLOAT)
    assert before == pool.counters


def test_no_public_blocks_is_a_number_of_blocks() -> None:
    """A pool may have none: a lease is then refused."""
    pool = MemoryPool("cpu")
    pool.allocate_public(0, 8, FLOAT)

    with pytest.raises(PoolExhausted):
        pool.lease_public()
    with pytest.raises(PoolError, match="num_blocks and numel must be at least 0, got -1 and 8"):
        MemoryPool("cpu").allocate_public(-1, 8, FLOAT)


# --- what cannot be released -----------------------------------------------------------------------------------------


def test_a_foreign_block_is_refused() -> None:
    """A block of another pool is not taken back."""
    pool, other = MemoryPool("cpu"), MemoryPool("cpu")
    for one in (pool, other):
        one.allocate_public(1, 8, FLOAT)
    mine, foreign = pool.lease_public(), other.lease_public()
    before = pool.counters

    with pytest.raises(PoolError, match="is not leased from this pool"):
        pool.release(foreign)
    assert before == pool.counters
    assert pool.is_leased(mine)
    assert not pool.is_leased(foreign)


@pytest.mark.parametrize("kind", ["public", "resized", "cached"])
def test_a_second_release_is_refused(kind: str) -> None:
    """A block that is free already is not taken back, and nothing is counted twice."""
    pool = MemoryPool("cpu")
    pool.allocate_public(1, 8, FLOAT)
    block = lease(pool, kind)
    pool.release(block)
    before = pool.counters

    with pytest.raises(PoolError, match="is not leased"):
        pool.release(block)
    assert before == pool.counters
    check(pool)


# --- private blocks --------------------------------------------------------------------------------------------------


def test_private_blocks_are_found_by_size_and_dtype() -> None:
    """Each is taken once, by what it is, in any order."""
    pool = MemoryPool("cpu")
    pool.allocate_private([(8, FLOAT), (8, torch.float16), (16, FLOAT), (8, FLOAT)])
    half, first, second = pool.take_private(8, torch.float16), pool.take_private(8, FLOAT), pool.take_private(8, FLOAT)

    assert [(8, torch.float16), (8, FLOAT), (8, FLOAT)] == [half.spec, first.spec, second.spec]
    assert first.payload.data_ptr() != second.payload.data_ptr()
    assert (1, 3) == (pool.counters.private_free, pool.counters.private_taken)
    assert (16 + 32 + 64 + 32, 16 + 32 + 32) == (pool.counters.held_bytes, pool.counters.leased_bytes)
    check(pool)


def test_an_unknown_private_block_is_a_typed_error() -> None:
    """The message names the missing block and the free ones, and no counter changes."""
    pool = MemoryPool("cpu")
    pool.allocate_private([(8, FLOAT)])
    before = pool.counters

    with pytest.raises(PoolError, match=r"no private block of 9 x torch.float32 is free, only \['8 x torch.float32'\]"):
        pool.take_private(9, FLOAT)
    assert before == pool.counters
    pool.take_private(8, FLOAT)
    with pytest.raises(PoolError, match=r"is free, only \[\]"):
        pool.take_private(8, FLOAT)


def test_a_private_block_is_taken_for_good() -> None:
    """It is not given back."""
    pool = MemoryPool("cpu")
    pool.allocate_private([(8, FLOAT)])
    block = pool.take_private(8, FLOAT)

    with pytest.raises(PoolError, match="is not leased"):
        pool.release(block)
    assert (0, 1) == (pool.counters.private_free, pool.counters.private_taken)


def test_private_blocks_are_allocated_all_or_none() -> None:
    """Where the limit allows one of two, none is made."""
    pool = MemoryPool("cpu", limit_bytes=48)

    with pytest.raises(PoolExhausted, match="64 bytes"):
        pool.allocate_private([(8, FLOAT), (8, FLOAT)])
    assert (0, 0) == (pool.counters.private_free, pool.counters.held_bytes)


# --- resized blocks --------------------------------------------------------------------------------------------------


def test_a_resized_block_has_memory_only_while_leased() -> None:
    """Reserved it holds nothing, leased its bytes, released nothing again."""
    pool = MemoryPool("cpu")
    block = pool.reserve(1000, FLOAT)

    assert (0, 0) == (block.payload.untyped_storage().nbytes(), pool.counters.held_bytes)
    pool.lease(block)
    assert (4000, 4000) == (block.payload.untyped_storage().nbytes(), pool.counters.held_bytes)
    pool.release(block)
    assert (0, 0) == (block.payload.untyped_storage().nbytes(), pool.counters.held_bytes)
    check(pool)


def test_views_of_a_resized_block_see_the_next_lease() -> None:
    """Tensors that autograd saved in the forward see the values gathered for the backward, in one storage object."""
    pool = MemoryPool("cpu")
    block = pool.reserve(6, FLOAT)
    pool.lease(block)
    saved = block.payload[2:].view(2, 2).t()
    pool.release(block)
    pool.lease(block)
    block.payload.copy_(torch.arange(6.0))

    assert torch.equal(torch.tensor([[2.0, 4.0], [3.0, 5.0]]), saved)


def test_a_leased_block_is_not_leased_again() -> None:
    """A leased block and a block of another kind are not leased."""
    pool = MemoryPool("cpu")
    pool.allocate_public(1, 8, FLOAT)
    block = pool.reserve(8, FLOAT)
    pool.lease(block)
    before = pool.counters

    for wrong in (block, pool._public_free[0]):
        with pytest.raises(PoolError, match="expected a free resized block"):
            pool.lease(wrong)
    assert before == pool.counters


# --- cached blocks ---------------------------------------------------------------------------------------------------


def test_a_cached_block_is_used_again() -> None:
    """The next lease of its size gets the same memory; another dtype or size does not."""
    pool = MemoryPool("cpu")
    block = pool.lease_cached(1000, FLOAT)
    pool.release(block)

    assert pool.lease_cached(1000, FLOAT) is block
    other = pool.lease_cached(1000, torch.bfloat16)
    assert other is not block
    assert (0, 2) == (pool.counters.cached_free, pool.counters.cached_leased)
    check(pool)


def test_caching_never_raises_the_peak() -> None:
    """A free block gives way to one of another size: no more is held than was ever leased at once."""
    pool = MemoryPool("cpu")
    for numel in (1000, 250, 500, 1000, 250):
        pool.release(pool.lease_cached(numel, FLOAT))

    assert 4000 == pool.counters.peak_held_bytes
    check(pool)


def test_a_free_cached_block_gives_way_to_a_resized_one() -> None:
    """Both kinds share the bound."""
    pool = MemoryPool("cpu")
    pool.release(pool.lease_cached(1000, FLOAT))
    block = pool.reserve(500, FLOAT)
    pool.lease(block)

    assert (2000, 0) == (pool.counters.held_bytes, pool.counters.cached_free)


def test_what_fits_under_the_peak_stays_cached() -> None:
    """A cached block is kept where it does not add to what was leased at once before."""
    pool = MemoryPool("cpu")
    block, other = pool.reserve(500, FLOAT), pool.lease_cached(1000, FLOAT)
    pool.lease(block)
    pool.release(block)
    pool.release(other)
    pool.lease(block)

    assert (6000, 1) == (pool.counters.held_bytes, pool.counters.cached_free)
    assert 6000 == pool.counters.peak_held_bytes


def test_trim_frees_what_is_cached_and_free() -> None:
    """Leased blocks stay."""
    pool = MemoryPool("cpu")
    leased, free = pool.lease_cached(8, FLOAT), pool.lease_cached(16, FLOAT)
    pool.release(free)
    pool.trim()

    assert (0, 1, 32) == (pool.counters.cached_free, pool.counters.cached_leased, pool.counters.held_bytes)
    pool.release(leased)
    check(pool)


# --- the limit -------------------------------------------------------------------------------------------------------


def test_the_limit_bounds_what_is_held() -> None:
    """A lease over it is refused with the numbers, before anything changes; has_room predicts it."""
    pool = MemoryPool("cpu", limit_bytes=100)
    block = pool.reserve(20, FLOAT)
    pool.lease(block)
    before = pool.counters

    assert pool.has_room(20)
    assert not pool.has_room(21)
    for lease_more in (lambda: pool.lease(pool.reserve(6, FLOAT)), lambda: pool.lease_cached(6, FLOAT)):
        with pytest.raises(PoolExhausted, match=r"24 bytes exceed limit_bytes=100: .* 80 are leased"):
            lease_more()
        assert before == pool.counters
    pool.lease_cached(5, FLOAT)
    assert 100 == pool.counters.held_bytes


def test_cached_blocks_make_room_under_the_limit() -> None:
    """Unused blocks are freed before a lease is refused."""
    pool = MemoryPool("cpu", limit_bytes=100)
    pool.release(pool.lease_cached(25, FLOAT))
    block = pool.reserve(25, FLOAT)

    assert pool.has_room(100)
    pool.lease(block)
    assert (100, 0) == (pool.counters.held_bytes, pool.counters.cached_free)


def test_a_refused_lease_evicts_nothing() -> None:
    """If freeing every block would not make enough room, every block stays."""
    pool = MemoryPool("cpu", limit_bytes=100)
    pool.lease(pool.reserve(10, FLOAT))
    pool.release(pool.lease_cached(15, FLOAT))
    before = pool.counters

    with pytest.raises(PoolExhausted):
        pool.lease(pool.reserve(16, FLOAT))
    assert before == pool.counters


def test_public_blocks_count_against_the_limit() -> None:
    """Either all public blocks fit the limit, or none is allocated."""
    pool = MemoryPool("cpu", limit_bytes=100)

    with pytest.raises(PoolExhausted):
        pool.allocate_public(4, 8, FLOAT)
    assert pool.public_spec is None
    pool.allocate_public(3, 8, FLOAT)
    assert (3, 96) == (pool.counters.public_free, pool.counters.held_bytes)


def test_arguments_out_of_range_are_all_named() -> None:
    """One typed error names both."""
    with pytest.raises(PoolError, match=r"limit_bytes must .* got -1.*num_cooling must .* got -2"):
        MemoryPool("cpu", limit_bytes=-1, num_cooling=-2)
    assert issubclass(PoolExhausted, EngineError)


def test_an_exception_of_the_allocator_changes_no_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    """If memory runs out halfway, only existing blocks are counted."""
    pool = MemoryPool("cpu")
    pool.allocate_public(1, 8, FLOAT)
    lease = pool.lease_cached(4, FLOAT)
    before = pool.counters
    calls = iter(range(10))
    real = torch.empty

    def scarce(*args: Any, **kwargs: Any) -> torch.Tensor:
        if next(calls) == 1:
            raise RuntimeError("out of memory")
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", scarce)
        with pytest.raises(RuntimeError, match="out of memory"):
            pool.allocate_private([(8, FLOAT), (8, FLOAT)])

    assert before == pool.counters
    pool.release(lease)
    check(pool)


def test_empty_blocks_are_blocks() -> None:
    """No elements is a size too."""
    pool = MemoryPool("cpu", limit_bytes=0)
    for kind in ("resized", "cached"):
        pool.release(lease(pool, kind, numel=0))

    assert 0 == pool.counters.held_bytes


def test_large_blocks_of_the_host_are_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of at least 32 MiB ask the system for huge pages; smaller ones do not."""
    advised: list[tuple[int, int]] = []
    monkeypatch.setattr(memory_pool, "_madvise", lambda: lambda begin, nbytes: advised.append((begin, nbytes)))
    pool = MemoryPool("cpu")
    small, large = pool.reserve(8 * 2**20 - 1, FLOAT), pool.reserve(8 * 2**20, FLOAT)
    pool.lease(small)
    assert [] == advised
    pool.lease(large)
    address = large.payload.data_ptr()

    ((begin, nbytes),) = advised
    assert address <= begin < address + 4096
    assert address + 2**25 - 4096 < begin + nbytes <= address + 2**25


def lease(pool: MemoryPool, kind: str, *, numel: int = 8) -> Block:
    """A leased block of a kind."""
    if kind == "public":
        return pool.lease_public()
    if kind == "cached":
        return pool.lease_cached(numel, FLOAT)
    block = pool.reserve(numel, FLOAT)
    pool.lease(block)
    return block
