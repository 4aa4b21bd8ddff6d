"""Policies that choose which submodules become separate units."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from torch import nn

#: Their parent uses their parameters without calling them, so a unit of one would never be gathered.
_NO_FORWARD = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
#: Uses its children's parameters without calling them.
_LEAVES = (nn.MultiheadAttention,)

WrapPolicy = Callable[[nn.Module, int], bool]
"""From a submodule, and the number of elements below it in no unit yet, to whether it becomes one. Inner ones first."""


@dataclass(frozen=True)
class SizePolicy:
    """A submodule becomes a unit if it has at least this many elements that are in no unit yet."""

    min_num_params: int = 100_000_000
    """Elements."""

    def __call__(self, module: nn.Module, numel: int) -> bool:
        return numel >= self.min_num_params


@dataclass(frozen=True)
class ClassPolicy:
    """Every submodule of the given classes becomes a unit."""

    classes: Collection[type[nn.Module]]

    def __call__(self, module: nn.Module, numel: int) -> bool:
        return isinstance(module, tuple(self.classes))


def wrap_submodules(
    root: nn.Module,
    policy: WrapPolicy,
    *,
    wrap: Callable[[nn.Module], nn.Module],
    is_unit: Callable[[nn.Module], bool],
    ignored: Iterable[nn.Module],
) -> None:
    """
    Replace the submodules that `policy` selects by `wrap` of them, everywhere they are registered; inner ones first.

    Containers without a forward, and the contents of MultiheadAttention, are never wrapped.
    """
    skipped = {id(below) for module in ignored for below in module.modules()}
    wrapped: dict[int, nn.Module] = {}
    left: dict[int, set[int]] = {}
    sizes: dict[int, int] = {}

    def visit(module: nn.Module) -> set[int]:
        """Wrap below `module`. Returns the ids of the parameters there that are in no unit."""
        if id(module) in left:
            return left[id(module)]
        free = {id(parameter) for parameter in module._parameters.values() if parameter is not None}
        sizes.update({id(each): each.numel() for each in module._parameters.values() if each is not None})
        left[id(module)] = free
        for key, child in list(module._modules.items()):
            if child is None or id(child) in skipped or is_unit(child):
                continue
            if id(child) in wrapped:
                module._modules[key] = wrapped[id(child)]
                continue
            below = visit(child)
            asked = not isinstance(child, _NO_FORWARD) and not isinstance(module, _LEAVES)
            if asked and policy(child, sum(sizes[each] for each in below)):
                wrapped[id(child)] = module._modules[key] = wrap(child)
            else:
                free |= below
        return free

    visit(root)
