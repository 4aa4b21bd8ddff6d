"""The smoke run finds every way in which an adapter at work can break the protocol, and nothing else."""

from __future__ import annotations

import json
import re

import pytest

from fsdp_conformance import codec
from fsdp_conformance.adapters import registry
from fsdp_conformance.driver import smoke as smoke_module
from fsdp_conformance.driver.smoke import CHECKS, SmokeResult, merge, smoke
from fsdp_conformance.errors import AdapterNotFound
from fsdp_conformance.outcome.records import RankExit, RankReport
from fsdp_conformance.tests.adapters import example_adapter, wrong_adapters

pytestmark = pytest.mark.slow

#: Class in wrong_adapters to the check that finds it and what it says.
FINDINGS = {
    "PrefixedNames": ("ADAPTER-03", r"full_params\(\) .* lacks 'body.0.bias', .* has 'module.*wrapper's prefix"),
    "MissingName": ("ADAPTER-03", r"full_params\(\) must have the names .* before wrapping, but lacks 'head.bias'"),
    "ShardsForFull": ("ADAPTER-03", r"must have the full shape \(7, 5\), got \(4, 5\); these are rows 0 to 3"),
    "FlatForFull": ("ADAPTER-03", r"must have the full shape .* got \(6,\); these are elements 0 to 5 of the flat"),
    "DTensorsForFull": ("ADAPTER-03", r"must be a plain tensor, got a DTensor: use full_tensor\(\)"),
    "WrongDtype": ("ADAPTER-03", r"must have dtype torch.float32, got torch.float64"),
    "RequiresGrad": ("ADAPTER-03", r"must be detached, but requires a gradient"),
    "WrongDevice": ("ADAPTER-03", r"must be on the CPU, got meta"),
    "ListForDict": ("ADAPTER-03", r"full_params\(\) must return a dict of names to tensors, got list"),
    "DiffersOnRanks": ("ADAPTER-03", r"full_params\(\) must be equal on all ranks, but differs in 'body.0.bias'"),
    "LiveStorage": ("ADAPTER-03", r"must return clones, but writing into 'body.0.weight'.* changed the model"),
    "StaleWrites": ("ADAPTER-03", r"write_params\(\) did not change 'body.0.weight'"),
    "GradsOfOtherNames": ("ADAPTER-04", r"full_grads\(\) must have .* None for no gradient, but lacks 'body.0.bias'"),
    "LocalGradients": ("ADAPTER-04", r"full_grads\(\) must be equal on all ranks, .* return the reduced gradient"),
    "NoContextManager": ("ADAPTER-04", r"microbatch\(\) must return a context manager, got NoneType"),
    "ForwardWithoutGraph": ("ADAPTER-04", r"forward\(\) must run the model with gradients enabled"),
    "StepStepsNothing": ("ADAPTER-05", r"step\(\) must step the optimizer, but changed no parameter"),
    "StaleOptimizer": ("ADAPTER-05", r"step\(\) must step the optimizer, .* the parameters of the wrapped model\?"),
    "KeepsGradients": ("ADAPTER-05", r"step\(\) must drop the gradients, but kept those of 'body.0.weight'"),
    "ReturnsNorms": ("ADAPTER-05", r"step\(\) must return a scalar tensor or None, got Tensor of shape \(3,\)"),
    "ClonesForLocal": ("ADAPTER-06", r"local_tensors\(\)\['params'\] must return the rank's own storage"),
    "FullForLocal": ("ADAPTER-06", r"local_tensors\(\)\['params'\] must return the rank's own storage"),
    "NoOptimState": ("ADAPTER-06", r"local_tensors\(\) must have 'params' and 'optim', but has no 'optim'"),
    "DTensorsForLocal": ("ADAPTER-06", r"\['params'\] must contain plain tensors, got DTensors: use to_local\(\)"),
    "RaisesInSetup": ("ADAPTER-02", r"wrap\(\) raised KeyError: 'no such unit' \[.*wrong_adapters.py:\d+\]"),
    "RaisesOnOneRank": ("ADAPTER-04", r"full_grads\(\) raised ValueError: rank 1 is different .*\[rank 1\]"),
    "ReturnsNothingFromWrap": ("ADAPTER-02", r"wrap\(\) must return the wrapped nn.Module, got NoneType"),
    "CudaOnly": ("ADAPTER-02", r"cpu_compute must be declared, because the ranks compute on cpu"),
    "TrainsNothing": ("ADAPTER-02", r"module\(\).training after train\(False\): expected False, got True"),
    "PadsFullTensors": ("ADAPTER-03", r"must have the full shape \(7, 5\), got \(8, 5\)"),
    "IgnoresNoSync": ("ADAPTER-07", r"no_sync promises, but .* issued 3 reductions, and the last one 3"),
    "MisspeltFlags": ("ADAPTER-01", r"must contain only flags of capability.py, got 'zero_3'; did you mean 'zero3'"),
}  # fmt: skip


#: Classes of FINDINGS whose problem an engine can cause, too: a run starts with them, and the cases judge.
OF_EITHER = {
    "WrongDtype", "DiffersOnRanks", "StaleWrites", "LocalGradients", "ForwardWithoutGraph", "StepStepsNothing",
    "StaleOptimizer", "KeepsGradients", "ClonesForLocal", "FullForLocal", "RaisesInSetup", "RaisesOnOneRank",
    "CudaOnly", "PadsFullTensors", "IgnoresNoSync",
}  # fmt: skip


