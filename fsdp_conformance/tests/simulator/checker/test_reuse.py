"""Memory that is freed while it is still in use, with the rules of CUDA's caching allocator."""

from __future__ import annotations

import pytest

from fsdp_conformance.tests.simulator.simulator_machine import HOST, MIB, Machine, compiled

pytestmark = compiled


@pytest.fixture
def m() -> Machine:
    return Machine()


@pytest.fixture
def worst() -> Machine:
    """With worst-case reuse."""
    return Machine(reuse="worst_case")


class TestReuse:
    """A block keeps its history over a free and an allocation."""

    def test_memory_that_another_stream_still_uses(self, m: Machine) -> None:
        block = m.allocate(m.a)
        m.wait_stream(m.b, m.a)
        m.read(m.b, block, op="all_gather")
        m.reuse(block, m.a)

        assert m.write(m.a, block, op="fill") == "reuse_in_flight"
        (hazard,) = m.checker.hazards()
        assert ("all_gather", "fill", "free") == (
            hazard["then"]["site"]["op"], hazard["now"]["site"]["op"], hazard["freed"]["op"],
        )  # fmt: skip
        assert (1, 2) == (hazard["then"]["allocation"], hazard["now"]["allocation"])

    def test_the_allocating_stream_waits_before_it_uses_the_memory_again(self, m: Machine) -> None:
        block = m.allocate(m.a)
        m.write(m.b, block)
        m.reuse(block, m.a)
        m.wait_stream(m.a, m.b)

        assert m.write(m.a, block) is None

    def test_record_stream_keeps_the_memory_until_the_stream_is_done(self, m: Machine) -> None:
        block = m.allocate(m.a)
        m.write(m.b, block)
        m.checker.record_stream(block, m.b)
        m.reuse(block, m.a)

        assert m.write(m.a, block) is None

    def test_record_stream_covers_what_the_stream_is_given_up_to_the_free(self, m: Machine) -> None:
        """The allocator records its event at the free, not at `record_stream`."""
        block = m.allocate(m.a)
        m.checker.record_stream(block, m.b)
        m.write(m.b, block)
        m.reuse(block, m.a)

        assert m.write(m.a, block) is None

    def test_record_stream_covers_what_the_stream_has_waited_for(self, m: Machine) -> None:
        block = m.allocate(m.a)
        m.write(m.c, block)
        m.wait_stream(m.b, m.c)
        m.checker.record_stream(block, m.b)
        m.reuse(block, m.a)

        assert m.write(m.a, block) is None

    def test_record_stream_of_one_stream_covers_no_other(self, m: Machine) -> None:
        block = m.allocate(m.a)
        m.read(m.b, block)
        m.read(m.c, block, op="of c")
        m.checker.record_stream(block, m.b)
        m.reuse(block, m.a)

        assert m.write(m.a, block) == "reuse_in_flight"
        assert ["of c"] == [hazard["then"]["site"]["op"] for hazard in m.checker.hazards()]

    def test_record_stream_is_for_one_tenant(self, m: Machine) -> None:
        block = m.allocate(m.a)
        m.checker.record_stream(block, m.b)
        m.reuse(block, m.a)
        m.wait_stream(m.b, m.a)
        m.write(m.b, block)
        m.reuse(block, m.a)

        assert m.write(m.a, block) == "reuse_in_flight"

    def test_record_stream_of_the_allocating_stream_does_nothing(self, m: Machine) -> None:
        """CUDA's allocator ignores it, because it reuses memory in the order of that stream."""
        block = m.allocate(m.a)
        m.write(m.a, block)
        m.checker.record_stream(block, m.a)
        m.reuse(block, m.a)

        assert m.write(m.b, block) == "reuse_in_flight"

    def test_record_stream_orders_no_other_memory(self, m: Machine) -> None:
        block, other = m.allocate(m.a), m.allocate(m.a)
        m.write(m.b, block)
        m.write(m.b, other)
        m.checker.record_stream(block, m.b)
        m.reuse(block, m.a)

        assert m.read(m.a, other) == "read_after_write"

    def test_one_early_free_is_reported_once_and_orders_no_other_memory(self, m: Machine) -> None:
        block, other = m.allocate(m.a), m.allocate(m.a)
        m.write(m.b, other)
        m.write(m.b, block)
        m.reuse(block, m.a)

        assert m.write(m.a, block, 0, 32) == "reuse_in_flight"
        assert m.write(m.a, block, 32, 32) is None
        assert m.read(m.a, other) == "read_after_write"

    def test_an_allocation_is_no_access(self, m: Machine) -> None:
        block = m.allocate(m.a)
        m.write(m.b, block)
        m.reuse(block, m.a)
        m.reuse(block, m.a)

        assert [] == m.checker.hazards()
        assert 1 == m.checker.accesses()

    def test_memory_given_back_to_the_system_has_no_past(self, m: Machine) -> None:
        block = m.allocate(m.a)
        m.write(m.b, block)
        m.checker.freed(block)
        m.checker.remove_block(block)

        assert m.write(m.a, m.allocate(m.a)) is None
        with pytest.raises(IndexError, match=r"block must be one that add_block\(\) returned, got 1"):
            m.checker.freed(block)


