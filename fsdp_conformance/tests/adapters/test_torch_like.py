"""Tests for adapters of torch-like engines: the parts they may replace, and the helpers they may call."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from fsdp_conformance.adapters.base import OptimFn
from fsdp_conformance.adapters.torch_like import (
    TorchAdapter,
    hook_of_both_kinds,
    refuse_other_norm,
    replace_submodule,
    submodules,
    unit_classes,
    units_to_shard,
    wrap_units,
)
from fsdp_conformance.errors import AdapterError, Unsupported
from fsdp_conformance.plan import Plan


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 2))


def _set_up(adapter: TorchAdapter, model: nn.Module) -> TorchAdapter:
    adapter.setup(lambda: model, lambda params: SGD(params, lr=1.0, momentum=0.5), Plan())
    return adapter


class Plain(TorchAdapter):
    """Nothing is wrapped."""

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        return model


class Negated(Plain):
    """Stores every tensor negated: only `full` can read it."""

    def full(self, tensor: Tensor) -> Tensor:
        return -tensor.detach()


def test_full_reads_parameters_gradients_and_state() -> None:
    """Each of them, and nothing else."""
    adapter = _set_up(Negated(), nn.Linear(2, 1))
    adapter.backward(adapter.forward(torch.ones(1, 2)).sum())
    grads = adapter.full_grads()
    adapter.optimizer and adapter.optimizer.step()
    weight = adapter.parameters()["weight"]

    assert grads["weight"] is not None
    assert grads["weight"].tolist() == [[-1.0, -1.0]]
    assert torch.equal(adapter.full_params()["weight"], -weight.detach())
    assert adapter.full_optim_state()["weight"]["momentum_buffer"].tolist() == [[-1.0, -1.0]]


class Hidden(Plain):
    """Has one flat parameter in place of the user's."""

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        wrapped = nn.Module()
        wrapped.flat = nn.Parameter(torch.ones(3))
        return wrapped


def test_gradients_of_flat_parameters_can_be_dropped_together() -> None:
    """A user can drop all of them, as for a step that is skipped, but not those of one parameter of his own."""
    adapter = _set_up(Hidden(), nn.Linear(2, 1))
    flat: Any = adapter.module().flat
    flat.sum().backward()

    with pytest.raises(
        Unsupported, match="the wrapped model exposes no parameter 'weight' that has a gradient"
    ) as caught:
        adapter.drop_grads(["weight"])
    assert caught.value.capability == "orig_params"
    assert flat.grad is not None

    adapter.drop_grads(["weight", "bias"])
    assert flat.grad is None


def test_the_gradients_of_some_parameters_are_dropped() -> None:
    """The others stay."""
    adapter = _set_up(Plain(), nn.Linear(2, 1))
    adapter.backward(adapter.forward(torch.ones(1, 2)).sum())
    adapter.drop_grads(["weight"])

    assert [parameter.grad is None for parameter in adapter.parameters().values()] == [True, False]


class Flat(Plain):
    """The parameters are full inside the context only; outside they are empty."""

    written: bool | None = None

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        self.held = {name: value.detach().clone() for name, value in model.named_parameters()}
        for parameter in model.parameters():
            parameter.data = torch.empty(0)
        return model

    @contextmanager
    def gathered(self, *, writeback: bool = False) -> Iterator[None]:
        self.written = writeback
        for name, parameter in self.parameters().items():
            parameter.data = self.held[name].clone()
        yield
        for name, parameter in self.parameters().items():
            if writeback:
                self.held[name] = parameter.detach().clone()
            parameter.data = torch.empty(0)


def test_flat_parameters_are_read_and_written_in_their_context() -> None:
    """Reading leaves the shards alone, writing reaches them, and what was read outlives the context."""
    model = nn.Linear(2, 1)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    adapter = _set_up(Flat(), model)

    read = adapter.full_params()
    assert isinstance(adapter, Flat)
    was_written = adapter.written
    adapter.write_params({"bias": torch.tensor([7.0])})

    assert (was_written, adapter.written) == (False, True)
    assert {name: value.tolist() for name, value in read.items()} == {k: v.tolist() for k, v in before.items()}
    assert adapter.full_params()["bias"].tolist() == [7.0]
    assert adapter.full_params()["weight"].tolist() == before["weight"].tolist()


class Wraps(Plain):
    """Makes the optimizer itself, and replaces the model with it."""

    def make_optimizer(self, optim_fn: OptimFn) -> Optimizer:
        self.made = getattr(self, "made", 0) + 1
        self.model = nn.Sequential(self.model)
        return super().make_optimizer(optim_fn)


def test_make_optimizer_may_replace_the_model() -> None:
    """It is called once, after `wrap`, and names stay the original ones."""
    adapter = _set_up(Wraps(), nn.Linear(2, 1))

    assert isinstance(adapter, Wraps)
    assert adapter.made == 1
    assert isinstance(adapter.module(), nn.Sequential)
    assert list(adapter.full_params()) == ["weight", "bias"]
    assert adapter.optimizer is not None


def test_make_optimizer_is_not_called_without_parameters() -> None:
    """A stock optimizer rejects an empty list."""
    adapter = _set_up(Wraps(), nn.Tanh())

    assert adapter.optimizer is None
    assert not hasattr(adapter, "made")


