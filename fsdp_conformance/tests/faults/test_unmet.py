"""A delay that never strikes: because the engine has no such collective, or because of a mistake in the suite."""

from __future__ import annotations

import pytest
from torch.distributed import ProcessGroup

from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.contract.case import case_of
from fsdp_conformance.faults.delay import CollectiveDelay, ReductionDelay
from fsdp_conformance.faults.fault import FaultSet
from fsdp_conformance.fixtures import probes
from fsdp_conformance.history.collective import CollectiveRecord, Op
from fsdp_conformance.selftest import BoundCase, bound_case, run_case
from fsdp_conformance.verdict import Verdict


def issued(op: Op, phase: str = "backward") -> CollectiveRecord:
    """A collective of two ranks."""
    return CollectiveRecord(seq=0, op=op, name=op.value, group=(0, 1), nbytes=64, dtype="float32", phase=phase)


class MissesItsCollective(CollectiveDelay):
    """A delay whose plan is wrong: it overlooks the collectives that it is for."""

    def before(self, record: CollectiveRecord, group: ProcessGroup) -> None:
        """Strike nothing."""


class Mistaken(ConformanceTestCase):
    """Not collected: the test below runs it."""

    __test__ = False

    @conformance_case("R073", chapter="H", world_size=2)
    def test_delay(self) -> None:
        """A delay that should have struck did not."""
        workload = probes.exact_mlp()
        run = self.train(workload, faults=[MissesItsCollective(Op.ALL_GATHER, ranks=[1], milliseconds=1)])
        self.check_parity(run, workload)


def test_what_a_silent_delay_lacked() -> None:
    """Nothing of its kind in training, on a rank that it is for; a set asks each of its members."""
    gather, reduction = CollectiveDelay(Op.ALL_GATHER, [0], 1), ReductionDelay(None, 1)
    others = [issued(Op.BROADCAST), issued(Op.ALL_GATHER, "setup"), issued(Op.REDUCE_SCATTER, "observe")]

    assert gather.unmet(0, others) == {gather.describe(): frozenset({Op.ALL_GATHER})}
    assert gather.unmet(1, others) == {}
    assert gather.unmet(0, [*others, issued(Op.ALL_GATHER, "forward")]) == {}
    assert FaultSet(gather, reduction).unmet(0, iter(others)).keys() == {gather.describe(), reduction.describe()}
    assert reduction.unmet(0, [issued(Op.ALL_TO_ALL)]) == {}


@pytest.mark.nightly
@pytest.mark.slow
def test_engine_without_gathers() -> None:
    """DDP gathers nothing: late all-gathers do not apply to it, which is neither a pass nor an error."""
    record = run_case(bound_case("R073/everything-late-default-ws4"), "torch-ddp")

    assert record.verdict is Verdict.UNSUPPORTED, record.reason
    assert "the engine issues no all_gather in training" in record.reason


@pytest.mark.nightly
@pytest.mark.slow
def test_mistake_in_the_plan_of_faults() -> None:
    """FSDP2 gathers, so a delay of all-gathers that never struck is the suite's error."""
    case = case_of(Mistaken.test_delay)
    assert case is not None

    record = run_case(BoundCase(case, Mistaken, "test_delay"), "torch-fsdp2")

    assert record.verdict is Verdict.ERROR_SUITE
    assert "delay of 1 ms before every all_gather on ranks [1] never struck" in record.reason
