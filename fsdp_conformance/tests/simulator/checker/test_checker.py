"""
The happens-before checker on synthetic streams and blocks, each rule by a small program.

In the programs below `m.a`, `m.b`, `m.c` are streams, a block has 64 bytes, and an operation touches the bytes that are
named, or all of them.
"""

from __future__ import annotations

import pytest

from fsdp_conformance.tests.simulator.simulator_machine import BYTES, HOST, Machine, compiled

pytestmark = compiled


@pytest.fixture
def m() -> Machine:
    return Machine()


class TestOrder:
    """Which accesses are ordered."""

    def test_a_stream_runs_its_work_in_order(self, m: Machine) -> None:
        block = m.allocate()

        kinds = [m.write(m.a, block), m.read(m.a, block), m.write(m.a, block)]

        assert [None, None, None] == kinds

    @pytest.mark.parametrize(
        ("then", "now", "expected"),
        [
            ("write", "read", "read_after_write"),
            ("read", "write", "write_after_read"),
            ("write", "write", "write_after_write"),
            ("read", "read", None),
        ],
    )
    def test_two_streams_are_unordered(self, m: Machine, then: str, now: str, expected: str | None) -> None:
        block = m.allocate()
        m.run(m.a, then, block)

        assert expected == m.run(m.b, now, block)

    def test_a_wait_for_an_event_orders_what_came_before_the_event(self, m: Machine) -> None:
        early, late = m.allocate(), m.allocate()
        m.write(m.a, early)
        event = m.checker.snapshot(m.a)
        m.write(m.a, late)
        m.checker.wait(m.b, event)

        assert m.read(m.b, early) is None
        assert m.read(m.b, late) == "read_after_write"

    def test_an_event_that_was_never_recorded_orders_nothing(self, m: Machine) -> None:
        """As on CUDA, waiting for it is not an error and has no effect."""
        block = m.allocate()
        m.write(m.a, block)

        assert m.checker.wait(m.b, []) is False
        assert m.read(m.b, block) == "read_after_write"

    def test_waits_pass_on_what_has_been_waited_for(self, m: Machine) -> None:
        block = m.allocate()
        m.write(m.a, block)
        m.wait_stream(m.b, m.a)
        m.wait_stream(m.c, m.b)

        assert m.read(m.c, block) is None

    def test_a_wait_orders_nothing_backwards(self, m: Machine) -> None:
        block = m.allocate()
        m.write(m.a, block)
        m.wait_stream(m.a, m.b)

        assert m.read(m.b, block) == "read_after_write"

    def test_what_the_host_has_waited_for_is_known_to_all_later_work(self, m: Machine) -> None:
        block = m.allocate()
        m.write(m.a, block)
        m.checker.host_wait_lane(m.a)

        assert m.read(m.b, block) is None

    def test_a_host_that_waits_for_the_device_waits_for_all_of_its_streams(self, m: Machine) -> None:
        other_device = m.checker.add_lane("d", 1)
        mine, others = m.allocate(), m.allocate()
        m.write(m.b, mine)
        m.write(other_device, others)
        m.checker.host_wait_device(0)

        assert m.read(m.c, mine) is None
        assert m.read(m.c, others) == "read_after_write"

    def test_the_host_knows_an_event_once_it_has_waited(self, m: Machine) -> None:
        m.checker.submit(m.a)
        event = m.checker.snapshot(m.a)

        assert not m.checker.host_knows(event)
        m.checker.host_wait(event)
        assert m.checker.host_knows(event)

    def test_who_waits_for_an_event_knows_what_the_host_knows(self, m: Machine) -> None:
        """`b` has done nothing since the host waited for `a`; a wait for `b` is ordered after `a`."""
        block = m.allocate()
        m.write(m.a, block)
        m.checker.host_wait_lane(m.a)
        event = m.checker.snapshot(m.b)

        assert m.checker.wait(m.c, event) is False
        assert m.read(m.c, block) is None

    def test_the_last_access_of_the_other_stream_is_told(self, m: Machine) -> None:
        """A wait for the read covers the write before it."""
        block = m.allocate()
        m.write(m.a, block, op="first")
        m.read(m.a, block, op="second")
        m.write(m.b, block, op="third")

        (hazard,) = m.checker.hazards()
        assert ("second", "third") == (hazard["then"]["site"]["op"], hazard["now"]["site"]["op"])

    def test_each_stream_that_is_not_waited_for_makes_a_hazard(self, m: Machine) -> None:
        block = m.allocate()
        m.read(m.b, block)
        m.read(m.a, block)
        m.write(m.c, block)

        assert ["a", "b"] == [hazard["then"]["stream"]["name"] for hazard in m.checker.hazards()]

    def test_a_wait_that_is_missing_is_reported_once(self, m: Machine) -> None:
        block = m.allocate()
        m.write(m.a, block)

        assert m.read(m.b, block) == "read_after_write"
        assert m.write(m.b, block) is None

    def test_after_a_report_only_what_was_reported_counts_as_waited_for(self, m: Machine) -> None:
        block, later = m.allocate(), m.allocate()
        m.write(m.a, block)
        m.write(m.a, later)
        m.read(m.b, block)

        assert m.read(m.b, later) == "read_after_write"

    def test_an_access_before_any_operation_is_refused(self, m: Machine) -> None:
        with pytest.raises(RuntimeError, match=r"before any submit"):
            m.checker.access(m.allocate(), "read", m.a, 0, 1)


