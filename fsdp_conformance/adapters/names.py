"""
Original names of parameters and buffers, whatever an engine wraps around the model.

Wrappers add components to names (`_fsdp_wrapped_module.`, DDP's `module.`), but users also call their own submodules
`module`. So names are taken from the module *objects*, which are recorded before wrapping: an object keeps its name
wherever the engine moves it. Only tensors of unknown modules are named by text.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

#: Components that only wrappers add to names.
_MARKED = frozenset(
    {"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "_forward_module", "_fpw_module"}
)
#: A component that both wrappers and users add to names.
_AMBIGUOUS = "module"


class OriginalNames:
    """
    The names a model had before it was wrapped.

    Holds modules weakly, so it keeps no storage of the engine alive. Parts of the model may already be wrapped; their
    names are those from before wrapping.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules: weakref.WeakValueDictionary[str, nn.Module] = weakref.WeakValueDictionary()
        """Every submodule by each of its names; the root is ""."""
        self._fqn: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self.numel: dict[str, int] = {}
        """Elements of every parameter, by its listed name."""
        first: dict[int, str] = {}
        self._first: dict[str, str] = {}
        """Each name of a parameter to its listed name, which is the first one."""
        buffers = []
        for fqn, module in _walk(model):
            self.modules[fqn] = module
            self._fqn.setdefault(module, fqn)
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    name = _join(fqn, key)
                    self._first[name] = first.setdefault(id(parameter), name)
                    self.numel[self._first[name]] = parameter.numel()
            buffers += [_join(fqn, key) for key, buffer in module._buffers.items() if buffer is not None]
        self.parameters = tuple(name for name, listed in self._first.items() if name == listed)
        """Every parameter once, by its name in `named_parameters()`."""
        self.buffers = tuple(buffers)

    def name_of(self, module: nn.Module) -> str:
        """The original name of a submodule. Raises KeyError for one that the engine added."""
        return self._fqn[module]

    def listed_name(self, name: str) -> str:
        """The name under which a parameter is listed, which for a tied parameter may be its other name."""
        return self._first.get(name, name)

    def is_tied(self, name: str) -> bool:
        """True if the parameter has other names than its listed one."""
        return sum(listed == name for listed in self._first.values()) > 1

    def parameters_of(self, wrapped: nn.Module) -> dict[str, nn.Parameter]:
        """The parameters of the wrapped model by original name, in the original order; the engine's own come last."""
        by_name: dict[str, nn.Parameter] = {}
        aliases: dict[str, nn.Parameter] = {}
        for name, parameter in self._tensors(wrapped, "_parameters", self._first):
            listed = self._first.get(name, name)
            (by_name if listed == name else aliases).setdefault(listed, parameter)
        # A tied parameter that the engine registers only under its second name.
        for name, parameter in aliases.items():
            by_name.setdefault(name, parameter)
        ordered = [name for name in self.parameters if name in by_name]
        objects = {id(by_name[name]) for name in ordered}
        foreign = [name for name in by_name if name not in self._first and id(by_name[name]) not in objects]
        return {name: by_name[name] for name in [*ordered, *foreign]}

    def buffers_of(self, wrapped: nn.Module) -> dict[str, Tensor]:
        """The buffers of the wrapped model by original name, without those that the engine added."""
        by_name = dict(self._tensors(wrapped, "_buffers", self.buffers))
        return {name: by_name[name] for name in self.buffers if name in by_name}

    def _tensors(self, wrapped: nn.Module, registry: str, known: Collection[str]) -> Iterator[tuple[str, Any]]:
        """Every (original name, tensor) of `registry` ("_parameters", "_buffers") below `wrapped`."""
        for path, module in _walk(wrapped):
            for key, tensor in getattr(module, registry).items():
                if tensor is not None and module in self._fqn:
                    yield _join(self._fqn[module], key), tensor
                elif tensor is not None:
                    yield clean_name(_join(path, key), known), tensor


def _walk(root: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module with each of its names, without the components of known wrappers."""
    yield path, root
    for key, child in root._modules.items():
        if child is not None:
            wrapper = key in _MARKED or (key == _AMBIGUOUS and isinstance(root, DistributedDataParallel))
            yield from _walk(child, path if wrapper else _join(path, key))


def clean_name(name: str, known: Collection[str]) -> str:
    """
    `name` without the components that wrappers add.

    A name in `known` is kept, and a component `module` is dropped only if the rest is in `known`: it may be the user's.
    """
    if name in known:
        return name
    parts = [part for part in name.split(".") if part not in _MARKED]
    shorter = list(parts)
    while ".".join(shorter) not in known:
        if _AMBIGUOUS not in shorter:
            return ".".join(parts)
        shorter.remove(_AMBIGUOUS)
    return ".".join(shorter)


def cleaned_parameters(wrapped: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a wrapped module by name, without known wrappers: for modules whose names were not recorded."""
    by_name: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for path, module in _walk(wrapped):
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                by_name[_join(path, key)] = parameter
    return by_name


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def is_below(name: str, module: str) -> bool:
    """True if a name is that of a module or of something in it; everything is in the root, whose name is ""."""
    return not module or name == module or name.startswith(f"{module}.")
