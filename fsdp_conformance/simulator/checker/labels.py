"""
Names for hazards: of the running module, of ranges that the script marks, of parameters.

Modules are tracked with torch's global forward hooks, so the model itself does not change. They have their names from
`named_modules`, without those of wrappers: "Transformer.layers.0.attn". Backward runs in autograd's threads, which have
no Python stack; operations there get the stack of the call to backward.
"""

from __future__ import annotations

import functools
import re
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.utils import _python_dispatch

from fsdp_conformance.simulator import checker
from fsdp_conformance.simulator.device import SIMULATED, build
from fsdp_conformance.simulator.frames import Frame, calling_frame
from fsdp_conformance.simulator.replacements import Replacements

#: What DDP, FSDP1, activation checkpointing and torch.compile add to names.
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:module|_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)(?:\.|$)")


#: Where the backward pass that runs now was called.
_backward: Frame | None = None


class Labels:
    """The label of each thread: the innermost module or range that it is in."""

    def __init__(self) -> None:
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._local = threading.local()
        self._extension: Any = build.load()
        self._replaced = Replacements()

    def install(self) -> None:
        """From now on track every module and every backward pass in this process."""
        hooks = (
            register_module_forward_pre_hook(self.before_forward),
            register_module_forward_hook(self.after_forward, always_call=True),
        )
        for hook in hooks:
            self._replaced.on_undo(hook.remove)
        _follow_backward(self._replaced, self._extension)

    def remove(self) -> None:
        """Stop tracking."""
        self._replaced.undo()

    def push(self, label: str) -> int:
        """Begin a range; returns how many were open."""
        outer: list[str] = self._local.__dict__.setdefault("outer", [])
        outer.append(self._extension.set_label(label))
        return len(outer) - 1

    def pop(self) -> int:
        """End the innermost range. If there is none, that is no error: hooks may run late, and scripts may be wrong."""
        outer: list[str] = self._local.__dict__.setdefault("outer", [])
        if outer:
            self._extension.set_label(outer.pop())
        return len(outer)

    def before_forward(self, module: nn.Module, arguments: Any) -> None:
        """A module's forward begins."""
        name = self._names.get(module)
        if name is None:
            self._name(module)
            name = self._names[module]
        self.push(name)

    def after_forward(self, module: nn.Module, arguments: Any, result: Any) -> None:
        """A module's forward has ended, possibly with an exception."""
        self.pop()

    def _name(self, root: nn.Module) -> None:
        """Name a module that was called directly, its submodules, and their parameters."""
        inner = root
        while (wrapped := getattr(inner, "module", None)) is not None and isinstance(wrapped, nn.Module):
            inner = wrapped
        title = type(inner).__name__
        for path, module in root.named_modules():
            self._names.setdefault(module, _joined(title, path))
        with checker.suspended(), torch.no_grad():
            for path, tensor in (*root.named_parameters(), *root.named_buffers()):
                local = getattr(tensor, "_local_tensor", tensor)  # this rank's part of a DTensor
                if isinstance(local, Tensor) and local.device.type == SIMULATED and _has_memory(local):
                    self._extension.name_tensor(local, _joined(title, path))


def install() -> Labels:
    """From now on track every module and every backward pass in this process."""
    labels = Labels()
    labels.install()
    return labels


def caller_of_backward() -> Frame | None:
    """The line of the script that called the backward pass which runs now; None if none does."""
    return _backward


def _follow_backward(replaced: Replacements, extension: Any) -> None:
    """
    Give operations in autograd's threads the stack of the call that they work for.

    torch.autograd.backward and .grad call the engine by a private name (2.2 to 2.13). If torch has no such name, these
    operations have no stack.
    """
    run = getattr(torch.autograd, "_engine_run_backward", None)
    if run is None:
        return
    local = threading.local()

    @functools.wraps(run)
    def followed(*args: Any, **kwargs: Any) -> Any:
        global _backward
        # Activation checkpointing calls it again from inside.
        is_outermost = not getattr(local, "runs", False)
        if is_outermost:
            local.runs = True
            _backward = calling_frame()
            extension.begin_backward()
        try:
            return run(*args, **kwargs)
        finally:
            if is_outermost:
                local.runs = False
                _backward = None
                extension.end_backward()

    replaced.set(torch.autograd, _engine_run_backward=followed)


#: torch's narrows the type to a class that mypy says no tensor can have.
_is_around_others: Callable[[Tensor], bool] = _python_dispatch.is_traceable_wrapper_subclass


def _has_memory(tensor: Tensor) -> bool:
    """
    True if it owns memory now. A parameter that FSDP has resharded does not, nor does a lazy one, a wrapper around
    other tensors, or a tensor that torch.export only pretends to have.
    """
    if is_lazy(tensor) or _is_around_others(tensor):
        return False
    storage = tensor.untyped_storage()
    return storage.device.type == SIMULATED and storage.size() > 0


def _joined(title: str, path: str) -> str:
    path = _WRAPPERS.sub("", path).rstrip(".")
    return f"{title}.{path}" if path else title
