"""The memory pool on streams: the next tenant of memory waits for its last user, and no other stream waits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from fsdp_conformance.engine.chunks.memory_pool import Block, MemoryPool
from fsdp_conformance.tests.engine.chunks.test_memory_pool import check

FLOAT = torch.float32


class FakeStreams:
    """Streams as names, and a log of what was ordered: the pool's side of the bargain, without a device."""

    exist = True

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now = "compute"
        self._events = 0

    def current(self) -> str:
        return self.now

    def record(self) -> str:
        self._events += 1
        return f"{self.now}#{self._events}"

    def wait(self, event: str | None) -> None:
        if event is not None:
            self.log.append(f"{self.now} after {event}")

    def order(self, later: str, event: str | None) -> None:
        if event is not None:
            self.log.append(f"{later} after {event}")

    @contextlib.contextmanager
    def on(self, stream: str) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before


def streaming_pool(**options: Any) -> tuple[MemoryPool, FakeStreams]:
    """A pool whose streams are named and logged."""
    pool = MemoryPool("cpu", **options)
    streams = FakeStreams()
    pool.streams = streams  # type: ignore[assignment]
    return pool, streams


def _release(pool: MemoryPool, block: Block, *, after: str) -> None:
    """Release a block after an event, which is a string here."""
    pool.release(block, after=after)  # type: ignore[arg-type]


def test_a_public_block_is_given_out_after_its_last_use() -> None:
    """The stream that leases it waits for the event of its release; the first one for its allocation."""
    pool, streams = streaming_pool()
    pool.allocate_public(1, 8, FLOAT)
    with streams.on("gather"):
        block = pool.lease_public()
    pool.release(block)
    with streams.on("gather"):
        pool.lease_public()

    assert ["gather after compute#1", "gather after compute#2"] == streams.log


def test_a_resized_block_goes_back_to_its_stream() -> None:
    """The stream that the allocator gives the memory to waits for the release, if that was on another one."""
    pool, streams = streaming_pool()
    block = pool.reserve(8, FLOAT)
    with streams.on("gather"):
        pool.lease(block)
    pool.release(block)
    assert ["gather after compute#1"] == streams.log

    with streams.on("gather"):
        pool.lease(block)
        pool.release(block)
    assert ["gather after compute#1"] == streams.log, "on its own stream there is nothing to order"


def test_a_block_is_released_after_the_event_named() -> None:
    """The block waits for a given event instead of now: that of a gather that was never waited for."""
    pool, streams = streaming_pool()
    block = pool.reserve(8, FLOAT)
    with streams.on("gather"):
        pool.lease(block)
    _release(pool, block, after="gather#7")

    assert ["gather after gather#7"] == streams.log


def test_a_cached_block_cools_down() -> None:
    """
    While its reduction may still read it, the next lease gets other memory; the one after that gets it, and waits.
    """
    pool, streams = streaming_pool()
    first = pool.lease_cached(8, FLOAT)
    _release(pool, first, after="reduce#1")
    second = pool.lease_cached(8, FLOAT)
    assert second is not first
    assert [] == streams.log

    _release(pool, second, after="reduce#2")
    third = pool.lease_cached(8, FLOAT)

    assert third is first
    assert ["compute after reduce#1"] == streams.log
    assert 64 == pool.counters.peak_held_bytes
    check(pool)


def test_a_block_that_cools_down_is_given_out_where_there_is_no_room() -> None:
    """Under the limit, waiting is better than refusing."""
    pool, streams = streaming_pool(limit_bytes=40)
    first = pool.lease_cached(8, FLOAT)
    _release(pool, first, after="reduce#1")

    assert pool.lease_cached(8, FLOAT) is first
    assert ["compute after reduce#1"] == streams.log