class TestRedundantWaits:
    """A wait returns whether the waiting side learned anything."""

    def test_a_second_wait_teaches_nothing(self, m: Machine) -> None:
        m.checker.submit(m.a)

        assert [True, False] == [m.wait_stream(m.b, m.a), m.wait_stream(m.b, m.a)]

    def test_a_wait_for_what_the_host_knows_teaches_nothing(self, m: Machine) -> None:
        m.checker.submit(m.a)

        assert m.checker.host_wait_lane(m.a) is True
        assert m.wait_stream(m.b, m.a) is False
        assert m.checker.host_wait_device(0) is False

    def test_a_wait_that_another_implies_teaches_nothing(self, m: Machine) -> None:
        m.checker.submit(m.a)
        m.wait_stream(m.b, m.a)
        m.checker.submit(m.b)

        assert m.wait_stream(m.c, m.b) is True
        assert m.wait_stream(m.c, m.a) is False


class TestOrderDigest:
    """A checksum of what the accesses of a program knew about each other."""

    def digest(self, m: Machine, *, waits: str, device: int = 0) -> int:
        """`a` writes, `b` reads, `c` reads; of the waits of `b` for `a`, `c` for `b` and `c` for `a` those named."""
        a, b, c = (m.checker.add_lane("stream", device) for _ in range(3))
        block = m.checker.add_block(BYTES, device)
        m.checker.begin_order_digest()
        m.write(a, block)
        for name, waiting, waited_for in (("ba", b, a), ("cb", c, b), ("ca", c, a)):
            if name in waits:
                m.wait_stream(waiting, waited_for)
            if name != "cb":
                m.read(waiting, block)
        return int(m.checker.order_digest(device))

    def test_it_is_the_same_for_the_same_program(self, m: Machine) -> None:
        """The same on other streams, after other work, in the same process."""
        first = self.digest(m, waits="ba cb ca")
        m.wait_stream(m.a, m.b)
        m.checker.host_wait_device(0)

        assert first == self.digest(m, waits="ba cb ca")
        assert first == self.digest(Machine(), waits="ba cb ca")

    def test_a_redundant_wait_does_not_change_it(self, m: Machine) -> None:
        assert self.digest(m, waits="ba cb ca") == self.digest(m, waits="ba cb")

    def test_a_wait_that_teaches_something_does(self, m: Machine) -> None:
        digests = {self.digest(m, waits=waits) for waits in ("ba cb", "ba ca", "ba", "cb", "")}

        assert 5 == len(digests)

    def test_a_wait_of_the_host_that_teaches_something_does(self, m: Machine) -> None:
        digests = []
        for waits in (True, False):
            block = m.allocate(pinned=True)
            m.checker.begin_order_digest()
            m.write(m.a, block)
            if waits:
                m.checker.host_wait_lane(m.a)
            m.read(HOST, block)
            digests.append(m.checker.order_digest())

        assert digests[0] != digests[1]

    def test_devices_have_digests_of_their_own(self, m: Machine) -> None:
        alone = self.digest(m, waits="ba", device=1)
        m.write(m.a, m.allocate())

        assert alone == m.checker.order_digest(1)
        assert m.checker.order_digest(0) not in (0, alone)
        assert 0 == m.checker.order_digest(2)


