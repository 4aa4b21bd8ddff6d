"""The code of an adapter in a script: what is carried, what is refused, and that it trains as the adapter does."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_conformance.adapters import registry
from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.adapters.torch_like import TorchAdapter
from fsdp_conformance.plan import Plan, Sharding
from fsdp_conformance.repro.carried import BASES, TORCH_BASE, beyond_code, carried, sources_for_adapters
from fsdp_conformance.repro.refused import NoScript
from fsdp_conformance.tests.cli.cli_runs import with_adapter

#: Uses of all kinds: helpers, constants, class variables, properties, super(), enumerations of the plan.
_MINE = """
import math
from typing import ClassVar

import torch
from fsdp_conformance.adapters.torch_like import TorchAdapter, submodules
from fsdp_conformance.plan import Sharding

FACTOR = 2.0
UNUSED = math.pi


def scaled(loss, by):
    return loss * by


def never_called():
    return UNUSED


class Common(TorchAdapter):
    factor: ClassVar[float] = FACTOR

    def step(self, max_norm=None, *, norm_type=2.0):
        self.steps = getattr(self, "steps", 0) + 1
        return super().step(max_norm, norm_type=norm_type)

    def full_state_dict(self, *, rank0_only=False):
        return never_called()


class Empty(Common):
    shims = ("nothing",)


class Mine(Empty):
    name = "mine"
    capabilities = frozenset({"zero3"})

    def wrap(self, model, plan):
        self.refuse_undeclared(plan)
        self.units = submodules(model, plan.units)
        self.whole = plan.sharding is Sharding.FULL
        return model

    @property
    def by(self):
        return self._by

    @by.setter
    def by(self, value):
        self._by = value

    def backward(self, loss, *, retain_graph=False):
        self.by = self.factor
        super().backward(scaled(loss, self.by), retain_graph=retain_graph)
"""


def _adapter(directory: Path, text: str) -> type[Adapter]:
    return registry.load(f"{with_adapter(directory, text)}:Mine")


def _text(adapter: type[Adapter], plan: Plan) -> str:
    sources = sources_for_adapters()
    classes = carried(adapter, plan, sources)
    imports = ["from __future__ import annotations", "import contextlib", "import torch",
               "from torch.distributed.tensor import DTensor", *sources.imports]  # fmt: skip
    return "\n\n".join([*imports, *sources.definitions, classes])


@pytest.fixture
def alone() -> Iterator[None]:
    """A world of this process."""
    store: Any = dist
    dist.init_process_group("gloo", store=store.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def _trained(engine: Any, plan: Any) -> dict[str, torch.Tensor]:
    engine.setup(_model, lambda parameters: torch.optim.SGD(parameters, lr=0.5), plan)
    engine.train(True)
    for last in (False, True):
        with engine.microbatch(last, reduced=True):
            engine.backward(engine.forward(torch.ones(2, 3)).sum())
    engine.step(1.0)
    params: dict[str, torch.Tensor] = engine.full_params()
    engine.close()
    return params


@pytest.mark.usefixtures("alone")
def test_the_carried_code_trains_as_the_adapter_does(tmp_path: Path) -> None:
    """In an empty namespace, with helpers, class variables, properties and base classes; nothing else is carried."""
    adapter = _adapter(tmp_path, _MINE)
    plan = Plan(units=("0", "1"), sharding=Sharding.FULL, max_norm=1.0)
    text = _text(adapter, plan)
    namespace: dict[str, Any] = {"__name__": "alone"}
    exec(compile(text, "alone", "exec"), namespace)

    ours, theirs = _trained(namespace["Mine"](), namespace["PLAN"]), _trained(adapter(), plan)

    assert ours.keys() == theirs.keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not torch.equal(ours["0.weight"], _model().get_parameter("0.weight"))
    assert "sharding = Sharding.FULL" in text
    assert "class Mine(Common)" in text
    for left_out in ("never_called", "UNUSED", "class Empty", "refuse_undeclared", "fsdp_conformance"):
        assert left_out not in text


def test_clipping_and_deferring_are_carried_only_for_a_plan_that_has_them() -> None:
    """A bug report shows no code that the training does not reach."""
    adapter = registry.load("torch-replicate")

    plain = _text(adapter, Plan(units=("0",)))
    whole = _text(adapter, Plan(units=("0",), max_norm=1.0, defer_reduction=True))

    assert "replicate(target, mesh=mesh, mp_policy=precision(plan, unit))" in plain
    assert "def precision(plan, unit)" in plain
    assert "clip_grads_with_norm_" not in plain
    assert "set_requires_gradient_sync" not in plain
    assert "clip_grads_with_norm_" in whole
    assert "set_requires_gradient_sync" in whole


_REFUSED = {
    "uses discard_gradients of its base class": """
