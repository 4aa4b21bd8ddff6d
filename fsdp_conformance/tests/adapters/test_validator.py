"""The validator finds what a class shows by itself, all of it at once, and nothing in right adapters."""

from __future__ import annotations

import re

import pytest

from fsdp_conformance.adapters import registry
from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.adapters.validator import validate
from fsdp_conformance.mutants import MUTANTS
from fsdp_conformance.tests.adapters import wrong_adapters as wrong
from fsdp_conformance.tests.adapters.example_adapter import MyFSDP


@pytest.mark.nightly
@pytest.mark.slow
def test_right_adapters_have_no_problems() -> None:
    """The bundled ones, the example, and the known-wrong implementations: their adapters are right."""
    specs = [*registry.names(), *(mutant.spec for mutant in MUTANTS.values())]

    assert {spec: problems for spec in specs if (problems := validate(registry.load(spec)))} == {}
    assert validate(MyFSDP) == []


@pytest.mark.parametrize(
    ("adapter", "expected"),
    [
        (
            wrong.MisspeltFlags,
            [
                "must contain only flags .*, got 'full_grad'; did you mean 'full_grads'",
                "must contain only flags .*, got 'zero_3'; did you mean 'zero3'",
            ],
        ),
        (
            wrong.WrongVariables,
            [
                "name must be a str, got None",
                "capabilities must be a frozenset of flags, got 'zero3'",
                "declines_on must be a dict of device types to frozensets of flags, got {'cpu': 'zero3'}",
                "environment must be a dict of str to str, got {'THREADS': 1}",
                "shims must be a tuple of sentences, got 'a shim'",
                "padding must be a number from 0 to 0.25, got -0.5",
                """grad_reduction_of_accumulation must be "local" or "reduced", got 'later'""",
            ],
        ),
        (
            wrong.DeclaresWithoutMethod,
            [
                r"declares 'full_grads', so it must implement full_grads\(\)",
                r"does not implement backward\(\)",
                r"does not implement full_params\(\)",
                r"does not implement local_tensors\(\)",
                r"does not implement setup\(\)",
                r"does not implement step\(\)",
            ],
        ),
        (
            wrong.WrongSignatures,
            [
                r"setup\(self, model.*must accept the call setup\(\.\.\., \.\.\., \.\.\.\): too many positional",
                r"microbatch\(self, last.*must accept the call microbatch\(\.\.\., reduced=True\)",
                r"forward\(self, x.*mask",
                r"step\(self\).*must accept the call step\(max_norm=1.0\)",
                r"full_params must be a method, got a property",
                r"local_tensors must be a plain method, but is async \[.*wrong_adapters.py:\d+\]",
            ],
        ),
        (
            wrong.GeneratorMicroBatch,
            ["microbatch must be a plain method, but is a generator; decorate it with contextlib.contextmanager"],
        ),
        (
            wrong.MisspeltMethods,
            [
                r"full_gradients\(\) is never called; if it implements full_grads\(\), rename it",
                r"micro_batch\(\) is never called; if it implements microbatch\(\), rename it",
                r"unit_is_unshard\(\) is never called; if it implements unit_is_unsharded\(\), rename it",
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
