"""Real examples on the warm worker: correct engines, engines that are wrong where axes meet, that lie, die or hang."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_conformance import codec
from fsdp_conformance.adapters import registry
from fsdp_conformance.capability import CAPABILITIES
from fsdp_conformance.errors import AdapterError
from fsdp_conformance.explore.case import run_on
from fsdp_conformance.explore.example import Example, features
from fsdp_conformance.explore.exploration import Budget, Exploration, Explorer
from fsdp_conformance.explore.pool import Outcome, WarmWorker
from fsdp_conformance.fixtures.drawn import DrawnBlock, DrawnModel
from fsdp_conformance.mutants import MUTANTS
from fsdp_conformance.plan import Plan, Sharding
from fsdp_conformance.run_settings import RunOrder, RunSettings
from fsdp_conformance.simulator.device import build
from fsdp_conformance.verdict import Verdict
from fsdp_conformance.workload.definition import Regime
from fsdp_conformance.workload.events import Action, Event, Moment

pytestmark = pytest.mark.slow

_ENGINES = f"{Path(__file__).with_name('engines.py')}"


def _order(implementation: str, **settings: object) -> RunOrder:
    chosen = RunSettings(implementation=implementation, ranks="simulated", **settings)  # type: ignore[arg-type]
    description = registry.describe(implementation)
    return RunOrder(settings=chosen, description=codec.plain(description), device="cpu")


@contextmanager
def _worker(name: str, **settings: object) -> Iterator[WarmWorker]:
    implementation = name if name in registry.names() else f"{_ENGINES}:{name}"
    with WarmWorker(_order(implementation, **settings)) as worker:
        yield worker


def _example(model: DrawnModel | None = None, *, world_size: int = 2, **plan: object) -> Example:
    drawn = model or DrawnModel()
    return Example(
        world_size=world_size,
        model=drawn,
        plan=Plan(units=drawn.units(), **plan),  # type: ignore[arg-type]
        regime=Regime(steps=3, unused_parameters=True),
    )


def _explored(name: str, *, examples: int, failures: int | None = None) -> Exploration:
    implementation = name if name in registry.names() else f"{_ENGINES}:{name}"
    declared = registry.describe(implementation).declared("cpu")
    with _worker(name) as worker:
        budget = Budget(max_examples=examples)
        return Explorer(worker, declared, budget, max_shrinks=25, max_failures=failures).explore()


def test_one_process_runs_many_examples() -> None:
    """Examples pass, are not the same process's first one, and need no new process."""
    with _worker("torch-fsdp2") as worker:
        outcomes = [worker.run(_example(world_size=size)) for size in (1, 2, 3)]
        starts = worker.starts

    assert [outcome.record.verdict for outcome in outcomes if outcome.record] == [Verdict.PASS] * 3
    assert starts == 1
    assert all(outcome.record.comparisons > 50 for outcome in outcomes if outcome.record)


def test_a_correct_engine_has_no_failure() -> None:
    """Examples drawn for it pass, or are refused by it; hardly any cannot be judged."""
    exploration = _explored("reference", examples=8)

    assert [str(failure.signature) for failure in exploration.failures] == []
    assert exploration.passed >= 5


@pytest.mark.nightly
def test_a_correct_engine_has_no_failure_in_many_examples() -> None:
    """The result is the same with two hundred examples."""
    exploration = _explored("reference", examples=200)

    assert [str(failure.signature) for failure in exploration.failures] == []
    assert exploration.passed >= 160


@pytest.mark.nightly
def test_wrong_where_two_axes_meet() -> None:
    """An engine that is wrong only for odd rows in a second micro-batch is found, and shrunk to that."""
    exploration = _explored("OddAndSecond", examples=60, failures=1)

    (failure,) = exploration.failures
    assert failure.signature.requirement in {"R001", "R002", "R003"}
    assert failure.example.regime.micro_batches > 1
    assert any(shape[0] % 2 for shape in failure.example.model.shapes().values() if len(shape) == 2)
    assert len(failure.needs) < len(features(failure.drawn))