def results_of(name: str) -> dict[str, SmokeResult]:
    # Ranks that part wait for each other until the deadline of a collective, 60 % of this.
    timeout_s = 15.0 if name == "RaisesOnOneRank" else 40.0
    return {result.check: result for result in smoke(f"{wrong_adapters.__name__}:{name}", timeout_s=timeout_s)}


@pytest.mark.daily(4)
@pytest.mark.parametrize("spec", [name for name in registry.names() if name.startswith("torch-")])
def test_right_adapters_pass(spec: str) -> None:
    """All checks run, and none finds a problem."""
    results = smoke(spec)

    assert [result.check for result in results] == list(CHECKS)
    assert [(result.problems, result.not_run) for result in results] == [((), "")] * len(CHECKS)


def test_the_example_passes() -> None:
    """An adapter in a file, as a user has it."""
    assert [result.problems for result in smoke(f"{example_adapter.__file__}:MyFSDP")] == [()] * len(CHECKS)


@pytest.mark.daily(8)
@pytest.mark.parametrize("name", FINDINGS)
def test_a_wrong_adapter_is_found(name: str) -> None:
    """The right check says what is wrong, and what was asked for; those before it have nothing to say."""
    check, pattern = FINDINGS[name]

    results = results_of(name)

    assert any(re.search(pattern, problem) for problem in results[check].problems), results[check].problems
    assert [earlier for earlier in CHECKS if earlier < check and results[earlier].problems] == []
    assert bool(results[check].breaches) == (name not in OF_EITHER)
    assert set(results[check].breaches) <= set(results[check].problems)


def test_what_depends_on_a_problem_is_not_run() -> None:
    """Without a setup no further check can run, and the results state it."""
    results = results_of("RaisesInSetup")

    assert [check for check in CHECKS if results[check].not_run] == [
        "ADAPTER-03",
        "ADAPTER-04",
        "ADAPTER-05",
        "ADAPTER-06",
        "ADAPTER-07",
    ]
    assert results["ADAPTER-03"].not_run == "ADAPTER-02 found problems, and the checks after it depend on it"


def test_all_problems_at_once() -> None:
    """Every parameter with a wrong shape is named, not the first alone."""
    assert len(results_of("FlatForFull")["ADAPTER-03"].problems) >= 5


def test_a_rank_that_dies() -> None:
    """Earlier results stay, the death is a problem of the check that was running, and the run ends."""
    results = results_of("DiesInStep")

    assert results["ADAPTER-04"].problems == ()
    assert "rank 1" in results["ADAPTER-05"].problems[0]
    assert results["ADAPTER-06"].not_run == "the ranks had ended"


def test_an_adapter_that_cannot_be_loaded() -> None:
    """This raises an error about the given name instead of returning results."""
    with pytest.raises(AdapterNotFound, match="has no class 'NoSuchAdapter'"):
        smoke(f"{wrong_adapters.__name__}:NoSuchAdapter")


def test_results_are_json_and_ranks_are_merged() -> None:
    """A problem that all ranks have is said once; one that some have says whose it is."""

    def report(rank: int, *problems: str) -> RankReport:
        mine = [
            {"check": check, "title": "", "problems": [], "breaches": [], "not_run": "", "done": True}
            for check in CHECKS
        ]
        mine[2]["problems"] = list(problems)
        return RankReport(rank=rank, measurements={"smoke": mine})

    exits = [RankExit(rank=rank, pid=1, exitcode=0, time=0.0, reported=True) for rank in range(2)]

    merged = merge([report(0, "everywhere", "here"), report(1, "everywhere")], exits)

    assert merged[2].problems == ("everywhere", "here [rank 0]")
    assert json.loads(json.dumps(codec.plain(merged[2])))["problems"] == ["everywhere", "here [rank 0]"]


def test_a_rank_that_never_answers_is_told_with_the_check_and_the_place() -> None:
    """It cannot report what it has checked; the stack that was taken of it can."""
    stack = "\n".join(
        f'  File "{file}", line {line} in {function}'
        for file, line, function in (
            ("/lib/site-packages/acme/build.py", 50, "wait"),
            ("/lib/site-packages/acme/__init__.py", 510, "initialize"),
            ("my_adapter.py", 16, "setup"),
            (smoke_module.__file__, 283, "_begin"),
            (smoke_module.__file__, 265, "_setup"),
            (smoke_module.__file__, 247, "run"),
        )
    )
    exits = [
        RankExit(rank=rank, pid=1, exitcode=None, time=0.0, reported=False, ended_by_controller=True, stack=stack)
        for rank in range(2)
    ]

    merged = merge([None, None], exits)

    assert merged[0].problems == ()
    assert merged[1].problems == (
        "rank 0 did not report in time and was terminated",
        "rank 0 was at /lib/site-packages/acme/build.py:50 in wait",
        "  called at /lib/site-packages/acme/__init__.py:510 in initialize",
        "  called at my_adapter.py:16 in setup",
    )
    assert {result.not_run for result in merged[2:]} == {"the ranks had ended"}


def test_without_a_stack_it_is_the_first_check_as_ever() -> None:
    """Nothing is known of such a rank, so nothing counts as checked."""
    exits = [RankExit(rank=0, pid=1, exitcode=-11, time=0.0, reported=False)]

    merged = merge([None], exits)

    assert merged[0].problems == ("rank 0 was killed by SIGSEGV before it reported",)
