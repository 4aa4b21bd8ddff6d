"""Real scenarios on the warm worker: correct engines, and engines that are wrong where axes meet, lie, die or wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fsdp_conformance import codec
from fsdp_conformance.adapters import registry
from fsdp_conformance.capability import CAPABILITIES
from fsdp_conformance.diagnosis.headline import causes_in, headline_of
from fsdp_conformance.errors import AdapterError
from fsdp_conformance.explore.case import run_on
from fsdp_conformance.explore.exploration import Budget, Exploration, Explorer
from fsdp_conformance.explore.pool import Outcome, WarmWorker
from fsdp_conformance.mutants import MUTANTS
from fsdp_conformance.run_settings import RunOrder, RunSettings
from fsdp_conformance.scenarios.axes import PROCESSES_ALONE, SPACE
from fsdp_conformance.scenarios.scenario import Scenario
from fsdp_conformance.simulator.device import build
from fsdp_conformance.verdict import Verdict

pytestmark = pytest.mark.slow

_ENGINES = f"{Path(__file__).with_name('engines.py')}"

#: The plainest scenario with two micro-batches.
TWO_REDUCED = Scenario.of({"accumulation": "two reduced"})


def _order(implementation: str, **settings: object) -> RunOrder:
    chosen = RunSettings(implementation=implementation, ranks="simulated", **settings)  # type: ignore[arg-type]
    description = registry.describe(implementation)
    return RunOrder(settings=chosen, description=codec.plain(description), device="cpu")


@contextmanager
def _worker(name: str, **settings: object) -> Iterator[WarmWorker]:
    mutant = MUTANTS.get(name)
    implementation = mutant.spec if mutant else name if name in registry.names() else f"{_ENGINES}:{name}"
    with WarmWorker(_order(implementation, **settings)) as worker:
        yield worker


def _explored(name: str, *, examples: int, failures: int | None = None) -> Exploration:
    implementation = name if name in registry.names() else f"{_ENGINES}:{name}"
    declared = registry.describe(implementation).declared("cpu")
    with _worker(name) as worker:
        budget = Budget(max_examples=examples)
        return Explorer(worker, declared, budget, max_failures=failures).explore()


def test_one_process_runs_many_scenarios() -> None:
    """Scenarios pass, are not the same process's first one, and need no new process."""
    with _worker("torch-fsdp2") as worker:
        outcomes = [worker.run(Scenario.of({"ranks": ranks})) for ranks in "123"]
        starts = worker.starts

    assert [outcome.record.verdict for outcome in outcomes if outcome.record] == [Verdict.PASS] * 3
    assert starts == 1
    assert all(outcome.record.comparisons > 50 for outcome in outcomes if outcome.record)


@pytest.mark.nightly
def test_a_correct_engine_has_no_failure() -> None:
    """Scenarios drawn for it pass, or are refused by it; hardly any cannot be judged."""
    exploration = _explored("reference", examples=200)

    assert [str(failure.signature) for failure in exploration.failures] == []
    assert exploration.passed >= 160


@pytest.mark.nightly
def test_wrong_where_two_axes_meet() -> None:
    """
    An engine that is wrong only for a new learning rate in accumulation is found, and shrunk to these two.

    A third value may stay that gives the parameters larger gradients.
    """
    exploration = _explored("KeepsTheRateWhenAccumulating", examples=60, failures=1)

    (failure,) = exploration.failures
    assert failure.signature.requirement == "R002"
    assert {feature.partition(": ")[0] for feature in failure.needs} >= {"accumulation", "learning rate"}
    assert len(failure.needs) <= 3


@pytest.mark.nightly
def test_an_engine_that_says_it_shards() -> None:
    """Replicated training is at parity; the bytes and the traffic give it away."""
    with _worker("SaysItShards") as worker:
        outcome = worker.run(Scenario.of({"sharding": "everything", "rows": "uneven"}))

    assert outcome.failed
    assert outcome.record is not None
    assert {finding.requirement for finding in outcome.record.findings} & {"R188", "R033", "R035"}


@pytest.mark.nightly
def test_a_crash_is_a_failure_and_the_next_scenario_runs() -> None:
    """The process of the ranks ends in the third step; the one after it is new."""
    with _worker("DiesWhenAccumulating") as worker:
        crashed = worker.run(TWO_REDUCED)
        again = worker.run(Scenario())

    assert crashed.record is not None
    assert crashed.record.verdict is Verdict.CRASH
    assert again.record is not None
    assert again.record.verdict is Verdict.PASS