class TestPinnedMemory:
    """The host counts as a stream; its hazards have separate kinds."""

    @pytest.mark.parametrize(
        ("copy", "host", "expected"),
        [
            ("read", "write", "host_write_in_flight"),
            ("write", "write", "host_write_in_flight"),
            ("write", "read", "host_read_in_flight"),
            ("read", "read", None),
        ],
    )
    def test_the_host_does_not_wait_for_a_copy(self, m: Machine, copy: str, host: str, expected: str | None) -> None:
        block = m.allocate(pinned=True)
        m.run(m.a, copy, block)

        assert expected == m.run(HOST, host, block)

    def test_the_host_waits_for_a_copy(self, m: Machine) -> None:
        block = m.allocate(pinned=True)
        m.write(m.a, block)
        m.checker.host_wait(m.checker.snapshot(m.a))

        assert m.read(HOST, block) is None

    def test_a_copy_comes_after_what_the_host_did_before_it(self, m: Machine) -> None:
        block = m.allocate(pinned=True)
        m.write(HOST, block)
        history_size = m.checker.history_size(block)

        assert 0 == history_size
        assert m.read(m.a, block) is None
        assert m.write(m.b, block) == "write_after_read"

    def test_every_access_of_the_host_is_reported(self, m: Machine) -> None:
        """The host learns nothing from a report; otherwise all streams would count as having waited."""
        block, other = m.allocate(pinned=True), m.allocate()
        m.write(m.a, other)
        m.write(m.a, block)

        assert m.read(HOST, block, op="item") == "host_read_in_flight"
        assert m.read(HOST, block, op="item") == "host_read_in_flight"
        assert m.read(m.b, other) == "read_after_write"


class TestBytes:
    """Accesses conflict if they have a byte in common."""

    def test_neighbours_do_not_conflict(self, m: Machine) -> None:
        block = m.allocate()
        m.write(m.a, block, 0, 32)

        assert m.write(m.b, block, 32, 32) is None
        assert m.write(m.c, block, 31, 1) == "write_after_write"

    def test_columns_of_a_matrix_do_not_conflict(self, m: Machine) -> None:
        """Rows of 8 bytes: columns of 4 bytes, written by two streams."""
        block = m.allocate()
        m.write(m.a, block, 0, 4, [(8, 8)])

        assert m.write(m.b, block, 4, 4, [(8, 8)]) is None
        assert m.write(m.c, block, 3, 2, [(8, 8)]) == "write_after_write"

    def test_blocks_do_not_conflict(self, m: Machine) -> None:
        m.write(m.a, m.allocate())

        assert m.write(m.b, m.allocate()) is None

    def test_an_access_without_bytes_is_none(self, m: Machine) -> None:
        block = m.allocate()
        m.write(m.a, block)

        assert m.write(m.b, block, 0, 0) is None
        assert m.write(m.b, block, 0, 4, [(0, 8)]) is None
        assert 1 == m.checker.accesses()


class TestModes:
    """Off checks nothing; the other modes find the same."""

    def test_off_notes_nothing(self, m: Machine) -> None:
        block = m.allocate()
        m.checker.mode = "off"
        m.write(m.a, block)
        m.checker.mode = "record"

        assert m.read(m.b, block) is None
        assert 1 == m.checker.accesses()

    def test_waits_made_while_off_count(self, m: Machine) -> None:
        block = m.allocate()
        m.write(m.a, block)
        m.checker.mode = "off"
        m.wait_stream(m.b, m.a)
        m.checker.mode = "record"

        assert m.read(m.b, block) is None

    @pytest.mark.parametrize("mode", ["record", "raise", "poison"])
    def test_the_hazard_is_returned(self, m: Machine, mode: str) -> None:
        block = m.allocate()
        m.checker.mode = mode
        m.write(m.a, block)

        assert m.read(m.b, block) == "read_after_write"
        assert 1 == len(m.checker.hazards())

    def test_a_mode_that_there_is_not(self, m: Machine) -> None:
        with pytest.raises(ValueError, match=r"mode must be one of off, record, raise, poison, got loud"):
            m.checker.mode = "loud"