class Mine(TorchAdapter):
    def wrap(self, model, plan):
        self.discard_gradients()
        return model
""",
    "is not a class at the top of": """
def made():
    class Mine(TorchAdapter):
        def wrap(self, model, plan):
            return model

    return Mine


Mine = made()
""",
    "Mine.wrap is not what its class defines": """
class Mine(TorchAdapter):
    def wrap(self, model, plan):
        return model


def kept(self, model, plan):
    return model


Mine.wrap = kept
""",
    "Mine.wrap has no definition in its class": """
class Mine(TorchAdapter):
    wrap, kept = (lambda self, model, plan: model), None
""",
}


@pytest.mark.parametrize("reason", _REFUSED)
def test_what_cannot_be_carried_is_refused(reason: str, tmp_path: Path) -> None:
    """A script that lacks something would show another failure than the case."""
    with pytest.raises(NoScript, match=reason):
        _text(
            _adapter(tmp_path, f"from fsdp_conformance.adapters.torch_like import TorchAdapter\n\n{_REFUSED[reason]}"),
            Plan(),
        )


def test_the_reference_engine_is_refused() -> None:
    """It is this package, which a script must not need."""
    with pytest.raises(NoScript, match="part of this package"):
        _text(registry.load("reference"), Plan(units=("0",)))


def test_what_a_plan_asks_for_and_a_script_lacks_is_named() -> None:
    """Half precision is not exact, and a script builds no model on meta."""
    plan = Plan(param_dtype="bfloat16", meta_init=True, sharding=Sharding.FULL)

    assert beyond_code(plan.capabilities()) == ["meta_init", "mixed_precision"]


@pytest.mark.parametrize(("text", "real"), [(BASES, Adapter), (TORCH_BASE, TorchAdapter)])
def test_the_base_classes_of_a_script_are_called_like_the_real_ones(text: str, real: type) -> None:
    """An adapter's `super().step(...)` must find the same arguments there."""
    owner = next(node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == real.__name__)
    methods = [node for node in owner.body if isinstance(node, ast.FunctionDef)]
    assert methods
    for method in methods:
        parameters = inspect.signature(getattr(real, method.name)).parameters.values()
        called = {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}
        by_place = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
        assert [each.arg for each in method.args.args] == by_place, method.name
        assert {each.arg for each in method.args.kwonlyargs} == called, method.name


_BUNDLED = ("torch-zero1", "deepspeed-zero1", "fairscale-fsdp", "lightning-fsdp2", "accelerate-fsdp2", "simplefsdp",
            "colossalai-zero1", "megatron-fsdp-zero3")  # fmt: skip


@pytest.mark.parametrize("name", _BUNDLED)
def test_bundled_adapters_are_carried(name: str) -> None:
    """Without their engines, which they import when they wrap; nothing of this package is left."""
    text = _text(registry.load(name), Plan(units=("0",), max_norm=1.0, micro_batches=2, sharding=Sharding.DEFAULT))

    tree = ast.parse(text)
    assert "fsdp_conformance" not in text
    assert len([node for node in tree.body if isinstance(node, ast.ClassDef)]) >= 4
    assert not {"deepspeed", "fairscale", "lightning_fabric", "accelerate", "torchtitan", "colossalai"} & set(
        sys.modules
    )
