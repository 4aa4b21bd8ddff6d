"""Tests for the base class: declarations, refusals, and how short an adapter can be."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest
from torch import Tensor, nn

from fsdp_conformance.adapters import registry
from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.adapters.torch_like import TorchAdapter
from fsdp_conformance.capability import unknown
from fsdp_conformance.errors import Unsupported
from fsdp_conformance.plan import Offload, Plan, Sharding
from fsdp_conformance.tests.adapters import example_adapter
from fsdp_conformance.tests.adapters.adapter_ranks import RankTestCase
from fsdp_conformance.tests.adapters.adapter_workloads import RICH
from fsdp_conformance.tests.adapters.wrong_adapters import Bare
from fsdp_conformance.workload.definition import Regime

#: What the project promises.
MAX_LINES = 25


class WithGrads(Bare):
    """An optional method more."""

    capabilities: ClassVar[frozenset[str]] = frozenset({"hsdp"})

    def full_grads(self) -> dict[str, Tensor | None]:
        return {}


class WithoutGrads(WithGrads):
    """Takes back what it inherits."""

    declines: ClassVar[frozenset[str]] = frozenset({"full_grads", "zero3"})


class AgainWithGrads(WithoutGrads):
    """A subclass that restores what its base took away."""

    def full_grads(self) -> dict[str, Tensor | None]:
        return {}


class OwnHook(Bare):
    """A base class for other adapters, with its own hook."""

    optional: ClassVar[Mapping[str, str]] = {"spread": "unused_divergent"}

    def spread(self) -> None:
        raise NotImplementedError


class UsesHook(OwnHook):
    """Overrides it."""

    def spread(self) -> None: ...


@pytest.mark.parametrize(
    ("adapter", "expected"),
    [
        (Bare, {"zero3", "cpu_compute"}),
        (WithGrads, {"zero3", "cpu_compute", "hsdp", "full_grads"}),
        (WithoutGrads, {"cpu_compute", "hsdp"}),
        (AgainWithGrads, {"cpu_compute", "hsdp", "full_grads"}),
        (OwnHook, {"zero3", "cpu_compute"}),
        (UsesHook, {"zero3", "cpu_compute", "unused_divergent"}),
    ],
)
def test_declared(adapter: type[Adapter], expected: set[str]) -> None:
    """Each class of the line adds its flags and methods, then takes away what it declines."""
    assert adapter.declared() == expected


def test_torch_adapter_declares_what_it_writes() -> None:
    """The base class for torch-like engines offers reading and writing; deferring is declared by writing `no_sync`."""
    declared = TorchAdapter.declared()

    assert {"full_grads", "full_buffers", "full_optim_state", "write_params", "cpu_compute", "wrap_again"} <= declared
    assert "no_sync" not in declared
    assert "no_sync" in example_adapter.MyFSDP.declared()


def test_every_flag_of_a_bundled_adapter_is_one() -> None:
    """Bundled adapters declare only flags that capability.py defines."""
    assert {name: unknown(registry.load(name).declared()) for name in registry.names() if "deepspeed" not in name} == {
        name: [] for name in registry.names() if "deepspeed" not in name
    }


def test_the_version_is_that_of_the_package() -> None:
    """An adapter names the distribution, and reports give its installed version; without one, they give none."""

    class OfPytest(TorchAdapter):
        package = "pytest"

        def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
            return model

    class Unnamed(OfPytest):
        package = ""

    assert OfPytest.version() == pytest.__version__
    assert Unnamed.version() == ""


def test_undeclared_flags_are_refused() -> None:
    """All of them are named, and the first is the error's capability."""
    with pytest.raises(Unsupported, match="cpu_offload_params, hsdp, but Bare does not declare them") as caught:
        Bare.refuse_undeclared(Plan(sharding=Sharding.HYBRID, offload=Offload.CPU))

    assert caught.value.capability == "cpu_offload_params"
    Bare.refuse_undeclared(Plan(sharding=Sharding.FULL))


def test_optional_methods_say_that_they_are_missing() -> None:
    """An optional method that is not implemented raises."""
    adapter = Bare()
    for call in (
        adapter.full_grads,
        adapter.full_buffers,
        adapter.full_optim_state,
        adapter.module,
        adapter.wrap_again,
    ):
        with pytest.raises(NotImplementedError):
            call()


def lines_of_code(path: Path) -> int:
    """Lines with code: not blank, not comments, not docstrings."""
    source = path.read_text(encoding="utf-8")
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, documented) and ast.get_docstring(node) is not None
        for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    code = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in silent
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(code - docstrings)


def test_an_adapter_takes_at_most_25_lines() -> None:
    """The example is all that a user of FSDP2 writes."""
    assert lines_of_code(Path(example_adapter.__file__)) <= MAX_LINES


class Example(RankTestCase):
    """The example at work."""

    @pytest.mark.nightly
    @pytest.mark.slow
    def test_it_trains(self) -> None:
        """Parity, with micro-batches, deferred reduction, clipping, both degrees, and the traps of a real model."""
        spec = f"{example_adapter.__file__}:MyFSDP"
        self.assert_trains(spec)
        self.assert_trains(spec, RICH, Regime(optimizer="adam"))
        self.assert_trains(spec, regime=Regime(micro_batches=2, reduced=(False, True), max_norm=0.1))
        unsharded = self.assert_trains(spec, sharding=Sharding.GRAD_OPTIM)
        resharded = self.assert_trains(spec, sharding=Sharding.FULL)
        self.assertLess(len(unsharded.collectives), len(resharded.collectives))