class TestWorstCaseReuse:
    """New memory may be any free memory that a caching allocator could have chosen."""

    def in_flight(self, m: Machine, nbytes: int = 4096) -> int:
        """Memory of `a` that is freed while `b` writes it."""
        block = m.allocate(m.a, nbytes)
        m.write(m.b, block, 0, 8, op="in flight")
        m.checker.freed(block, m.site("free"))
        return block

    def test_a_smaller_request_could_have_got_the_memory(self, worst: Machine) -> None:
        m = worst
        self.in_flight(m)
        block = m.allocate(m.a, 1000)

        assert m.write(m.a, block) == "reuse_in_flight"
        (hazard,) = m.checker.hazards()
        assert (2, 1) == (hazard["block"], hazard["then_block"])
        assert (1000, 4096) == (hazard["nbytes"], hazard["then_nbytes"])
        assert "free" == hazard["freed"]["op"]

    def test_exact_reuse_does_not_look_there(self, m: Machine) -> None:
        self.in_flight(m)

        assert m.write(m.a, m.allocate(m.a, 1000)) is None

    def test_a_larger_request_could_not(self, worst: Machine) -> None:
        m = worst
        self.in_flight(m)

        assert m.write(m.a, m.allocate(m.a, 4097)) is None

    def test_sizes_are_rounded_to_512_bytes(self, worst: Machine) -> None:
        m = worst
        self.in_flight(m, nbytes=513)

        assert m.write(m.a, m.allocate(m.a, 1024)) == "reuse_in_flight"

    def test_small_and_large_requests_have_pools_of_their_own(self, worst: Machine) -> None:
        m = worst
        self.in_flight(m, nbytes=2 * MIB)

        assert m.write(m.a, m.allocate(m.a, MIB)) is None
        assert m.write(m.a, m.allocate(m.a, MIB + 1)) == "reuse_in_flight"

    def test_streams_have_pools_of_their_own(self, worst: Machine) -> None:
        m = worst
        self.in_flight(m)

        assert m.write(m.c, m.allocate(m.c)) is None

    def test_memory_that_is_in_use_is_given_to_nobody(self, worst: Machine) -> None:
        m = worst
        block = self.in_flight(m)
        m.checker.allocated(block, m.a, m.site("empty"))

        assert m.write(m.a, m.allocate(m.a)) is None

    def test_pinned_memory_is_not_reused_in_this_way(self, worst: Machine) -> None:
        m = worst
        block = m.allocate(pinned=True)
        m.write(m.a, block)
        m.checker.freed(block)

        assert m.write(HOST, m.allocate(pinned=True)) is None

    def test_memory_that_is_allocated_in_a_suspension_is_no_other(self, worst: Machine) -> None:
        """An observer's copy of a tensor, read by the program later."""
        m = worst
        self.in_flight(m)
        m.checker.suspend()
        block = m.allocate(m.a)
        m.checker.resume()

        assert m.read(m.a, block) is None

    def test_it_is_the_access_that_has_to_wait(self, worst: Machine) -> None:
        m = worst
        self.in_flight(m)
        block = m.allocate(m.a)
        m.wait_stream(m.a, m.b)

        assert m.write(m.a, block) is None

    def test_a_wait_after_the_first_access_is_too_late(self, worst: Machine) -> None:
        m = worst
        self.in_flight(m)
        block = m.allocate(m.a)
        early = m.write(m.a, block, 0, 4)
        m.wait_stream(m.a, m.b)

        assert "reuse_in_flight" == early
        assert m.write(m.a, block, 4, 4) is None

    def test_memory_used_on_a_stream_that_did_not_wait_for_the_allocating_one(self, worst: Machine) -> None:
        """`a` itself used the memory last; its new tenant is used on `c`, which knows nothing of `a`."""
        m = worst
        old = m.allocate(m.a)
        m.write(m.a, old)
        m.checker.freed(old)
        waits_not, waits = m.allocate(m.a), m.allocate(m.a)

        assert m.write(m.c, waits_not) == "reuse_in_flight"
        m.wait_stream(m.c, m.a)
        assert m.write(m.c, waits) is None

    def test_record_stream(self, worst: Machine) -> None:
        m = worst
        block = m.allocate(m.a)
        m.write(m.b, block)
        m.checker.record_stream(block, m.b)
        m.checker.freed(block)

        assert m.write(m.a, m.allocate(m.a)) is None

    def test_reads_of_both_do_not_conflict(self, worst: Machine) -> None:
        m = worst
        old = m.allocate(m.a)
        m.read(m.b, old)
        m.checker.freed(old)
        block = m.allocate(m.a)

        assert m.read(m.a, block) is None
        assert m.write(m.a, block) == "reuse_in_flight"

    def test_one_early_free_is_reported_once(self, worst: Machine) -> None:
        m = worst
        self.in_flight(m)
        first, second = m.allocate(m.a), m.allocate(m.a)

        assert m.write(m.a, first) == "reuse_in_flight"
        assert m.write(m.a, second) is None

    def test_a_tenant_that_never_touched_the_memory_passes_it_on(self, worst: Machine) -> None:
        m = worst
        old = self.in_flight(m)
        between = m.allocate(m.a)
        m.checker.allocated(old, m.a, m.site("empty"))
        m.checker.freed(between)

        assert m.write(m.a, m.allocate(m.a)) == "reuse_in_flight"

    def test_a_tenant_that_overwrote_it_after_a_wait_does_not(self, worst: Machine) -> None:
        m = worst
        old = self.in_flight(m)
        between = m.allocate(m.a)
        m.checker.allocated(old, m.a, m.site("empty"))
        m.wait_stream(m.a, m.b)
        m.write(m.a, between)
        m.checker.freed(between)

        assert m.write(m.a, m.allocate(m.a)) is None

    def test_a_write_to_all_of_the_memory_covers_what_could_have_been_there(self, worst: Machine) -> None:
        m = worst
        self.in_flight(m)
        block = m.allocate(m.a)
        m.wait_stream(m.a, m.b)
        m.write(m.a, block)

        assert 1 == m.checker.history_size(block)
        assert m.write(m.c, block) == "write_after_write"

    def test_a_write_to_some_of_it_does_not(self, worst: Machine) -> None:
        m = worst
        self.in_flight(m)
        block = m.allocate(m.a)
        m.wait_stream(m.a, m.b)
        m.write(m.a, block, 0, 32)

        assert m.write(m.c, block, 32, 32) == "reuse_in_flight"

    def test_history_can_be_forgotten(self, worst: Machine) -> None:
        m = worst
        self.in_flight(m)
        m.checker.clear_history()
        block = m.allocate(m.a)

        assert 0 == m.checker.history_size()
        assert m.write(m.a, block) is None

    def test_one_of_several_early_frees_does_not_hide_another(self, worst: Machine) -> None:
        """Three blocks of one size: the last is reported first, then the one before it."""
        m = worst
        blocks = [m.allocate(m.a, 4096) for _ in range(3)]
        for number, block in enumerate(blocks):
            m.write(m.b, block, op=f"in flight {number}")
            m.checker.freed(block)
        kinds = [m.write(m.a, m.allocate(m.a)) for _ in range(4)]

        assert ["reuse_in_flight"] * 3 + [None] == kinds
        thens = [hazard["then"]["site"]["op"] for hazard in m.checker.hazards()]
        assert ["in flight 2", "in flight 1", "in flight 0"] == thens

    def test_what_the_host_knows_is_dropped(self, worst: Machine) -> None:
        m = worst
        self.in_flight(m)
        m.checker.host_wait_lane(m.b)
        block = m.allocate(m.a)

        assert 0 == m.checker.history_size(block)
        assert m.write(m.a, block) is None