@pytest.mark.nightly
def test_waiting_in_vain_is_noticed_at_once() -> None:
    """A collective that only one rank issues ends the scenario without waiting for a deadline; the next one runs."""
    with _worker("WaitsAlone") as worker:
        stuck = worker.run(TWO_REDUCED)
        again = worker.run(Scenario())

    assert stuck.failed
    assert again.record is not None
    assert again.record.verdict is Verdict.PASS


def test_a_refusal_is_no_failure() -> None:
    """A combination that every rank refuses before it trains is counted as refused, with what was said."""
    with _worker("RefusesNesting") as worker:
        outcome = worker.run(Scenario.of({"units": "nested"}))

    assert not outcome.failed
    assert "units inside of units are not offered" in outcome.declined


@pytest.mark.nightly
def test_an_adapter_that_cannot_be_loaded() -> None:
    """The adapter is at fault, and the error quotes Python's message."""
    order = RunOrder(settings=RunSettings(implementation=f"{_ENGINES}:Missing", ranks="simulated"), device="cpu")
    with WarmWorker(order) as worker, pytest.raises(AdapterError, match="Missing"):
        worker.run(Scenario())


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["processes", "simulated"])
def test_the_same_verdict_on_fresh_ranks(kind: str) -> None:
    """A scenario that fails on the warm worker fails on processes, against all references, and so does a pass."""
    wrong = Scenario.of({"rows": "uneven", "accumulation": "two reduced"})
    base = RunSettings(ranks=kind)

    assert run_on(wrong, f"{_ENGINES}:OddAndSecond", base=base).verdict is Verdict.FAIL
    assert run_on(wrong, "torch-fsdp2", base=base).verdict is Verdict.PASS


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("name", "axis", "value", "requirement"),
    [
        pytest.param("SavingHalvesMomentum", "checkpoints", "saved", "R002", marks=pytest.mark.nightly),
        ("RollbackKeepsMomentum", "checkpoints", "loaded later", "R002"),
        pytest.param("RollbackKeepsMomentum", "checkpoints", "second one loaded", "R002", marks=pytest.mark.nightly),
        pytest.param("RecoversLate", "exception", "before the optimizer", "R003", marks=pytest.mark.nightly),
        pytest.param("AnotherClass", "exception", "in forward", "R160", marks=pytest.mark.nightly),
        pytest.param("GoesOnWithoutException", "exception", "in backward", "R160", marks=pytest.mark.nightly),
        pytest.param("StaysGathered", "exception", "before the optimizer", "R161", marks=pytest.mark.nightly),
        pytest.param("EvaluationLeavesAUnitGathered", "evaluation", "before steps", "R034", marks=pytest.mark.nightly),
        ("KeepsAUnitThatReturnsViews", "outputs", "views", "R034"),
        ("DrawsInForward", "dropout", "in each block", "R189"),
        ("SavingDraws", "checkpoints", "saved", "R189"),
        ("ReducesInBfloat16", "precision", "bfloat16, reduced in float32", "R084"),
        ("SeedsWhenWrapping", "dropout", "in each block", "R189"),
        ("ConvertsToTheFirstDtype", "dtypes", "one for each unit", "R001"),
        ("ReducesInTheSmallestDtype", "dtypes", "one for each unit", "R003"),
        pytest.param("ReducesInTheSmallestDtype", "dtypes", "two in a unit", "R003", marks=pytest.mark.nightly),
        ("CopiesInputs", "inputs", "filled by units", "R157"),
        ("KeepsEvaluations", "evaluation", "before steps", "R039"),
        ("StepsItsOwnCopy", "written by the user", "parameters in place", "R002"),
        pytest.param("ClippingLeavesZeros", "clipping", "never reached", "R040", marks=pytest.mark.nightly),
        pytest.param("NeverRecovers", "exception", "in forward", "R000", marks=pytest.mark.nightly),
        pytest.param("KnowsItsOwnBackwardOnly", "derivatives", "of outputs", "R003", marks=pytest.mark.nightly),
        pytest.param(
            "KnowsItsOwnBackwardOnly", "derivatives", "of inputs before a step", "R157", marks=pytest.mark.nightly
        ),
        pytest.param(
            "KnowsItsOwnBackwardOnly", "derivatives", "of inputs after a backward", "R157", marks=pytest.mark.nightly
        ),
        pytest.param("HalvesGradientsOfInputs", "input gradients", "of a leaf", "R157", marks=pytest.mark.nightly),
        pytest.param("StepsWithWhatBackwardLeft", "clipping by the user", "values", "R002", marks=pytest.mark.nightly),
        pytest.param(
            "ClipsSomeByTheirShards", "clipping by the user", "norm of some", "R002", marks=pytest.mark.nightly
        ),
        pytest.param("AnyNormIsTheSecond", "clipping", "1-norm", "R101", marks=pytest.mark.nightly),
        pytest.param("LoadsOneParameterWrongly", "state dicts", "full", "R002", marks=pytest.mark.nightly),
        pytest.param("LoadsOneParameterWrongly", "state dicts", "sharded", "R002", marks=pytest.mark.nightly),
        pytest.param("LoadsNoOptimizerState", "state dicts", "of the optimizer", "R002", marks=pytest.mark.nightly),
        pytest.param("IsCast", "moved", "to another dtype and back", "R003", marks=pytest.mark.nightly),
        pytest.param("IsMoved", "moved", "to its device", "R003", marks=pytest.mark.nightly),
        pytest.param("IsMoved", "moved", "to its dtype", "R003", marks=pytest.mark.nightly),
        pytest.param("LooksAtItsOwnGradients", "overflow", "on one rank", "R105", marks=pytest.mark.nightly),
        pytest.param(
            "EvaluatingDropsGradients",
            "evaluation in accumulation",
            "between micro-batches",
            "R003",
            marks=pytest.mark.nightly,
        ),
        pytest.param("StepsCopiesOfGradients", "clearing", "by hand", "R002", marks=pytest.mark.nightly),
        pytest.param("ClearsAnyway", "clearing", "not after the first step", "R003", marks=pytest.mark.nightly),
        pytest.param(
            "ForgetsAttributes", "attributes of parameters", "set before wrapping", "R189", marks=pytest.mark.nightly
        ),
        pytest.param("ReturnsPlainContainers", "types of outputs", "named tuple", "R157", marks=pytest.mark.nightly),
        pytest.param("ReturnsPlainContainers", "types of outputs", "ordered dict", "R157", marks=pytest.mark.nightly),
        pytest.param("ReturnsPlainContainers", "types of outputs", "model output", "R157", marks=pytest.mark.nightly),
        pytest.param("AveragesWhatItIgnores", "ignored", "a trained module", "R003", marks=pytest.mark.nightly),
        pytest.param("EmptiesWhatItIgnores", "ignored", "a frozen module", "R002", marks=pytest.mark.nightly),
        pytest.param("DropsHooks", "hooks of modules", "before forward", "R003", marks=pytest.mark.nightly),
        pytest.param("DropsHooks", "hooks of modules", "after forward", "R157", marks=pytest.mark.nightly),
        pytest.param("DropsHooks", "hooks of modules", "in backward", "R003", marks=pytest.mark.nightly),
        pytest.param("AveragesAnyway", "gradients divided by", "one", "R003", marks=pytest.mark.nightly),
        pytest.param("KnowsTheLastModel", "second model", "trained in between", "R003", marks=pytest.mark.nightly),
        ("LoadsIntoNothing", "resumed", "by a new engine", "R002"),
        pytest.param("LoadsIntoNothing", "resumed", "in other units", "R002", marks=pytest.mark.nightly),
        pytest.param("reference-ignores-the-hook", "communication hook", "sum", "R003", marks=pytest.mark.nightly),
        pytest.param(
            "reference-stays-whole", "full-parameter context", "values read", "R048", marks=pytest.mark.nightly
        ),
        pytest.param(
            "reference-loses-writes-of-one-rank",
            "full-parameter context",
            "parameters written",
            "R002",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "reference-loses-written-gradients",
            "full-parameter context",
            "gradients written",
            "R002",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "ReducesInTrainingMode",
            "trains in",
            "evaluation mode, from the second step",
            "R003",
            marks=pytest.mark.nightly,
        ),
        pytest.param("ReusesItsOutputs", "evaluation", "before steps", "R010", marks=pytest.mark.nightly),
        pytest.param("ReusesItsStateDicts", "state dicts", "full", "R150", marks=pytest.mark.nightly),
        pytest.param("CallsTheLastHook", "update", "in backward", "R142", marks=pytest.mark.nightly),
    ],
)
def test_wrong_only_with_one_value(name: str, axis: str, value: str, requirement: str) -> None:
    """Each value exposes an engine that is right without it, under the requirement that names the defect."""
    with _worker(name) as worker:
        without = worker.run(TWO_REDUCED)
        # Some values cannot be together with two micro-batches.
        choice = SPACE.completed({**dict(TWO_REDUCED.values), axis: value}) or SPACE.completed({axis: value})
        assert choice is not None
        disturbed = worker.run(Scenario.of(choice))

    assert without.record is not None
    assert without.record.verdict is Verdict.PASS
    assert disturbed.failed
    assert disturbed.record is not None
    assert requirement in {finding.requirement for finding in disturbed.record.findings}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "values", "cause"),
    [
        (
            "RoundsWhenEvaluating",
            {"precision": "bfloat16", "evaluation": "before steps"},
            "rounded to bfloat16",
        ),
        (
            "ClipsTheFirstModel",
            {"second model": "trained in between", "clipping": "2-norm"},
            "the gradient was not clipped",
        ),
        ("GathersFromAllRanks", {"ranks": "4", "resharding": "to a smaller group"}, "the requested group is not used"),
        (
            "StepsItsOwnCopy",
            {"written by the user": "parameters in place"},
            "a write of the user was lost",
        ),
        (
            "AveragesAnyway",
            {"gradients divided by": "one"},
            "averaged instead of summed",
        ),
        (
            "ReducesInTheSmallestDtype",
            {"dtypes": "one for each unit"},
            "rounded to float32",
        ),
        (
            "AccumulatesInTheComputeDtype",
            {"precision": "bfloat16, reduced in float32", "accumulation": "two, first deferred"},
            "accumulated in bfloat16",
        ),
    ],
)
def test_the_cause_of_what_values_show(name: str, values: dict[str, str], cause: str) -> None:
    """Two values that pass alone fail together, and the report says why."""
    # A smaller group needs four ranks.
    is_pair = len(values) > 1 and "ranks" not in values
    with _worker(name) as worker:
        alone = [worker.run(Scenario.of({axis: value})) for axis, value in values.items()] if is_pair else []
        both = worker.run(Scenario.of(values))

    assert [outcome.record.verdict for outcome in alone if outcome.record] == [Verdict.PASS] * len(alone)
    assert both.record is not None
    headline = headline_of(both.record)
    assert headline is not None
    assert causes_in(headline.likely) == (cause,)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "requirement", "message"),
    [
        ("KeepsItsInputs", "R039", "bytes held after a step: expected at most "),
        ("SwitchesDeterminism", "R189", "deterministic algorithms: expected 0, got 1; wrapping must not change it"),
    ],
)
def test_wrong_with_a_process_for_each_rank(name: str, requirement: str, message: str) -> None:
    """Of ranks that share a process, it cannot be told which holds or changes what."""
    record = run_on(Scenario(), f"{_ENGINES}:{name}", base=RunSettings(device="cpu"))

    assert [finding.requirement for finding in record.findings] == [requirement]
    assert record.findings[0].message.startswith(message)


