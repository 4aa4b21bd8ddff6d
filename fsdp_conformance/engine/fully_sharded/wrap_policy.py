"""Policies that choose which submodules become separate units: the engine's own, and torch's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fsdp_conformance.engine.fully_sharded.torch_spelling import is_torchs
from fsdp_conformance.errors import ConfigError

#: Their parent uses their parameters without calling them, so a unit of one would never be gathered.
_NO_FORWARD = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
#: Uses its children's parameters without calling them.
_LEAVES = (nn.MultiheadAttention,)

WrapPolicy = Callable[[nn.Module, int], bool]
"""
Takes a submodule, and the number of elements below it that are in no unit yet. Returns True if it becomes a unit.

Inner submodules are asked about first.
"""


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


@dataclass(frozen=True)
class Choice:
    """The submodules that a policy chooses, whoever wrote it."""

    selects: WrapPolicy
    """Returns True if a submodule becomes a unit."""
    descends: WrapPolicy | None = None
    """Returns True to look below a module; otherwise it does not become a unit either. None: below every module."""
    overrides: Mapping[nn.Module, Mapping[str, Any]] = field(default_factory=dict)
    """Options of single units, in torch's spelling."""


def choice_of(policy: Any, root: nn.Module, *, ignored: Iterable[nn.Module]) -> Choice:
    """
    A policy of this module, or one of `torch.distributed.fsdp.wrap`, as a choice.

    Torch's are functions of `module`, `recurse` and `nonwrapped_numel`, and CustomPolicy, whose function may return
    options for a unit. Raises ConfigError for anything else.
    """
    if is_torchs(policy, "CustomPolicy"):
        targets = policy._run_policy(root, set(ignored), {})
        return Choice(lambda module, numel: module in targets, overrides=targets)
    if not callable(policy):
        raise ConfigError(
            [f"auto_wrap_policy must be a function, or a policy of torch.distributed.fsdp.wrap, got {policy!r}"],
            where="FullyShardedDataParallel",
        )
    if not _takes_recurse(policy):
        return Choice(policy)
    return Choice(
        lambda module, numel: bool(policy(module=module, recurse=False, nonwrapped_numel=numel)),
        lambda module, numel: bool(policy(module=module, recurse=True, nonwrapped_numel=numel)),
    )


def _takes_recurse(policy: Callable[..., object]) -> bool:
    """True if a function is called as torch calls its policies."""
    try:
        parameters = inspect.signature(policy).parameters
    except (TypeError, ValueError):
        return False
    return "recurse" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def wrap_submodules(
    root: nn.Module,
    choice: Choice,
    *,
    wrap: Callable[[nn.Module, Mapping[str, Any]], nn.Module],
    is_unit: Callable[[nn.Module], bool],
    ignored: Iterable[nn.Module] = (),
    ignored_parameters: Iterable[nn.Parameter] = (),
) -> None:
    """
    Replace the chosen submodules by `wrap` of them and their own options, everywhere they are registered; inner first.

    Containers without a forward, and the contents of MultiheadAttention, are never wrapped. `ignored` modules are left
    alone, and `ignored_parameters` do not count as elements.
    """
    skipped = {id(below) for module in ignored for below in module.modules()}
    uncounted = {id(parameter) for parameter in ignored_parameters}
    wrapped: dict[int, nn.Module] = {}
    free_ids: dict[int, set[int]] = {}
    sizes: dict[int, int] = {}

    def own(module: nn.Module) -> set[int]:
        parameters = [each for each in module._parameters.values() if each is not None and id(each) not in uncounted]
        sizes.update({id(each): each.numel() for each in parameters})
        return {id(each) for each in parameters}

    def below(module: nn.Module) -> set[int]:
        """The ids of the parameters of a module and the modules below it that are in no unit."""
        ids = own(module)
        for child in module._modules.values():
            if child is not None and id(child) not in skipped and not is_unit(child):
                ids |= below(child)
        return ids

    def numel(parameters: set[int]) -> int:
        return sum(sizes[each] for each in parameters)

    def descends(module: nn.Module) -> bool:
        return choice.descends is None or choice.descends(module, numel(below(module)))

    def visit(module: nn.Module) -> set[int]:
        """Wrap below `module`. Returns the ids of the parameters there that are in no unit."""
        if id(module) in free_ids:
            return free_ids[id(module)]
        free = free_ids[id(module)] = own(module)
        for key, child in list(module._modules.items()):
            if child is None or id(child) in skipped or is_unit(child):
                continue
            if id(child) in wrapped:
                module._modules[key] = wrapped[id(child)]
                continue
            if not descends(child):
                free |= below(child)
                continue
            inside = visit(child)
            may_be_unit = not isinstance(child, _NO_FORWARD) and not isinstance(module, _LEAVES)
            if may_be_unit and choice.selects(child, numel(inside)):
                wrapped[id(child)] = module._modules[key] = wrap(child, choice.overrides.get(child, {}))
            else:
                free |= inside
        return free

    if descends(root):
        visit(root)