def test_an_engine_that_says_it_shards() -> None:
    """Replicated training is at parity; the bytes and the traffic give it away."""
    with _worker("SaysItShards") as worker:
        outcome = worker.run(_example(DrawnModel(width=5, blocks=(DrawnBlock(hidden=7),)), sharding=Sharding.FULL))

    assert outcome.failed
    assert outcome.record is not None
    assert {finding.requirement for finding in outcome.record.findings} & {"R188", "R033", "R035"}


def test_a_crash_is_a_failure_and_the_next_example_runs() -> None:
    """The process of the ranks ends in the third step; the one after it is new."""
    with _worker("DiesInTheThirdStep") as worker:
        crashed = worker.run(_example())
        again = worker.run(Example(regime=Regime(steps=1), plan=Plan(units=("blocks.0",))))

    assert crashed.record is not None
    assert crashed.record.verdict is Verdict.CRASH
    assert again.record is not None
    assert again.record.verdict is Verdict.PASS


def test_waiting_in_vain_is_noticed_at_once() -> None:
    """A collective that only one rank issues ends the example without waiting for a deadline, and the next one runs."""
    drawn = DrawnModel()
    with _worker("WaitsAlone") as worker:
        stuck = worker.run(
            Example(plan=Plan(units=drawn.units()), regime=Regime(micro_batches=2, unused_parameters=True))
        )
        again = worker.run(_example())

    assert stuck.failed
    assert again.record is not None
    assert again.record.verdict is Verdict.PASS


def test_a_refusal_is_no_failure() -> None:
    """A combination that every rank refuses before it trains is counted as refused, with what was said."""
    with _worker("RefusesBiases") as worker:
        outcome = worker.run(_example(DrawnModel(blocks=(DrawnBlock(), DrawnBlock()))))

    assert not outcome.failed
    assert "more than one unit is not offered" in outcome.declined


@pytest.mark.nightly
def test_an_adapter_that_cannot_be_loaded() -> None:
    """The adapter is at fault, and the error quotes Python's message."""
    order = RunOrder(settings=RunSettings(implementation=f"{_ENGINES}:Missing", ranks="simulated"), device="cpu")
    with WarmWorker(order) as worker, pytest.raises(AdapterError, match="Missing"):
        worker.run(_example())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["processes", "simulated"])
def test_the_same_verdict_on_fresh_ranks(kind: str) -> None:
    """An example that fails on the warm worker fails on processes, against all references, and so does a pass."""
    wrong = Example(
        model=DrawnModel(width=3),
        plan=Plan(units=("blocks.0",)),
        regime=Regime(micro_batches=2, steps=2, unused_parameters=True),
    )
    base = RunSettings(ranks=kind)

    assert run_on(wrong, f"{_ENGINES}:OddAndSecond", base=base).verdict is Verdict.FAIL
    assert run_on(wrong, "torch-fsdp2", base=base).verdict is Verdict.PASS


def _save_and_load() -> tuple[Event, ...]:
    return (
        Event(action=Action.SAVE, moment=Moment.END, step=0),
        Event(action=Action.LOAD, moment=Moment.END, step=1),
    )


def _raise(moment: Moment, micro: int = 0) -> tuple[Event, ...]:
    return (Event(action=Action.RAISE, moment=moment, step=1, micro=micro),)