def test_unit_classes_stand_for_the_units_alone() -> None:
    """Other modules of the same class are none; the units compute as before, keep their values, and can be copied."""
    model = _model()
    expected = model(torch.ones(1, 2))
    classes = unit_classes(model, Plan(units=("0", "1")))

    assert [cls.__name__ for cls in classes] == ["LinearUnit"]
    assert [isinstance(module, tuple(classes)) for module in model] == [True, True, False]
    assert all(isinstance(module, nn.Linear) for module in model)
    assert torch.equal(model(torch.ones(1, 2)), expected)
    assert torch.equal(copy.deepcopy(model)(torch.ones(1, 2)), expected)


def test_unit_classes_of_nested_and_repeated_units() -> None:
    """Each class is listed once, however units are nested; a module with two names is one unit."""
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Linear(2, 2))
    model.append(model[1])
    classes = unit_classes(model, Plan(units=("0.0", "0", "1", "2")))

    assert [cls.__name__ for cls in classes] == ["LinearUnit", "SequentialUnit"]
    assert [type(module).__name__ for module in model.modules()] == [
        "Sequential", "SequentialUnit", "LinearUnit", "Tanh", "LinearUnit",
    ]  # fmt: skip
    assert unit_classes(_model(), Plan()) == []


def test_unit_classes_refuse_what_no_class_can_say() -> None:
    """A unit of several modules is refused; a name that is none is the adapter's mistake."""
    with pytest.raises(Unsupported, match=r"a class cannot stand for '0\+1', which is several modules") as caught:
        unit_classes(_model(), Plan(units=("0+1",)))
    with pytest.raises(AdapterError, match="unit 'nowhere'"):
        unit_classes(_model(), Plan(units=("nowhere",)))

    assert caught.value.capability == "multi_module_unit"


def test_units_to_shard_end_with_the_model() -> None:
    """Units come in the plan's order; several modules of one unit are a list."""
    model = _model()

    assert units_to_shard(model, Plan(units=("2", "0+1"))) == [model[2], [model[0], model[1]], model]
    assert units_to_shard(model, Plan()) == [model]
    with pytest.raises(AdapterError, match="unit 'nowhere'"):
        units_to_shard(model, Plan(units=("nowhere",)))


def test_wrap_units_from_the_inside_out() -> None:
    """Each unit is in its wrapper wherever it appears; an outer one has the wrappers of those inside it."""
    linear = nn.Linear(2, 2)
    model: Any = nn.Sequential(nn.Sequential(linear, nn.Tanh()), linear)

    wrappers = wrap_units(model, Plan(units=("0.0", "0")), nn.Sequential)

    assert list(wrappers) == ["0.0", "0", ""]
    assert wrappers[""][0] is model
    assert model[0] is wrappers["0"]
    assert model[1] is wrappers["0.0"] is wrappers["0"][0][0]
    assert wrappers["0.0"][0] is linear


def test_a_norm_that_was_not_announced_is_refused() -> None:
    """An engine that clips as its constructor was told would clip by the other one."""
    refuse_other_norm(Plan(max_norm=1.5), 1.5)
    refuse_other_norm(Plan(), None)
    for max_norm in (2.0, None):
        with pytest.raises(Unsupported, match=f"max_norm must be 1.5 as at construction, got {max_norm}"):
            refuse_other_norm(Plan(max_norm=1.5), max_norm)


def test_replace_submodule_everywhere() -> None:
    """A module that appears twice is replaced in both places, but not inside its own wrapper."""
    model: Any = _model()
    model.again = model[0]
    inner, wrapper = model[0], nn.Sequential(model[0])
    replace_submodule(model, inner, wrapper)

    assert model[0] is model.again is wrapper
    assert wrapper[0] is inner


def test_units_are_found_below_a_wrapper() -> None:
    """A model that is wrapped already reaches the engine, which may refuse it, although its names have grown."""
    model = _model()
    wrapped = nn.Module()
    wrapped.module = model

    assert submodules(wrapped, ["1", "module.1"]) == [model[1], model[1]]
    with pytest.raises(AdapterError, match="unit '3', which is not a submodule of Module"):
        submodules(wrapped, ["3"])


def test_what_a_flat_layout_hides_cannot_be_frozen() -> None:
    """Setting the flags of other parameters instead would train what the user froze."""

    class Flat(Plain):
        def parameters(self) -> dict[str, nn.Parameter]:
            return {"flat": next(self.model.parameters())}

    adapter = _set_up(Flat(), nn.Linear(2, 1))

    with pytest.raises(Unsupported, match="exposes no parameter 'weight' that can be frozen"):
        adapter.set_requires_grad(["weight"])
    adapter.set_requires_grad([])


def test_a_hook_of_both_kinds_fills_the_shard_or_replaces_the_gradient() -> None:
    """It reads the whole gradient also after it has written to the shard, which is the gradient itself on one rank."""

    def halves(gradient: Tensor, shard: Tensor) -> None:
        shard.zero_()
        shard.add_(gradient[: len(shard)], alpha=0.5)

    hook = hook_of_both_kinds(halves)
    gradient, shard = torch.tensor([2.0, 4.0]), torch.ones(1)
    hook(None, gradient, shard)
    assert (gradient.tolist(), shard.tolist()) == ([2.0, 4.0], [1.0])
    hook(None, gradient)
    assert gradient.tolist() == [1.0, 2.0]
