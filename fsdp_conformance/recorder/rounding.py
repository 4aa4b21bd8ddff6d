"""
Mixed precision without sharding: modules compute with parameters rounded to another dtype.

FSDP keeps parameters in their own dtype and gathers them in another. Here, while one of a unit's modules runs, its
parameters and those of the modules inside it are rounded copies, and gradients flow through the rounding back to the
parameters. Every module begins that by itself, so those that activation checkpointing runs again in backward are
covered; and a module may use the parameters of one inside it without calling that, as `nn.MultiheadAttention` does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


@dataclass(eq=False, kw_only=True, slots=True)
class Rounding:
    """The dtypes of a unit."""

    param_dtype: torch.dtype | None
    output_dtype: torch.dtype | None = None
    casts_inputs: bool = True
    _depth: dict[int, int] = field(default_factory=dict)
    _own: dict[int, dict[str, nn.Parameter]] = field(default_factory=dict)
    _unit: set[int] = field(default_factory=set)

    def install(self, unit: nn.Module, modules: Iterable[nn.Module]) -> None:
        """Round in these modules, which are the unit's, and cast what goes into and comes out of the unit."""
        if self.param_dtype is not None:
            modules = list(modules)
            self._unit.update(map(id, modules))
            for module in modules:
                module.register_forward_pre_hook(self._enter, prepend=True)
                module.register_forward_hook(self._leave, always_call=True)
            if self.casts_inputs:
                unit.register_forward_pre_hook(self._cast_inputs, with_kwargs=True, prepend=True)
        if self.output_dtype is not None:
            unit.register_forward_hook(self._cast_output)

    def _enter(self, module: nn.Module, args: object) -> None:
        for each in module.modules():
            if id(each) in self._unit:
                depth = self._depth.get(id(each), 0)
                self._depth[id(each)] = depth + 1
                if not depth:
                    self._round(each)

    def _round(self, module: nn.Module) -> None:
        own = {
            name: parameter
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.is_floating_point() and parameter.dtype is not self.param_dtype
        }
        self._own[id(module)] = own
        for name, parameter in own.items():
            module._parameters[name] = parameter.to(self.param_dtype)  # type: ignore[assignment]

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        if not self._depth.get(id(module), 0):
            # The forward failed before it was entered.
            return
        for each in module.modules():
            if id(each) in self._unit:
                self._depth[id(each)] -= 1
                if not self._depth[id(each)]:
                    each._parameters.update(self._own.pop(id(each)))

    def _cast_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return pytree.tree_map(lambda leaf: _cast(leaf, self.param_dtype), (args, kwargs))

    def _cast_output(self, module: nn.Module, args: object, output: object) -> object:
        return pytree.tree_map(lambda leaf: _cast(leaf, self.output_dtype), output)


def _cast(leaf: object, dtype: torch.dtype | None) -> object:
    return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() and dtype is not None else leaf