@pytest.mark.nightly
@pytest.mark.parametrize("axis", ["checkpoints", "exception"])
def test_a_correct_engine_passes_at_every_moment_of_these_events(axis: str) -> None:
    """Checkpoints between any steps, and exceptions anywhere in a step, leave nothing behind."""
    others = {"accumulation": "two, first deferred", "buffers": "counter", "other shapes": "several dims"}
    names = [value.name for value in SPACE.by_name[axis].values if not value.needs & PROCESSES_ALONE]
    with _worker("reference") as worker:
        outcomes = [worker.run(Scenario.of({**others, axis: name})) for name in names]

    assert [outcome.record.verdict for outcome in outcomes if outcome.record] == [Verdict.PASS] * len(names)


@pytest.mark.nightly
def test_a_correct_engine_passes_with_joined_blocks() -> None:
    """Any engine that declares it can be asked to shard a unit of several modules."""
    with _worker("reference") as worker:
        outcome = worker.run(Scenario.of({"units": "two blocks as one"}))

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
            outcomes.append(worker.run(Scenario()))

    right, wrong = (outcome.record for outcome in outcomes)
    assert right is not None
    assert right.verdict is Verdict.PASS
    assert wrong is not None
    assert wrong.verdict is Verdict.FAIL


def test_nothing_is_left_after_a_worker() -> None:
    """Its processes have ended when it is left."""
    with _worker("torch-ddp") as worker:
        outcome: Outcome = worker.run(Scenario())
        process = worker._process

    assert outcome.record is not None
    assert outcome.record.verdict is Verdict.PASS
    assert process is not None
    assert process.poll() is not None


def test_every_flag_is_known() -> None:
    """The engines of these tests declare nothing that does not exist."""
    assert registry.describe(f"{_ENGINES}:SaysItShards").declared("cpu") <= set(CAPABILITIES)
