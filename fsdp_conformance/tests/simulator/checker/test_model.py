"""The checker against slow and simple models of it: sets of bytes, and paths in a graph of operations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_conformance.simulator.device import build
from fsdp_conformance.tests.simulator.simulator_machine import HOST, Machine, Repeats, bytes_of, compiled

pytestmark = compiled


Extent = tuple[int, int, Repeats]


def extents(counts: int, strides: int, runs: int, dims: int, *, unit: int = 1) -> st.SearchStrategy[Extent]:
    """Any nesting, self-overlapping ones too; offsets and strides are multiples of `unit`."""
    repeat = st.tuples(st.integers(0, counts), st.integers(1, strides).map(lambda stride: unit * stride))
    offset = st.integers(0, 2 * strides).map(lambda offset: unit * offset)
    return st.tuples(offset, st.integers(0, runs), st.lists(repeat, max_size=dims))


class TestExtents:
    """The arithmetic of strided extents, against sets of bytes."""

    dense = extents(counts=5, strides=20, runs=8, dims=4)
    sparse = extents(counts=60, strides=400, runs=3, dims=2)
    elements = extents(counts=3, strides=12, runs=4, dims=3, unit=4)

    @pytest.mark.nightly
    @pytest.mark.slow
    @settings(max_examples=1000, deadline=None)
    @given(
        st.tuples(dense, dense) | st.tuples(sparse, sparse) | st.tuples(dense, sparse) | st.tuples(elements, elements)
    )
    def test_overlap_is_exact(self, pair: tuple[Extent, Extent]) -> None:
        first, second = pair

        assert bool(bytes_of(*first) & bytes_of(*second)) == build.load().overlap(*first, *second)

    @pytest.mark.slow
    @settings(max_examples=500, deadline=None)
    @given(dense | sparse | elements)
    def test_normalized_extents_have_the_same_bytes(self, extent: Extent) -> None:
        normalized = build.load().normalized(*extent)

        assert bytes_of(*extent) == bytes_of(*normalized)
        strides = [stride for _, stride in normalized[2]]
        assert sorted(strides, reverse=True) == strides

    @pytest.mark.slow
    @settings(max_examples=500, deadline=None)
    @given(
        st.integers(300, 500), st.integers(300, 500), st.integers(8, 70), st.integers(8, 70), st.integers(0, 20000),
        st.integers(1, 9), st.integers(1, 9),
    )  # fmt: skip
    def test_two_different_strides(self, s: int, t: int, num_s: int, num_t: int, offset: int, r: int, q: int) -> None:
        """The pattern that is solved as a linear congruence, without trying each run."""
        expected = bool(bytes_of(0, r, [(num_s, s)]) & bytes_of(offset, q, [(num_t, t)]))

        assert expected == build.load().overlap(0, r, [(num_s, s)], offset, q, [(num_t, t)])

    def test_a_transposed_view_is_one_run(self) -> None:
        assert (0, 4 * 30, []) == build.load().normalized(0, 4, [(6, 4), (5, 24)])

    def test_sliding_windows_are_one_run(self) -> None:
        """`unfold`: 5 windows of 8 bytes, 4 bytes apart."""
        assert (0, 24, []) == build.load().normalized(0, 8, [(5, 4)])

    def test_a_gap_between_groups_of_runs(self) -> None:
        """Runs of 2 bytes at 0 and 4, and every 12 bytes again: nothing at 8."""
        assert not build.load().overlap(0, 2, [(3, 12), (2, 4)], 8, 2, [])
        assert build.load().overlap(0, 2, [(3, 12), (2, 4)], 8, 5, [])

    @pytest.mark.parametrize("size", [4096, 1 << 20])
    def test_size_does_not_matter(self, size: int) -> None:
        """Columns of a matrix, also of one too large to look at each of its rows or elements."""
        overlap, row = build.load().overlap, 4 * size

        assert not overlap(0, 4, [(size, row)], 4, 4, [(size, row)])
        assert overlap(0, 4, [(size, row)], 3, 4, [(size, row)])
        # Every third element against every third, shifted by one; and every third against every second.
        assert not overlap(0, 4, [(size, row), (size // 3, 12)], 4, 4, [(size, row), (size // 3, 12)])
        assert overlap(0, 4, [(size, row), (size // 3, 12)], 4, 4, [(size, row), (size // 2, 8)])
        # Rows of another length: the strides meet only after many rows.
        assert not overlap(0, 1, [(size, 2 * row)], 1, 1, [(size, 2 * row - 4)])


@dataclass
class Model:
    """
    The rules once more, another way: operations are nodes of a graph, "ordered" is "there is a path", nothing is ever
    forgotten. Says which access is the first that makes a hazard.
    """

    reaches: list[int] = field(default_factory=list)
    """For each node the set of nodes before it, as bits."""
    latest: dict[int, int] = field(default_factory=dict)
    """For each lane the set of nodes that its next operation comes after."""
    history: dict[int, list[tuple[int, int, str, set[int], int]]] = field(default_factory=dict)
    """For each block: node, lane, kind, bytes, allocation."""
    allocation: dict[int, int] = field(default_factory=dict)
    recorded: dict[int, set[int]] = field(default_factory=dict)
    only_explicit: bool = False
    """A model in which only waits that the program asks for order the work that the host submits."""
    waited: int = 0
    """The set of nodes that the host has asked to wait for."""

    def submitted_after(self) -> int:
        """The set of nodes that whatever the host submits comes after."""
        return self.waited if self.only_explicit else self.latest.get(HOST, 0)

    def submit(self, lane: int) -> int:
        before = self.latest.get(lane, 0) | self.submitted_after()
        node = len(self.reaches)
        self.reaches.append(before)
        self.latest[lane] = before | 1 << node
        return node

    def snapshot(self, lane: int) -> int:
        return self.latest.get(lane, 0) | self.submitted_after()

    def wait(self, lane: int, event: int) -> None:
        self.latest[lane] = self.latest.get(lane, 0) | event
        if lane == HOST:
            self.waited |= event

    def wait_for_a_value(self, lane: int) -> None:
        """The host waits without being asked to."""
        self.latest[HOST] = self.latest.get(HOST, 0) | self.snapshot(lane)

    def record_stream(self, block: int, lane: int) -> None:
        self.recorded.setdefault(block, set()).add(lane)

    def reuse(self, block: int) -> None:
        done = 0
        for lane in self.recorded.pop(block, ()):
            done |= self.snapshot(lane)
        self.history[block] = [entry for entry in self.history.get(block, []) if not done >> entry[0] & 1]
        self.allocation[block] = self.allocation.get(block, 1) + 1

    def racing(self, block: int, kind: str, lane: int, touched: set[int]) -> list[tuple[int, str, int]]:
        """The accesses that the next operation of `lane` would race with: lane, kind, allocation."""
        before = self.snapshot(lane)
        return [
            (other, then, allocation)
            for node, other, then, others, allocation in self.history.get(block, [])
            if other != lane and not before >> node & 1 and "write" in (kind, then) and touched & others
        ]

    def access(self, block: int, kind: str, lane: int, touched: set[int], *, finished: bool = False) -> set[str]:
        """
        The kinds of its races. Which one the checker names depends on what it has dropped: where a write came after a
        read of the same bytes, who races with the read races with the write.
        """
        racing = self.racing(block, kind, lane, touched)
        tenant = self.allocation.get(block, 1)
        if lane != HOST:
            node = self.submit(lane)
            if not finished:
                self.history.setdefault(block, []).append((node, lane, kind, touched, tenant))
        return {self._kind(kind, lane, then, reused=allocation != tenant) for _, then, allocation in racing}

    @staticmethod
    def _kind(kind: str, lane: int, then: str, *, reused: bool) -> str:
        if reused:
            return "reuse_in_flight"
        if lane == HOST:
            return f"host_{kind}_in_flight"
        return "read_after_write" if kind == "read" else f"write_after_{then}"


LANES = st.sampled_from([1, 2, 3])
BLOCKS = st.sampled_from([1, 2])
PIECES = st.sampled_from([(0, 64, []), (0, 32, []), (32, 32, []), (16, 32, []), (0, 4, [(8, 8)]), (4, 4, [(8, 8)])])
KINDS = st.sampled_from(["read", "write"])
#: Most accesses are by operations that wait for what they would race with: programs get longer before the first hazard.
CAREFUL = st.sampled_from([True] * 15 + [False])
STEPS = st.one_of(
    st.tuples(st.just("access"), LANES, KINDS, BLOCKS, PIECES, CAREFUL),
    st.tuples(st.just("access"), LANES, KINDS, BLOCKS, PIECES, CAREFUL),
    st.tuples(st.just("access"), LANES, KINDS, BLOCKS, PIECES, CAREFUL),
    st.tuples(st.just("access"), st.just(HOST), KINDS, BLOCKS, PIECES, CAREFUL),
    st.tuples(st.just("wait_stream"), LANES, LANES),
    st.tuples(st.just("record_event"), LANES),
    st.tuples(st.just("wait_event"), st.sampled_from([0, 1, 2, 3])),
    st.tuples(st.just("record_stream"), BLOCKS, st.sampled_from([2, 3])),
    st.tuples(st.just("reuse"), BLOCKS),
    st.tuples(st.just("item"), LANES, BLOCKS),
)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(st.lists(STEPS, min_size=5, max_size=60), st.booleans())
def test_the_first_hazard_of_any_program_is_the_models(program: list[tuple[Any, ...]], only_explicit: bool) -> None:
    """Entries that are dropped from histories along the way were not needed."""
    m, model = Machine(waits="explicit" if only_explicit else "all"), Model(only_explicit=only_explicit)
    for block in (1, 2):
        assert block == m.allocate(m.a)
    event, event_in_model = m.checker.snapshot(m.a), model.snapshot(m.a)
    for action, *arguments in program:
        match action:
            case "access":
                lane, kind, block, piece, careful = arguments
                if careful:
                    for other in sorted({other for other, *_ in model.racing(block, kind, lane, bytes_of(*piece))}):
                        m.wait_stream(lane, other)
                        model.wait(lane, model.snapshot(other))
                expected = model.access(block, kind, lane, bytes_of(*piece))
                reported = m.run(lane, kind, block, *piece)
                assert reported in expected if expected else reported is None
                if expected:
                    return  # From here on the checker takes the missing wait as made.
            case "item":
                lane, block = arguments
                expected = model.access(block, "read", lane, bytes_of(0, 64, []), finished=True)
                reported = m.item(lane, block)
                assert reported in expected if expected else reported is None
                if expected:
                    return
                model.wait_for_a_value(lane)
            case "wait_stream":
                waiting, waited_for = arguments
                m.wait_stream(waiting, waited_for)
                model.wait(waiting, model.snapshot(waited_for))
            case "record_event":
                event, event_in_model = m.checker.snapshot(arguments[0]), model.snapshot(arguments[0])
            case "wait_event":
                m.checker.wait(arguments[0], event)
                model.wait(arguments[0], event_in_model)
            case "record_stream":
                m.checker.record_stream(*arguments)
                model.record_stream(*arguments)
            case "reuse":
                m.reuse(arguments[0], m.a)
                model.reuse(arguments[0])
