"""Original names survive wrappers, and users' own `module` attributes survive the cleaning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fsdp_conformance.adapters.names import OriginalNames, clean_name, cleaned_parameters


class Wrapper(nn.Module):
    """A third-party wrapper: it keeps the wrapped module in an attribute, under a name of its authors' choice."""

    def __init__(self, inner: nn.Module, key: str = "module") -> None:
        super().__init__()
        setattr(self, key, inner)


class OwnModule(nn.Module):
    """A user who calls a submodule `module`, next to a parameter of the same name inside and outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.module = nn.Linear(3, 2)
        self.register_buffer("steps", torch.zeros(1))


def tied() -> nn.Sequential:
    """0.weight and 2.weight are one parameter."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return model


@pytest.mark.parametrize("key", ["module", "_fsdp_wrapped_module", "_orig_mod", "anything"])
def test_a_user_own_module_keeps_its_name(key: str) -> None:
    """`weight` and `module.weight` are distinguished under every wrapper, by the objects they belong to."""
    model = OwnModule()
    names = OriginalNames(model)
    parameters = names.parameters_of(Wrapper(Wrapper(model, key), key))

    assert list(parameters) == ["weight", "module.weight", "module.bias"]
    assert parameters["weight"] is model.weight
    assert parameters["module.weight"] is model.module.weight
    assert list(names.buffers_of(Wrapper(model, key))) == ["steps"]


def test_wrappers_inside() -> None:
    """Wrappers around submodules leave no trace: torch's checkpoint wrapper, and compiled modules."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    names = OriginalNames(model)
    model[0] = checkpoint_wrapper(model[0])
    model[1] = Wrapper(model[1], "_orig_mod")

    assert list(names.parameters_of(model)) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_a_tied_parameter_is_listed_once() -> None:
    """A tied parameter has its first name, wherever the wrapper stores it."""
    model = tied()
    names = OriginalNames(model)

    assert names.parameters == ("0.weight", "0.bias", "2.bias")
    assert list(names.parameters_of(Wrapper(model))) == ["0.weight", "0.bias", "2.bias"]
    assert names.is_tied("0.weight")
    assert not names.is_tied("2.bias")
    assert names.listed_name("2.weight") == "0.weight"
    del model[0]._parameters["weight"]
    assert names.parameters_of(model)["0.weight"] is model[2].weight


def test_a_module_at_two_places() -> None:
    """Its parameters have the name of the first place; both names lead to it."""
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, shared)
    names = OriginalNames(model)

    assert list(names.parameters_of(model)) == ["0.weight", "0.bias"]
    assert names.modules["1"] is shared
    assert names.name_of(shared) == "0"


def test_parameters_of_the_engine_come_last() -> None:
    """Parameters without an original name keep the engine's name and come last, so the validator finds them."""
    model = nn.Sequential(nn.Linear(2, 2))
    names = OriginalNames(model)
    outer = Wrapper(model)
    outer.flat = nn.Parameter(torch.zeros(6))

    assert list(names.parameters_of(outer)) == ["0.weight", "0.bias", "flat"]


def test_replaced_modules_are_named_by_text() -> None:
    """An engine that copies the model is followed by the text of its names."""
    model = OwnModule()
    names = OriginalNames(model)
    copy = OwnModule()

    assert list(names.parameters_of(Wrapper(copy, "_fsdp_wrapped_module"))) == [
        "weight",
        "module.weight",
        "module.bias",
    ]


def test_names_from_before_a_first_wrap() -> None:
    """A model that has a wrapped part already has the names from before that."""
    inner = Wrapper(nn.Linear(2, 2), "_fsdp_wrapped_module")

    assert OriginalNames(Wrapper(inner, "body")).parameters == ("body.weight", "body.bias")


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("module.0.weight", {"0.weight"}, "0.weight"),
        ("module.0.weight", {"module.0.weight"}, "module.0.weight"),
        ("module.module.weight", {"module.weight"}, "module.weight"),
        ("0._fsdp_wrapped_module.weight", {"0.weight"}, "0.weight"),
        ("_orig_mod.module.weight", {"weight"}, "weight"),
        ("module.other", {"weight"}, "module.other"),
    ],
)
def test_clean_name(name: str, known: set[str], expected: str) -> None:
    """`module` is dropped only where the rest is a known name."""
    assert clean_name(name, known) == expected


def test_cleaned_parameters_without_known_names() -> None:
    """Marked wrappers are dropped, a component `module` of unknown origin is not."""
    wrapped: Any = Wrapper(Wrapper(nn.Linear(2, 2), "_orig_mod"), "module")

    assert list(cleaned_parameters(wrapped)) == ["module.weight", "module.bias"]


def test_nothing_is_kept_alive() -> None:
    """The names hold modules weakly."""
    names = OriginalNames(nn.Sequential(nn.Linear(2, 2)))

    assert dict(names.modules) == {}