def test_a_block_that_cools_down_gives_way_where_there_is_no_room() -> None:
    """Its memory goes back to the stream that it was allocated on, which waits for its reader."""
    pool, streams = streaming_pool(limit_bytes=40)
    _release(pool, pool.lease_cached(8, FLOAT), after="reduce#1")
    pool.lease_cached(4, FLOAT)

    assert ["compute after reduce#1"] == streams.log
    assert (16, 0) == (pool.counters.held_bytes, pool.counters.cached_free)


def test_trim_orders_the_streams_that_get_the_memory() -> None:
    """Every free block, with its own event."""
    pool, streams = streaming_pool()
    with streams.on("other"):
        first = pool.lease_cached(8, FLOAT)
    second = pool.lease_cached(8, FLOAT)
    _release(pool, first, after="reduce#1")
    _release(pool, second, after="reduce#2")
    pool.trim()

    assert ["other after reduce#1", "compute after reduce#2"] == streams.log
    assert 0 == pool.counters.held_bytes


def gathered(pool: MemoryPool, streams: FakeStreams, block: Block | None = None) -> Block:
    """A resized block of 32 bytes with memory, leased on the stream that gathers."""
    block = block or pool.reserve(8, FLOAT)
    with streams.on("gather"):
        pool.lease(block)
    return block


def lingers(pool: MemoryPool, block: Block) -> Block:
    """The block, released by the stream that computes; it keeps its memory for now."""
    with pool.lingering():
        pool.release(block)
    return block


def test_a_block_lingers_until_the_next_gather_has_begun() -> None:
    """The gather's stream does not wait for the unit that computes; what comes after the gather does."""
    pool, streams = streaming_pool()
    first = lingers(pool, gathered(pool, streams))
    gathered(pool, streams)
    assert [] == streams.log
    assert (64, 32) == (pool.counters.held_bytes, pool.counters.leased_bytes)

    pool.settle()
    assert ["gather after compute#1"] == streams.log
    assert (32, 0) == (pool.counters.held_bytes, first.payload.untyped_storage().nbytes())
    pool.settle()
    assert ["gather after compute#1"] == streams.log, "a second call has nothing to order"


def test_a_block_that_lingers_is_leased_again_after_its_last_use() -> None:
    """The same unit twice in a row: its memory is still there, and the gather into it waits."""
    pool, streams = streaming_pool()
    gathered(pool, streams, lingers(pool, gathered(pool, streams)))
    pool.settle()

    assert ["gather after compute#1"] == streams.log
    assert (32, 32) == (pool.counters.held_bytes, pool.counters.leased_bytes)


def test_a_block_that_lingers_gives_way_where_there_is_no_room() -> None:
    """The limit counts it, and the pool prefers waiting to refusing."""
    pool, streams = streaming_pool(limit_bytes=40)
    lingers(pool, gathered(pool, streams))
    gathered(pool, streams)

    assert ["gather after compute#1"] == streams.log
    assert 32 == pool.counters.held_bytes


def test_trim_ends_lingering() -> None:
    """The pool holds nothing at the end of a step."""
    pool, streams = streaming_pool()
    lingers(pool, gathered(pool, streams))
    pool.trim()

    assert ["gather after compute#1"] == streams.log
    assert 0 == pool.counters.held_bytes


def test_a_gather_evicts_no_block_that_may_be_in_use() -> None:
    """Its stream would be the one that computes: it would wait for the reduction because of a concurrent gather."""
    pool, streams = streaming_pool(num_cooling=0)
    used = pool.lease_cached(8, FLOAT)
    _release(pool, used, after="reduce#1")
    gathered(pool, streams)
    assert [] == streams.log

    assert pool.lease_cached(8, FLOAT) is used
    assert ["compute after reduce#1"] == streams.log


def test_a_gather_evicts_a_block_in_use_where_there_is_no_room() -> None:
    """The limit comes first."""
    pool, streams = streaming_pool(num_cooling=0, limit_bytes=40)
    _release(pool, pool.lease_cached(8, FLOAT), after="reduce#1")
    gathered(pool, streams)

    assert ["compute after reduce#1"] == streams.log
