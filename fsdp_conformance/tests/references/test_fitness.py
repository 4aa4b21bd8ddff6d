"""A user's workload is examined as a whole: each problem has its message, and all are reported at once."""

from __future__ import annotations

import re

import pytest

from fsdp_conformance.contract.case import OF_WORKLOAD
from fsdp_conformance.references.fitness import fitness_of
from fsdp_conformance.tests.references import unfit_workloads


def _spec(name: str) -> str:
    return f"{unfit_workloads.__name__}:{name}"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "has"),
    [
        ("right", {"own_adam", "own_float32", "own_units", "own_workload"}),
        ("exact", {"own_adam", "own_exact", "own_float32", "own_units", "own_workload"}),
        ("part_frozen", {"own_adam", "own_float32", "own_frozen", "own_units", "own_workload"}),
    ],
)
def test_a_fit_workload_has_no_problem(name: str, has: set[str]) -> None:
    """And it is known what cases can ask of it."""
    fitness = fitness_of(_spec(name))

    assert fitness.problems == ()
    assert set(fitness.has) == has
    assert has <= OF_WORKLOAD.keys()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("equal_on_all_ranks", r"the batch must depend on the rank"),
        ("another_model_each_time", r"build must be a pure function, but build\(0\) gives different values"),
        ("the_same_object_each_time", r"build must return a new model each time"),
        ("dropout", r"the loss, .* differs with torch's random numbers: set dropout to 0"),
        ("loss_per_sample", r"must be a scalar in floating point, got torch.float32 of shape \(4,\)"),
        ("loss_detached", r"must depend on the parameters, got a tensor without a gradient: was it detached\?"),
        ("loss_is_a_number", r"loss\(output, batch\) must return a Tensor, got float"),
        ("parameter_without_gradient", r"must get a gradient, but idle.weight, idle.bias did not"),
        ("batch_is_a_tuple", r"batch\(BatchKey\(step=0\)\) must return a Batch, got tuple"),
        ("batch_does_not_fit", r"the forward of the model with batch.args and batch.kwargs raised RuntimeError: mat1"),
        ("unit_does_not_exist", r"units must name submodules of NestedWrappedModule, got 'modul.1'"),
        (
            "not_in_float64",
            r"must train in float64, too, but with 'sgd' it raised RuntimeError: mat1 and mat2 must have",
        ),
        (
            "too_noisy",
            r"with 'sgd' on 2 ranks: .* expected noise of at most 0.0005 of its scale, got .* A fault could hide",
        ),
        ("no_optimizer", r"optimizers must name at least one"),
        ("optimizer_raises", r"the optimizer 'sgd' raised ValueError: Invalid learning rate: -1.0"),
    ],
)
def test_a_problem_is_named(name: str, message: str) -> None:
    """A sentence says what is wrong, and what was expected."""
    fitness = fitness_of(_spec(name))

    assert [problem for problem in fitness.problems if re.search(message, problem)] != [], fitness.problems
    assert fitness.has == ()


def test_all_problems_are_reported_at_once() -> None:
    """The user corrects them in one go."""
    problems = "\n".join(fitness_of(_spec("several")).problems)

    for message in ("got 'there.is.none'", "build must be a pure function", "the batch must depend on the rank"):
        assert message in problems
