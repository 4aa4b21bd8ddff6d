"""Faults in a test of one's own, without the suite's loop: each strikes, or says what it needs."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils import deterministic

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.faults import delay, failure, late, poison, slow_rank
from fsdp_conformance.faults.delay import CollectiveDelay, FreeDelay, PointDelay, ReductionDelay
from fsdp_conformance.faults.failure import FailingRank, InjectedFailure
from fsdp_conformance.faults.fault import Fault, FaultSet
from fsdp_conformance.faults.late import LateCollectives
from fsdp_conformance.faults.poison import PoisonedMemory
from fsdp_conformance.faults.provocation import Provoked
from fsdp_conformance.faults.recorded import RecordedFault
from fsdp_conformance.faults.slow_rank import SlowRank
from fsdp_conformance.harness.context import log
from fsdp_conformance.harness.recording import process_group
from fsdp_conformance.stress import Failure
from fsdp_conformance.tests.torch_versions import not_on_old

pytestmark = not_on_old

#: Each fault, and the words of what it needs.
FAULTS: dict[type[Fault], tuple[Callable[[Path], Fault], str]] = {
    CollectiveDelay: (lambda _: CollectiveDelay("all_reduce", None, 1), "must issue all_reduce while"),
    ReductionDelay: (lambda _: ReductionDelay(None, 1), "must issue all_reduce, all_to_all, reduce, reduce_scatter"),
    PointDelay: (lambda _: PointDelay("before_step", None, 1), "call backward.* and step"),
    FreeDelay: (lambda _: FreeDelay("0", None, 1), "must run that module"),
    SlowRank: (lambda _: SlowRank(0, random.Random(1)), "so many collectives"),
    PoisonedMemory: (lambda _: PoisonedMemory(), "must resize storages"),
    LateCollectives: (lambda _: LateCollectives(random.Random(1)), "must issue asynchronous collectives"),
    FailingRank: (
        lambda directory: FailingRank(Failure.RAISE, 1, "mine", world_size=1, trace=directory / "trace"),
        "must issue 6 collectives",
    ),
    Provoked: (lambda _: Provoked(1, "mine", rank=0, world_size=1), "must resize storages"),
}
RECORDED = [kind for kind in FAULTS if issubclass(kind, RecordedFault) or kind is Provoked]

by_fault = pytest.mark.parametrize("kind", FAULTS)
by_recorded_fault = pytest.mark.parametrize("kind", RECORDED)


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Makes a default group of this process alone, as a test would; it is destroyed at the end."""

    def make() -> None:
        dist.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1, timeout=timedelta(seconds=30)
        )

    assert not dist.is_initialized()
    yield make
    if dist.is_initialized():
        dist.destroy_process_group()
    log().clear()


