"""Hooks of the script that see gradients: of parameters, and of modules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from fsdp_conformance.recorder.lines import is_of_script
from fsdp_conformance.recorder.names import Roots
from fsdp_conformance.stack import shown

#: Attributes in which torch keeps the hooks, by number. Without any, those of a tensor are None.
_OF_MODULES = ("_backward_hooks", "_backward_pre_hooks")
_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class CountedHook:
    """A hook of a tensor that counts its calls. An engine that sets gradients itself never calls it."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook
        self.calls = 0

    def __call__(self, *args: Any) -> Any:
        """Call the hook."""
        self.calls += 1
        return self.hook(*args)


def counted(tensor: object, hook: Any) -> Any:
    """The hook that a script registers on a tensor, counted if the tensor is a parameter."""
    is_counted = isinstance(tensor, nn.Parameter) and not isinstance(hook, CountedHook) and _place(hook)
    return CountedHook(hook) if is_counted else hook


def gradient_hooks(roots: Roots) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """
    Where they are defined, "train.py:30", each once; and those that were not called since the last look.

    Hooks of torch and of engines are not the script's. Calls are counted on parameters that have gradients.
    """
    were_called: dict[str, list[bool]] = {}
    for _, module in roots.named_modules():
        for owner, hook in _hooks(module):
            place = _place(hook)
            if not place:
                continue
            calls = were_called.setdefault(place, [])
            if isinstance(hook, CountedHook) and owner.grad is not None:
                calls.append(hook.calls > 0)
                hook.calls = 0
    return tuple(were_called), tuple(place for place, calls in were_called.items() if calls and not any(calls))


def _hooks(module: nn.Module) -> Iterator[tuple[Any, Callable[..., Any]]]:
    """The hooks of a module and its own parameters, each with the module or parameter that has it."""
    owners: list[tuple[nn.Module | Tensor, tuple[str, ...]]] = [(module, _OF_MODULES)]
    owners += [(parameter, _OF_PARAMETERS) for parameter in module._parameters.values() if parameter is not None]
    for owner, attributes in owners:
        for attribute in attributes:
            for hook in (getattr(owner, attribute, None) or {}).values():
                yield owner, hook


def _place(hook: Any) -> str:
    while isinstance(hook, functools.partial | CountedHook):
        hook = hook.hook if isinstance(hook, CountedHook) else hook.func
    if not isinstance(hook, FunctionType | MethodType):
        # An object that can be called.
        hook = type(hook).__call__
    code = getattr(hook, "__code__", None)
    if code is None or not is_of_script(code.co_filename):
        return ""
    return f"{shown(code.co_filename)}:{code.co_firstlineno}"
