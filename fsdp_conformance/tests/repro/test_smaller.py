"""Definitions become smaller, and compute the same."""

from __future__ import annotations

import ast

import pytest
import torch

from fsdp_conformance.repro.capture import capture
from fsdp_conformance.repro.script import script
from fsdp_conformance.repro.smaller import applied, smaller
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.selftest.cases import bound_cases
from fsdp_conformance.workload.definition import BatchKey

_LAYERS = """
class Layer(nn.Module):
    def __init__(self, width, inner=None, mode="plain"):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.mode = mode
        self.inner = inner
    def forward(self, x):
        if self.mode == "twice":
            return self.linear(self.linear(x))
        y = self.linear(x)
        return y if self.inner is None else self.inner(y)
"""


def _text(*definitions: str, root: str) -> str:
    return "\n\n".join(smaller(definitions, [root], {"halved": lambda value: value / 2}))


@pytest.mark.parametrize(
    ("definition", "root", "expected"),
    [
        ("LIMIT = -2.0", "def root(x):\n    return x.clamp(LIMIT)", "return x.clamp(-2.0)"),
        ("def halved(x): ...", "def root(x):\n    return x + halved(5)", "return x + 2.5"),
        ("def place(key):\n    return (key.step, key.rank)",
         "def root(rank):\n    return draw(place(BatchKey(step=1, rank=rank)))", "return draw((1, rank))"),
        ("def scaled(x, *key, by=2.0):\n    y = draw(x, 'scaled', *key)\n    return y * by",
         "def root(x):\n    return scaled(x, 3)", "y = draw(x, 'scaled', 3)\n    return y * 2.0"),
        ("def batch(key, *, size):\n    return draw(size, key)",
         "def root(key):\n    return partial(batch, size=3)(key)", "return draw(3, key)"),
        ("def twice(x):\n    return x + x",
         "def root(model, y):\n    return twice(model(y))", "x = model(y)\n    return x + x"),
        ("def filled(model):\n    for each in model:\n        fill(each)\n    return model",
         "def root():\n    return filled(Model())",
         "model = Model()\n    for each in model:\n        fill(each)\n    return model"),
    ],
    ids=["constant", "known result", "fields", "unpacked", "partial", "used twice", "body"],
)  # fmt: skip
def test_a_definition_that_is_needed_once_is_where_it_is_needed(definition: str, root: str, expected: str) -> None:
    """With its arguments, each of which is computed once."""
    name = root.partition(":")[0]

    assert _text(definition, root=root) == f"{name}:\n    {expected}"


def test_a_class_has_no_branches_for_other_cases() -> None:
    """An attribute that is always the same is a literal, and what only another value would reach is left out."""
    text = _text(_LAYERS, root="def root():\n    return nn.Sequential(Layer(3), Layer(5))")

    assert "mode" not in text
    assert "inner" not in text
    assert "def __init__(self, width):" in text


def test_what_differs_between_calls_stays() -> None:
    """Also if the name is used in another way than by a call."""
    text = _text(
        _LAYERS, root="def root():\n    return [Layer(3, Layer(3)), Layer(5, mode='twice'), *map(Layer, SIZES)]"
    )

    assert ast.unparse(ast.parse(text.partition("def root")[0])) == ast.unparse(ast.parse(_LAYERS))


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("loss_of(model(x), batch)", "(model(x) * batch.target).sum()"),
        ("other(model(x), batch)", "other(model(x), batch)"),
    ],
    ids=["once", "would be computed twice"],
)  # fmt: skip
def test_an_expression_stands_for_a_call(call: str, expected: str) -> None:
    """If the arguments are still computed once."""
    definitions = [
        "def loss_of(output, batch):\n    return (output * batch.target).sum()",
        "def other(output, batch):\n    return output * output",
    ]

    assert applied(call, definitions) == expected


#: Models of several kinds: nested units, checkpoints, tied weights, ranks of an odd number, half precision.
_CASES = (
    "R001/exact-probe-ws3", "R008/world-size-ws3", "R010/eval-between-backward-and-step-ws2",
    "R103/empty-shards-inf-ws4", "R108/checkpointed-deferred-ws2", "R119/branches-of-one-unit-ws2",
    "R134/changes-nothing-inside-reentrant-ws2",
)  # fmt: skip


@pytest.mark.nightly
def test_a_script_has_the_model_and_the_batches_of_the_case() -> None:
    """Outputs and gradients are equal, bit for bit."""
    chosen, compared = RunSettings(implementation="torch-fsdp2"), set()
    for bound in bound_cases():
        if bound.case.id not in _CASES:
            continue
        training = capture(bound, chosen).trainings[0]
        workload, several = training.workload, training.regime.micro_batches > 1
        alone: dict[str, object] = {"__name__": "alone"}
        exec(script(bound, chosen, name="shown.py").partition("# The engine")[0], alone)
        make_model, make_batch = alone["make_model"], alone["make_batch"]
        ours, theirs = make_model(), workload.build(0)  # type: ignore[operator]
        for rank in range(bound.case.world_size):
            mine = make_batch(*((1, 0, rank) if several else (1, rank)))  # type: ignore[operator]
            other = workload.batch(BatchKey(step=1, rank=rank, world_size=bound.case.world_size))
            torch.testing.assert_close((mine.args, mine.target), (other.args, other.target), rtol=0, atol=0)
            for model, batch in ((ours, mine), (theirs, other)):
                (model(*batch.args) * batch.target).sum().backward()
        gradients = [{name: each.grad for name, each in model.named_parameters()} for model in (ours, theirs)]
        torch.testing.assert_close(*gradients, rtol=0, atol=0)
        compared.add(bound.case.id)

    assert compared == set(_CASES)