def use_everything(fault: Fault) -> None:
    """A training step of a model, with what an engine does around it."""
    model = nn.Sequential(nn.Linear(2, 2))
    fault.prepare(model)
    optimizer = torch.optim.SGD(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    for _ in range(12):
        dist.all_reduce(torch.ones(1), async_op=True).wait()
    torch.ones(4).untyped_storage().resize_(0)
    optimizer.step()


def test_every_fault_is_here() -> None:
    """A fault that is added needs a row of the table."""
    members = [vars(module).values() for module in (delay, failure, late, poison, slow_rank)]
    kinds: set[Any] = {kind for values in members for kind in values if inspect.isclass(kind)}

    assert {
        kind
        for kind in kinds
        if issubclass(kind, Fault)
        and not inspect.isabstract(kind)
        and kind.__module__ != "fsdp_conformance.faults.fault"
    } == FAULTS.keys() - {Provoked}


@by_fault
def test_a_fault_makes_itself_able_to_strike(kind: type[Fault], make_world: Callable[[], None], tmp_path: Path) -> None:
    """Installed before the group, each strikes in a plain training, and is removed without a word or a trace."""
    fault = FAULTS[kind][0](tmp_path)
    plain, backward = dist.distributed_c10d.ProcessGroup, torch.autograd.backward
    fault.install()
    make_world()
    if kind is FailingRank:
        with pytest.raises(InjectedFailure, match="told to raise"):
            use_everything(fault)
    else:
        use_everything(fault)
    fault.remove()

    assert fault.fired > 0
    assert dist.distributed_c10d.ProcessGroup is plain
    assert torch.autograd.backward is backward
    assert log().observers == []


@by_recorded_fault
def test_a_group_that_is_not_recorded(kind: type[Fault], make_world: Callable[[], None], tmp_path: Path) -> None:
    """It is too late to record a group that exists: the fault says so at once, and stays out."""
    make_world()
    fault = FAULTS[kind][0](tmp_path)

    with pytest.raises(ConfigError, match=r"could never strike.*not recorded\. Set record_collectives = True"):
        fault.install()
    assert not fault.installed
    assert log().observers == []


@by_recorded_fault
def test_a_group_that_is_recorded(kind: type[Fault], make_world: Callable[[], None], tmp_path: Path) -> None:
    """As `record_collectives` has it."""
    process_group.register_recording_backend()
    try:
        make_world()
        fault = FAULTS[kind][0](tmp_path)
        with pytest.raises(InjectedFailure) if kind is FailingRank else fault:
            fault.install()
            use_everything(fault)
        fault.remove()
        assert process_group.records_new_groups()
    finally:
        process_group.unregister_recording_backend()

    assert fault.fired > 0


@by_fault
def test_a_fault_that_never_struck(kind: type[Fault], tmp_path: Path) -> None:
    """The end of the block raises, with what the fault needs; an exception of the block goes first."""
    make, need = FAULTS[kind]

    with (
        pytest.raises(ConfigError, match=rf"never struck on rank 0, so the test proves nothing: .*{need}"),
        make(tmp_path),
    ):
        pass
    with pytest.raises(KeyError), make(tmp_path):
        raise KeyError


def test_a_rank_that_the_world_does_not_have(make_world: Callable[[], None]) -> None:
    """If the world is unknown at first, the end says it."""
    fault = CollectiveDelay(None, ranks=[5], milliseconds=1)
    fault.install()
    make_world()
    dist.all_reduce(torch.ones(1))

    with pytest.raises(ConfigError, match=r"ranks must be less than world_size=1, got \[5\]"):
        fault.remove()


@pytest.mark.parametrize("point", ["after_loss", "before_step"])
@pytest.mark.parametrize("is_called", [False, True])
def test_points_of_a_loop(point: str, *, is_called: bool) -> None:
    """Once a step, whether the loop calls `at` or torch's own functions are all there is."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight])
    with PointDelay(point, None, 1) as fault, FaultSet(PointDelay("after_loss", None, 1)) as other:
        for step in range(3):
            loss = weight.sum()
            if is_called:
                fault.at("after_loss", step)
            loss.backward()
            if is_called:
                fault.at("before_step", step)
            optimizer.step()

    assert (fault.fired, other.fired) == (3, 3)


def test_free_delay_without_a_model() -> None:
    """The first forward pass of any module raises, except for those of the phases that are not training."""
    model = nn.Sequential(nn.Linear(2, 2))
    fault = FreeDelay("0", None, 1)
    fault.install()
    with log().phase("setup"):
        model(torch.ones(1, 2))
    with pytest.raises(
        ConfigError, match=r"cannot strike in Sequential: call prepare\(model\) when the model is built"
    ):
        model(torch.ones(1, 2))
    fault.remove(must_have_struck=False)

    model(torch.ones(1, 2))


def test_poison_without_deterministic_algorithms() -> None:
    """torch fills new memory only with them, so they are on meanwhile."""
    before = torch.are_deterministic_algorithms_enabled(), deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(False)
    try:
        with PoisonedMemory():
            assert torch.empty(3).isnan().all()
            torch.ones(4).untyped_storage().resize_(0)
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(before[0])

    assert deterministic.fill_uninitialized_memory is before[1]  # type: ignore[attr-defined]
