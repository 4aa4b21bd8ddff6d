"""One parameter of a unit: the object that the optimizer has, and the places where modules find it."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_conformance.engine.errors import UsedWhileSharded


class Place:
    """Where a parameter is registered: under a key of a module. Does not keep the module."""

    __slots__ = ("_module", "key", "registry")

    def __init__(self, module: nn.Module, key: str) -> None:
        self.registry = module._parameters
        self.key = key
        # Modules with a __setattr__ of their own note their parameters elsewhere, too (RNNs do).
        usual = getattr(type(module), "__setattr__", None) is nn.Module.__setattr__
        self._module = None if usual else weakref.ref(module)

    def register(self, parameter: nn.Parameter) -> None:
        """Let the module find `parameter` under the key."""
        module = None if self._module is None else self._module()
        if module is None:
            self.registry[self.key] = parameter
        else:
            setattr(module, self.key, parameter)

    def copied(self, memo: Mapping[int, Any]) -> Place:
        """The same place in a deep copy of the module."""
        twin = Place.__new__(Place)
        twin.key, twin.registry = self.key, memo[id(self.registry)]
        module = None if self._module is None else self._module()
        twin._module = None if module is None else weakref.ref(memo[id(module)])
        return twin


@dataclass(eq=False, slots=True)
class Member:
    """One parameter of a unit."""

    name: str
    """Its name below the unit's module; the first, if it is tied."""
    parameter: nn.Parameter
    places: list[Place]
    shape: torch.Size = field(init=False)
    """Of the whole parameter."""

    is_guarded: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.shape = self.parameter.shape

    def copied(self, memo: Mapping[int, Any]) -> Member:
        """The same parameter of a deep copy of the modules."""
        twin = Member(self.name, memo[id(self.parameter)], [place.copied(memo) for place in self.places])
        twin.shape = self.shape
        return twin

    def guard(self) -> None:
        """Let a backward raise that reaches the original: it is a shard, and its gradient would be one of a shard."""
        name, self.is_guarded = self.name, True

        def refuse(_: Tensor) -> None:
            raise UsedWhileSharded(
                f"{name} is in a graph while it is sharded, but should be used in the forward of its unit alone",
                where="backward",
            )

        self.parameter.register_hook(refuse)  # type: ignore[no-untyped-call]

    def show_hooks(self, leaf: nn.Parameter) -> None:
        """Hooks that users have registered on the original see the gradients of the leaf."""
        registered = self.parameter._backward_hooks or {}
        own, *_ = registered
        hooks = OrderedDict((key, hook) for key, hook in registered.items() if key != own)
        if hooks != leaf._backward_hooks:
            leaf._backward_hooks = hooks
