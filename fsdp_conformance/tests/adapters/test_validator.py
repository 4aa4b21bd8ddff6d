"""The validator finds what a class shows by itself, all of it at once, and nothing in right adapters."""

from __future__ import annotations

import re

import pytest

from fsdp_conformance.adapters import registry
from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.adapters.validator import demand_valid, validate
from fsdp_conformance.errors import AdapterError
from fsdp_conformance.mutants import MUTANTS
from fsdp_conformance.tests.adapters import wrong_adapters as wrong
from fsdp_conformance.tests.adapters.example_adapter import MyFSDP


def test_right_adapters_have_no_problems() -> None:
    """The bundled ones, the example, and the known-wrong implementations: their adapters are right."""
    specs = [*registry.names(), *(mutant.spec for mutant in MUTANTS.values())]

    assert {spec: problems for spec in specs if (problems := validate(registry.load(spec)))} == {}
    assert validate(MyFSDP) == []
    demand_valid(MyFSDP)


@pytest.mark.parametrize(
    ("adapter", "expected"),
    [
        (
            wrong.MisspeltFlags,
            ["names 'full_grad', but .* did you mean 'full_grads'", "names 'zero_3', but .* did you mean 'zero3'"],
        ),
        (
            wrong.WrongVariables,
            [
                "name=None, but should be a str",
                "capabilities='zero3', but should be a frozenset of flags",
                "declines_on={'cpu': 'zero3'}, but should be a dict",
                "environment={'THREADS': 1}, but should be a dict of str to str",
                "shims='a shim', but should be a tuple",
                "padding=-0.5, but should be a number, at least 0",
                """grad_reduction_of_accumulation='later', but should be "local" or "reduced\"""",
            ],
        ),
        (
            wrong.DeclaresWithoutMethod,
            [
                r"declares 'full_grads', but should then write full_grads\(\)",
                r"does not write backward\(\)",
                r"does not write full_params\(\)",
                r"does not write local_tensors\(\)",
                r"does not write setup\(\)",
                r"does not write step\(\)",
            ],
        ),
        (
            wrong.WrongSignatures,
            [
                r"setup\(self, model.*but should take the call setup\(\.\.\., \.\.\., \.\.\.\): too many positional",
                r"microbatch\(self, last.*but should take the call microbatch\(\.\.\., reduced=True\)",
                r"forward\(self, x.*mask",
                r"step\(self\).*but should take the call step\(max_norm=1.0\)",
                r"full_params is a property, but should be a method",
                r"local_tensors is async, but should be a plain method \[.*wrong_adapters.py:\d+\]",
            ],
        ),
        (wrong.GeneratorMicroBatch, ["microbatch is a generator, .* decorate it with contextlib.contextmanager"]),
        (
            wrong.MisspeltMethods,
            [
                r"full_gradients\(\) is never called; if it is the protocol's full_grads\(\), rename it",
                r"micro_batch\(\) is never called; if it is the protocol's microbatch\(\), rename it",
                r"unit_is_unshard\(\) is never called; if it is the protocol's unit_is_unsharded\(\), rename it",
            ],
        ),
    ],
)
def test_problems_of_a_class(adapter: type[Adapter], expected: list[str]) -> None:
    """Each is one sentence with what was found, what should be, and where."""
    problems = validate(adapter)

    assert len(problems) == len(expected), problems
    for pattern in expected:
        assert any(re.search(pattern, problem) or pattern in problem for problem in problems), (pattern, problems)
    assert all(problem.startswith(adapter.__name__) for problem in problems)


def test_all_problems_in_one_error() -> None:
    """ERROR_ADAPTER carries every one of them."""
    with pytest.raises(AdapterError) as caught:
        demand_valid(wrong.WrongVariables)

    assert len(caught.value.problems) == 7
