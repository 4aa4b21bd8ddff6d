"""
Gives parameters and buffers on the meta device memory and values before they are sharded.

Outer modules come before inner ones, each once; tied parameters stay tied. A user's function gives memory and values to
the modules that it gets, as in torch's FullyShardedDataParallel. Without one, each module gets memory on the compute
device, then values from its own `reset_parameters`. All of this happens in the parameters' own dtype, whatever dtype
the unit computes in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_conformance.engine.accelerator import present_accelerator
from fsdp_conformance.errors import ConfigError

_WHERE = "meta-device initialisation"

#: Parameters on meta to what took their place in units that have been made. Units that are made later may share them.
_replaced: MutableMapping[nn.Parameter, nn.Parameter] = WeakIdKeyDictionary()


def materialise(
    modules: Sequence[nn.Module],
    init_fn: Callable[[nn.Module], None] | None,
    *,
    device: torch.device | None,
    skipped: Callable[[nn.Module], bool],
) -> None:
    """
    Give memory and values to tensors on the meta device below `modules`, except in modules that are `skipped`.

    `init_fn`: called with each module that owns such tensors, while they are on meta; it replaces them, for
    example by `module.to_empty(device=..., recurse=False)`, and sets them. `device`: where tensors are put without it;
    None: the current accelerator, or the CPU. Raises ConfigError naming the parameters of modules that have no
    `reset_parameters` when there is no `init_fn`, and those that it left on meta.
    """
    meta_modules = [module for module in _walk(modules, skipped) if _has_meta(module)]
    if not meta_modules:
        return
    ties = _Ties()
    with torch.no_grad(), _shared_with_earlier_units(meta_modules):
        if init_fn is not None:
            for module in meta_modules:
                with ties.kept(module):
                    init_fn(module)
            _check_initialised(meta_modules)
        else:
            _check_initialisable(meta_modules)
            for module in meta_modules:
                with ties.kept(module):
                    module.to_empty(device=device or present_accelerator() or torch.device("cpu"), recurse=False)
            for module in meta_modules:
                module.reset_parameters()  # type: ignore[operator]
    ties.note()


@contextmanager
def _shared_with_earlier_units(modules: Sequence[nn.Module]) -> Iterator[None]:
    """
    A context in which modules get memory and values. After it they share what earlier units have made of a parameter.

    Not before: the earlier unit has sharded it, and `reset_parameters` would write to the shard.
    """
    shared = [
        (module, key, _replaced[parameter])
        for module in modules
        for key, parameter in module._parameters.items()
        if parameter is not None and parameter in _replaced
    ]
    yield
    for module, key, parameter in shared:
        module._parameters[key] = parameter


class _Ties:
    """Parameters that were replaced, so that modules that shared one share what replaces it."""

    def __init__(self) -> None:
        self._replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        """Old and new parameter by the id of the old one, which is kept alive, because ids are used again."""

    def note(self) -> None:
        """Let units that are made later share the replacements; a parameter keeps the first that it ever had."""
        for old, new in self._replaced.values():
            _replaced.setdefault(old, new)

    @contextmanager
    def kept(self, module: nn.Module) -> Iterator[None]:
        """A context that may replace the parameters of `module`: all modules get the first replacement of each."""
        before = dict(module._parameters)
        yield
        for key, old in before.items():
            new = module._parameters.get(key)
            if old is not None and new is not None and new is not old:
                module._parameters[key] = self._replaced.setdefault(id(old), (old, new))[1]


def _check_initialisable(modules: Sequence[nn.Module]) -> None:
    problems = [
        f"cannot initialise {', '.join(_meta_names(module))} of a {type(module).__name__}, on meta: it has no "
        "reset_parameters, and no param_init_fn was given"
        for module in modules
        if not hasattr(module, "reset_parameters")
    ]
    if problems:
        raise ConfigError(problems, where=_WHERE)


def _check_initialised(modules: Sequence[nn.Module]) -> None:
    problems = [
        f"{', '.join(_meta_names(module))} of a {type(module).__name__} must not be on meta after param_init_fn: give "
        "them memory there, for example with module.to_empty(device=..., recurse=False)"
        for module in modules
        if _has_meta(module)
    ]
    if problems:
        raise ConfigError(problems, where=_WHERE)


def _walk(modules: Sequence[nn.Module], skipped: Callable[[nn.Module], bool]) -> Iterator[nn.Module]:
    visited: set[int] = set()

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        if id(module) in visited:
            return
        visited.add(id(module))
        yield module
        for child in module.children():
            if not skipped(child):
                yield from visit(child)

    for module in modules:
        yield from visit(module)


def _has_meta(module: nn.Module) -> bool:
    tensors = [*module._parameters.values(), *module._buffers.values()]
    return any(tensor is not None and tensor.is_meta for tensor in tensors)


def _meta_names(module: nn.Module) -> list[str]:
    tensors = {**module._parameters, **module._buffers}
    return [name for name, tensor in tensors.items() if tensor is not None and tensor.is_meta]
