"""The public names of torch about CUDA and distribution, read from the torch that is installed."""

from __future__ import annotations

import importlib
import pkgutil
import types
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.cuda
import torch.distributed

#: Where torch.cuda.comm has its functions from; and a module that is private by name, but documented.
_MORE = ("torch.nn.parallel.comm", "torch.distributed._symmetric_memory")

#: The class of tensors, of which only some names are about CUDA.
TENSOR = "torch.Tensor"
_ABOUT_TENSORS = ("cuda", "is_cuda", "pin_memory", "is_pinned", "record_stream", "get_device", "device", "type")


@dataclass(frozen=True, slots=True)
class Name:
    """A public name of a module."""

    module: str
    name: str
    value: Any
    """When it was read."""
    attributes: dict[str, Any]
    """Of a class, when it was read."""
    also_in: list[str]
    """Other modules that have the same function or class under this name."""

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    @property
    def now(self) -> Any:
        """The value that it has now."""
        return _tensor_attribute(self.name) if self.module == TENSOR else getattr(_imported(self.module), self.name)

    @property
    def changed(self) -> bool:
        """True if it has another value than before, or is a class with other attributes."""
        return self.now is not self.value or _attributes(self.now) != self.attributes

    @property
    def elsewhere(self) -> dict[str, Any]:
        """The values that the other modules have now."""
        return {module: getattr(_imported(module), self.name) for module in self.also_in}


def names(left_out: Iterable[str]) -> list[Name]:
    """The public names of all modules but those in or below `left_out`."""
    known = [_name(TENSOR, name, _tensor_attribute(name)) for name in _ABOUT_TENSORS]
    first: dict[tuple[str, int], Name] = {}
    for module in _modules(tuple(left_out)):
        for name, value in _public(_imported(module)).items():
            mark = (name, id(value))
            if callable(value) and mark in first:
                first[mark].also_in.append(module)
            else:
                first[mark] = _name(module, name, value)
                known.append(first[mark])
    return known


def _modules(left_out: tuple[str, ...]) -> Iterator[str]:
    yield from _MORE
    for root in (torch.cuda, torch.distributed):
        yield root.__name__
        yield from _below(root, left_out)


def _below(package: Any, left_out: tuple[str, ...]) -> Iterator[str]:
    for _, name, is_package in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if name.rpartition(".")[2].startswith("_") or name in left_out:
            continue
        yield name
        if is_package:
            yield from _below(_imported(name), left_out)


def _imported(name: str) -> Any:
    with warnings.catch_warnings(action="ignore"):  # some are deprecated
        return importlib.import_module(name)


def _name(module: str, name: str, value: Any) -> Name:
    return Name(module, name, value, _attributes(value), [])


def _attributes(value: Any) -> dict[str, Any]:
    # Not isinstance: a deprecated value warns.
    return dict(vars(value)) if issubclass(type(value), type) else {}


def _tensor_attribute(name: str) -> Any:
    return next(vars(kind)[name] for kind in torch.Tensor.__mro__ if name in vars(kind))


def _public(module: Any) -> dict[str, Any]:
    listed = getattr(module, "__all__", None)
    if listed is not None:
        values = {name: getattr(module, name, None) for name in listed}
    else:
        with warnings.catch_warnings(action="ignore"):
            values = {name: value for name, value in vars(module).items() if _is_own(module, name, value)}
    return {name: value for name, value in values.items() if type(value) is not types.ModuleType}


def _is_own(module: Any, name: str, value: Any) -> bool:
    """True if a module without `__all__` does not merely import the name."""
    where = getattr(value, "__module__", None)
    return not name.startswith("_") and isinstance(where, str) and where.startswith((module.__name__, "torch._C"))