@pytest.mark.parametrize(
    ("name", "events", "requirement"),
    [
        pytest.param("SavingHalvesMomentum", _save_and_load()[:1], "R002", marks=pytest.mark.nightly),
        ("RollbackKeepsMomentum", _save_and_load(), "R002"),
        pytest.param("RecoversLate", _raise(Moment.OPTIMIZER), "R003", marks=pytest.mark.nightly),
        pytest.param("RecoversLate", _raise(Moment.BACKWARD), "R003", marks=pytest.mark.nightly),
        pytest.param("AnotherClass", _raise(Moment.FORWARD, 1), "R160", marks=pytest.mark.nightly),
        pytest.param("GoesOnWithoutException", _raise(Moment.LOSS), "R160", marks=pytest.mark.nightly),
        pytest.param("StaysGathered", _raise(Moment.BACKWARD, 1), "R161", marks=pytest.mark.nightly),
        pytest.param("NeverRecovers", _raise(Moment.FORWARD), "R000", marks=pytest.mark.nightly),
    ],
)
def test_wrong_only_at_an_event(name: str, events: tuple[Event, ...], requirement: str) -> None:
    """Each event exposes an engine that is right without it, under the requirement that names the defect."""
    regime = Regime(steps=3, micro_batches=2, unused_parameters=True)
    plain = replace(_example(), regime=regime)
    with _worker(name) as worker:
        without = worker.run(plain)
        disturbed = worker.run(replace(plain, regime=replace(regime, events=events)))

    assert without.record is not None
    assert without.record.verdict is Verdict.PASS
    assert disturbed.failed
    assert disturbed.record is not None
    assert requirement in {finding.requirement for finding in disturbed.record.findings}


def test_a_correct_engine_passes_at_every_moment_of_these_events() -> None:
    """Checkpoints between any steps, and exceptions anywhere in a step, leave nothing behind."""
    moments = [
        [Event(action=Action.SAVE, moment=Moment.STEP, step=0), Event(action=Action.LOAD, moment=Moment.STEP, step=2)],
        _save_and_load(),
        [*_raise(Moment.FORWARD), *_raise(Moment.LOSS, 1)],
        [*_raise(Moment.BACKWARD), *_raise(Moment.OPTIMIZER)],
    ]
    regime = Regime(steps=3, micro_batches=2, reduced=(False, True), unused_parameters=True)
    model = DrawnModel(blocks=(DrawnBlock(hidden=3, counts=True), DrawnBlock(extras=((5, 1),))))
    with _worker("reference") as worker:
        outcomes = [
            worker.run(replace(_example(model), regime=replace(regime, events=tuple(events)))) for events in moments
        ]

    assert [outcome.record.verdict for outcome in outcomes if outcome.record] == [Verdict.PASS] * 4


def test_a_correct_engine_passes_with_joined_blocks() -> None:
    """Any engine that declares both can be asked to shard a unit of several modules."""
    joined = _example(DrawnModel(blocks=(DrawnBlock(), DrawnBlock()), joined=True))
    with _worker("reference") as worker:
        outcome = worker.run(joined)

    assert outcome.record is not None
    assert outcome.record.verdict is Verdict.PASS


@pytest.mark.nightly
@pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))
def test_the_simulated_accelerator_shows_races() -> None:
    """A correct engine passes on it, and one that frees memory in flight does not, for the race alone."""
    outcomes = []
    for implementation in ("reference", MUTANTS["frees-in-flight"].spec):
        description = registry.describe(implementation)
        settings = RunSettings(implementation=implementation, ranks="simulated", device="sim")
        order = RunOrder(settings=settings, description=codec.plain(description), device="sim")
        with WarmWorker(order) as worker:
            outcomes.append(worker.run(_example()))

    right, wrong = (outcome.record for outcome in outcomes)
    assert right is not None
    assert right.verdict is Verdict.PASS
    assert wrong is not None
    assert wrong.verdict is Verdict.FAIL


def test_nothing_is_left_after_a_worker() -> None:
    """Its processes have ended when it is left."""
    with _worker("torch-ddp") as worker:
        outcome: Outcome = worker.run(_example())
        process = worker._process

    assert outcome.record is not None
    assert outcome.record.verdict is Verdict.PASS
    assert process is not None
    assert process.poll() is not None


def test_every_flag_is_known() -> None:
    """The engines of these tests declare nothing that does not exist."""
    assert registry.describe(f"{_ENGINES}:SaysItShards").declared("cpu") <= set(CAPABILITIES)
