"""Collectives that may overlap computation, with handwritten clocks: lane 0 is the host, 1 computes, 2 communicates."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from fsdp_conformance.checks.overlap import overlaps
from fsdp_conformance.checks.result import CheckResult
from fsdp_conformance.history.collective import Op
from fsdp_conformance.history.overlap import Communicated, Computed, DeviceWork

UNITS = 8
NBYTES = 1000
COMPUTES, COMMUNICATES = 1, 2


class Forward:
    """A forward of UNITS units, each gathered right before it computes; what waits for what is up to the test."""

    phase = "forward"

    def __init__(self) -> None:
        self.work = DeviceWork()

    def collective(
        self, op: Op, *, number: int, computed: int, host: int = 0, order: int, nbytes: int = NBYTES
    ) -> None:
        """One that waits for `computed` operations of the stream that computes; the host knows of `host` of them."""
        self.work.communicated.append(
            Communicated(
                stream=COMMUNICATES,
                number=number,
                after=(0, max(computed, host), number - 1),
                known_to_host=(0, host),
                order=order,
                phase=self.phase,
                step=0,
                op=op,
                nbytes=nbytes,
            )
        )

    def compute(self, number: int, *, communicated: int, order: int, host: int = 0) -> None:
        """A unit that waits for `communicated` collectives; the host knows of `host` of them."""
        self.work.computed.append(
            Computed(
                stream=COMPUTES,
                number=number,
                after=(0, number - 1, max(communicated, host)),
                known_to_host=(0, 0, host),
                order=order,
                phase=self.phase,
                step=0,
            )
        )

    def judged(self) -> CheckResult:
        """The check's result."""
        return overlaps(self.work, rank=0, step=0, num_units=UNITS, requirement="R080")


def forward(*, waiting: Iterable[int] = (), host: bool = False, nbytes: int = NBYTES) -> Forward:
    """Gathers run ahead of computation, except for `waiting`, by number: these wait for the unit before."""
    run = Forward()
    for unit in range(1, UNITS + 1):
        waits = unit in set(waiting)
        communicated = unit - 1 if waits else max(0, unit - 2)
        run.collective(
            Op.ALL_GATHER,
            number=unit,
            computed=communicated,
            host=communicated if host and waits else 0,
            order=2 * unit,
            nbytes=nbytes,
        )
        run.compute(unit, communicated=unit, order=2 * unit + 1)
    return run


def backward(*, held: Iterable[int] = (), host: bool = False) -> Forward:
    """Each unit computes, then its gradients are reduced; the units in `held` wait for the reduction before them."""
    run = Forward()
    run.phase = "backward"
    for unit in range(1, UNITS + 1):
        communicated = unit - 1 if unit in set(held) else max(0, unit - 2)
        run.compute(
            unit, communicated=communicated, order=2 * unit, host=communicated if host and unit in set(held) else 0
        )
        run.collective(Op.REDUCE_SCATTER, number=unit, computed=unit, order=2 * unit + 1)
    return run


def test_gathers_that_run_ahead_overlap_computation() -> None:
    """All of them do except the first, which has nothing before it."""
    result = forward().judged()

    assert [] == result.findings
    assert {"gathers in forward": "88%"} == result.measurements
    assert UNITS == result.count.elements


def test_one_unit_more_may_be_alone() -> None:
    assert [] == forward(waiting=[5]).judged().findings
    assert 1 == len(forward(waiting=[5, 6]).judged().findings)


def test_gathers_that_wait_for_the_unit_before_them() -> None:
    """They behave as if they were on the stream that computes."""
    (finding,) = forward(waiting=range(1, UNITS + 1)).judged().findings

    assert "R080" == finding.requirement
    assert "gathers in forward that can go beside computation: expected at least 75% of their bytes, got 0%" in (
        finding.message
    )
    assert ("forward", 0) == (finding.phase, finding.step)
    assert finding.likely is not None
    assert "wait for the computation before them" in finding.likely


def test_a_host_that_waits_for_the_device() -> None:
    """All that the host issues after a wait comes after the work that it waited for."""
    (finding,) = forward(waiting=range(1, UNITS + 1), host=True).judged().findings
    assert "the host waits for the device in between" == finding.likely

    (finding,) = backward(held=range(1, UNITS + 1), host=True).judged().findings
    assert "the host waits for the device in between" == finding.likely


def test_computation_that_waits_for_reductions() -> None:
    """All reductions wait for their own unit; the next unit must not wait for them."""
    assert [] == backward().judged().findings
    (finding,) = backward(held=range(1, UNITS + 1)).judged().findings

    assert "reductions in backward" in finding.message
    assert "the stream that computes waits for them at once" == finding.likely


def test_each_phase_is_judged_by_itself() -> None:
    """Backward's overlap does not make up for forward's."""
    run, other = forward(waiting=range(1, UNITS + 1)), backward()
    run.work.communicated += other.work.communicated
    run.work.computed += other.work.computed
    result = run.judged()

    assert ["forward"] == [finding.phase for finding in result.findings]
    assert {"gathers in forward": "0%", "reductions in backward": "88%"} == result.measurements


def test_bytes_count_and_flags_do_not() -> None:
    """Small collectives that wait, such as a flag that ranks exchange, do not count as parameters."""
    run = forward()
    for number in range(100, 120):
        run.collective(Op.ALL_GATHER, number=number, computed=UNITS, order=number, nbytes=8)

    assert [] == run.judged().findings


@pytest.mark.parametrize("count", [0, 1, UNITS - 1])
def test_few_buckets_are_no_judgement(count: int) -> None:
    """An engine that sends everything at once has nothing to overlap, and does not pass."""
    run = Forward()
    for number in range(1, count + 1):
        run.collective(Op.ALL_GATHER, number=number, computed=0, order=number)
    result = run.judged()

    assert [] == result.findings
    assert result.inconclusive is not None
    assert f"got {count} gathers in forward" in result.inconclusive


def test_other_steps_do_not_count() -> None:
    """The first step may be different: the engine does not know the order of its units yet."""
    result = overlaps(forward().work, rank=0, step=1, num_units=UNITS, requirement="R080")

    assert result.inconclusive is not None


def test_collectives_without_computation_are_alone() -> None:
    """A model whose units never report that they compute must not pass."""
    run = forward()
    run.work.computed.clear()

    assert 1 == len(run.judged().findings)
