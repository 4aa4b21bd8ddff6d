"""
Tests for the checker's memory: small histories, equal hazards reported once, observers ignored, nothing freed under its
lock.

In the programs below `m.a`, `m.b`, `m.c` are streams, a block has 64 bytes, and an operation touches the bytes that are
named, or all of them.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from fsdp_conformance.tests.simulator.simulator_machine import BYTES, DEADLINE_S, Machine, compiled

pytestmark = compiled


@pytest.fixture
def m() -> Machine:
    return Machine()


class TestBounds:
    """Histories do not grow with the number of steps."""

    @pytest.mark.parametrize("reuse", ["exact", "worst_case"])
    def test_ten_thousand_steps_of_a_loop(self, reuse: str) -> None:
        """Work on three streams, memory that is freed and allocated, views; and no wait of the host at all."""
        m = Machine(reuse=reuse)
        weight, activation, gradient = m.allocate(m.a), m.allocate(m.a), m.allocate(m.a)
        sizes = []
        for step in range(10_000):
            m.wait_stream(m.b, m.a)
            m.write(m.b, weight, op="all_gather")
            m.wait_stream(m.a, m.b)
            for column in range(4):
                m.read(m.a, weight, 4 * column, 4, [(4, 16)], op="matmul")
            m.write(m.a, activation, op="matmul")
            m.reuse(activation, m.a)
            m.wait_stream(m.c, m.a)
            m.read(m.c, gradient, 0, 32, op="reduce_scatter")
            m.checker.record_stream(gradient, m.c)
            m.reuse(gradient, m.a)
            if step >= 10:
                sizes.append(m.checker.history_size())

        assert [] == m.checker.hazards()
        assert {sizes[0]} == set(sizes)

    def test_what_the_host_knows_is_dropped(self, m: Machine) -> None:
        block = m.allocate()
        for lane in (m.a, m.b, m.c):
            m.read(lane, block)
        m.checker.host_wait_device(0)
        m.read(m.a, block)

        assert 1 == m.checker.history_size(block)

    def test_an_ordered_write_covers_what_came_before(self, m: Machine) -> None:
        block = m.allocate()
        m.read(m.a, block, 0, 32)
        m.read(m.b, block, 32, 32)
        m.wait_stream(m.c, m.a)
        m.wait_stream(m.c, m.b)
        m.write(m.c, block)

        assert 1 == m.checker.history_size(block)
        assert m.write(m.a, block) == "write_after_write"

    def test_a_write_to_some_of_the_bytes_covers_those(self, m: Machine) -> None:
        block = m.allocate()
        m.read(m.a, block)
        m.wait_stream(m.b, m.a)
        m.write(m.b, block, 0, 32)

        assert m.write(m.c, block, 32, 32) == "write_after_read"

    def test_a_column_covers_no_more_than_a_column(self, m: Machine) -> None:
        """Rows of 8 bytes: seven are written, then the first half of all eight; the other halves are still unwaited."""
        block = m.allocate()
        m.write(m.a, block, 0, 56)
        m.write(m.a, block, 0, 4, [(8, 8)])

        assert m.write(m.b, block, 4, 4, [(8, 8)]) == "write_after_write"

    def test_a_later_read_covers_an_earlier_one_of_the_same_stream_and_bytes(self, m: Machine) -> None:
        block = m.allocate()
        for _ in range(3):
            m.read(m.a, block, 0, 4, [(8, 8)])
            m.read(m.b, block, 0, 4, [(8, 8)])

        assert 2 == m.checker.history_size(block)

    def test_a_later_read_covers_no_write(self, m: Machine) -> None:
        block = m.allocate()
        m.write(m.a, block)
        m.read(m.a, block)

        assert m.read(m.b, block) == "read_after_write"

    def test_history_can_be_forgotten(self, m: Machine) -> None:
        """The history is cleared at the boundary between two runs; the clocks stay."""
        block = m.allocate()
        m.write(m.a, block)
        m.checker.clear_history()

        assert m.read(m.b, block) is None
        assert m.write(m.a, block) == "write_after_read"


class TestFolding:
    """Equal hazards are one, with a count."""

    def race(self, m: Machine, **fields: Any) -> None:
        block = m.allocate()
        m.write(m.a, block, op="then")
        m.read(m.b, block, op="now", **fields)

    def test_equal_hazards_are_counted(self, m: Machine) -> None:
        for _ in range(3):
            self.race(m)

        assert [3] == [hazard["count"] for hazard in m.checker.hazards()]

    @pytest.mark.parametrize("difference", [{"label": "forward"}, {"stack": lambda: [("train.py", 7, "step")]}])
    def test_other_labels_and_other_stacks_make_another_hazard(self, m: Machine, difference: dict[str, Any]) -> None:
        self.race(m)
        self.race(m, **difference)
        self.race(m, **difference)

        assert [1, 2] == [hazard["count"] for hazard in m.checker.hazards()]

    def test_tensors_do_not_make_another_hazard(self, m: Machine) -> None:
        """One missing wait in a loop over parameters is one finding."""
        self.race(m, tensor="0.weight")
        self.race(m, tensor="0.bias")

        assert [(2, "0.weight")] == [(h["count"], h["now"]["site"]["tensor"]) for h in m.checker.hazards()]

    def test_hazards_come_by_device_and_then_in_the_order_of_the_program(self, m: Machine) -> None:
        first, second = m.checker.add_lane("first", 1), m.checker.add_lane("second", 1)
        elsewhere = m.checker.add_block(BYTES, 1)
        m.write(first, elsewhere, op="then")
        m.write(second, elsewhere, op="z")
        self.race(m, label="y")
        self.race(m, label="x")

        places = [(hazard["device"], hazard["now"]["site"]["label"]) for hazard in m.checker.hazards()]
        assert [(0, "y"), (0, "x"), (1, "")] == places

    def test_hazards_can_be_cleared(self, m: Machine) -> None:
        self.race(m)
        m.checker.clear_hazards()
        cleared = m.checker.hazards()
        self.race(m)

        assert ([], [1]) == (cleared, [hazard["count"] for hazard in m.checker.hazards()])


class TestSuspension:
    """A suspended thread observes without taking part."""

    def test_nothing_is_checked_or_noted(self, m: Machine) -> None:
        block = m.allocate()
        m.write(m.a, block)
        m.checker.suspend()
        inside = m.read(m.b, block)
        m.write(m.b, block)
        m.checker.resume()

        assert inside is None
        assert 1 == m.checker.accesses()
        assert 1 == m.checker.history_size(block)

    def test_a_write_inside_clears_nothing(self, m: Machine) -> None:
        block = m.allocate()
        m.write(m.a, block)
        m.checker.suspend()
        m.write(m.a, block)
        m.checker.host_wait_lane(m.a)
        m.checker.resume()

        assert m.read(m.b, block) == "read_after_write"

    @pytest.mark.parametrize("wait", ["wait", "host_wait", "host_wait_lane", "host_wait_device"])
    def test_no_wait_counts(self, m: Machine, wait: str) -> None:
        block = m.allocate()
        m.write(m.a, block)
        event = m.checker.snapshot(m.a)
        arguments: dict[str, tuple[Any, ...]] = {
            "wait": (m.b, event), "host_wait": (event,), "host_wait_lane": (m.a,), "host_wait_device": (0,),
        }  # fmt: skip
        m.checker.suspend()
        taught = getattr(m.checker, wait)(*arguments[wait])
        m.checker.resume()

        assert taught is False
        assert m.read(m.b, block) == "read_after_write"

    def test_an_event_recorded_inside_holds_the_clock_of_before(self, m: Machine) -> None:
        """Waiting for it outside covers what came before the suspension."""
        block = m.allocate()
        m.write(m.a, block)
        before = m.checker.snapshot(m.a)
        m.checker.suspend()
        m.checker.submit(m.a)
        inside = m.checker.snapshot(m.a)
        m.checker.resume()
        m.checker.wait(m.b, inside)

        assert before == inside
        assert m.read(m.b, block) is None

    def test_memory_is_followed(self, m: Machine) -> None:
        """Freed by the observer, allocated by the program: it is another tenant."""
        block = m.allocate()
        m.write(m.b, block)
        m.checker.suspend()
        m.checker.freed(block)
        m.checker.allocated(block, m.a)
        m.checker.resume()

        assert m.write(m.a, block) == "reuse_in_flight"

    def test_it_nests(self, m: Machine) -> None:
        m.checker.suspend()
        m.checker.suspend()
        m.checker.resume()
        still = m.checker.suspended()
        m.checker.resume()

        assert (True, False) == (still, m.checker.suspended())

    def test_an_end_without_a_beginning_is_refused(self, m: Machine) -> None:
        with pytest.raises(RuntimeError, match=r"without suspend"):
            m.checker.resume()

    def test_other_threads_go_on(self, m: Machine) -> None:
        block = m.allocate()
        m.write(m.a, block)
        kinds: list[str | None] = []
        m.checker.suspend()
        thread = threading.Thread(target=lambda: kinds.append(m.read(m.b, block)))
        thread.start()
        thread.join(DEADLINE_S)
        m.checker.resume()

        assert ["read_after_write"] == kinds


class Closing:
    """A stack that calls the checker when it is read and destroyed: a deadlock if that happened under the lock."""

    def __init__(self, m: Machine, ended: list[int]) -> None:
        self.m = m
        self.ended = ended

    def __call__(self) -> list[tuple[str, int, str]]:
        return [("train.py", self.m.checker.num_lanes(), "step")]

    def __del__(self) -> None:
        self.m.checker.history_size()
        self.ended.append(1)


class TestThreads:
    """There is one lock, and no foreign code runs under it."""

    def test_stacks_are_read_and_destroyed_without_the_lock(self, m: Machine) -> None:
        ended: list[int] = []
        block = m.allocate()

        def work() -> None:
            m.write(m.a, block, op="w", stack=Closing(m, ended))
            for _ in range(3):
                m.read(m.b, block, op="r", stack=Closing(m, ended))
                m.write(m.a, block, op="w", stack=Closing(m, ended))
            m.wait_stream(m.b, m.a)
            m.checker.record_stream(block, m.b)  # so that the free drops accesses
            m.checker.freed(block, m.site("free", stack=Closing(m, ended)))
            m.checker.allocated(block, m.a, m.site("empty", stack=Closing(m, ended)))
            m.checker.freed(block, m.site("free", stack=Closing(m, ended)))
            m.checker.clear_hazards()
            m.checker.clear_history()
            m.checker.remove_block(block)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(DEADLINE_S)

        assert not thread.is_alive()
        assert 10 == len(ended)

    def test_many_ranks_in_one_process(self, m: Machine) -> None:
        """Sixteen devices, a thread each; on every one the same three races, and no more."""
        ranks = [[m.checker.add_lane(name, rank) for name in ("compute", "comm")] for rank in range(1, 17)]
        barrier = threading.Barrier(len(ranks))

        def train(rank: int, compute: int, comm: int) -> None:
            block = m.checker.add_block(BYTES, rank)
            barrier.wait(DEADLINE_S)
            for step in range(300):
                m.write(comm, block, op="all_gather", stack=lambda: [("fsdp.py", 1, "unshard")])
                if step % 100 != 99:
                    m.wait_stream(compute, comm)
                m.read(compute, block, op="matmul")
                m.wait_stream(comm, compute)

        threads = [
            threading.Thread(target=train, args=(rank, *lanes), daemon=True) for rank, lanes in enumerate(ranks, 1)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)

        assert not any(thread.is_alive() for thread in threads)
        assert [(rank, 3) for rank in range(1, 17)] == [(h["device"], h["count"]) for h in m.checker.hazards()]
