"""Models of which modules are on the meta device: moved as they are, or materialised after an engine wrapped them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn


@torch.no_grad()
def materialise(
    model: nn.Module,
    *,
    device: torch.device,
    init_fn: Callable[[nn.Module], object] | None = None,
    skipped: Collection[nn.Module] = (),
) -> None:
    """
    Give memory, then values, to each module that has tensors on meta, outer modules first, except in `skipped` ones.

    Values come from `init_fn`, or from the module's `reset_parameters`. A module without one stays on meta, so that the
    engine can tell: memory without values would be garbage.
    """
    deferred = [module for module in _walk(model, set(skipped), set()) if _has_meta(module)]
    ready = [module for module in deferred if init_fn is not None or hasattr(module, "reset_parameters")]
    for module in ready:
        module.to_empty(device=device, recurse=False)
    for module in ready:
        initialise(module, init_fn)


def move_values(model: nn.Module, device: torch.device) -> None:
    """
    Move a model to the device except for its tensors on meta, such as those of ignored modules.

    `Module.to` refuses a model that has any.
    """
    if not any(map(_has_meta, model.modules())):
        model.to(device)
        return
    for child in model.children():
        move_values(child, device)
    for tensor in (*model.parameters(recurse=False), *model.buffers(recurse=False)):
        if not tensor.is_meta:
            tensor.data = tensor.data.to(device)


def allocating(init_fn: Any, device: torch.device) -> Any:
    """
    The user's function for engines whose own also has to allocate memory, before which modules are on meta.

    A value that cannot be called is returned unchanged: refusing it is up to the engine.
    """
    if not callable(init_fn):
        return init_fn

    def allocate_and_initialise(module: nn.Module) -> None:
        if [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            module.to_empty(device=device, recurse=False)
            init_fn(module)

    return allocate_and_initialise


def initialise(module: nn.Module, init_fn: Callable[[nn.Module], object] | None) -> None:
    """Give values to the tensors of one module."""
    if init_fn is not None:
        init_fn(module)
        return
    initialised: Any = module
    initialised.reset_parameters()


def _walk(module: nn.Module, skipped: set[nn.Module], seen: set[nn.Module]) -> Iterator[nn.Module]:
    if module in skipped or module in seen:
        return
    seen.add(module)
    yield module
    for child in module.children():
        yield from _walk(child, skipped, seen)


def _has_meta(module: nn.Module) -> bool:
    own = [*module._parameters.values(), *module._buffers.values()]
    return any(tensor is not None and tensor.is_meta for tensor in own)
