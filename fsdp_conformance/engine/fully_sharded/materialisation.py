"""
Gives parameters and buffers on the meta device memory and values before they are sharded.

Each module that holds some gets memory on the compute device, then values from the user's function or its own
`reset_parameters`. Outer modules come before inner ones, each module once; tied parameters stay tied. All of this
happens in the parameters' own dtype, whatever dtype the unit computes in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from fsdp_conformance.engine.accelerator import present_accelerator
from fsdp_conformance.errors import ConfigError


def materialise(
    modules: Sequence[nn.Module],
    init_fn: Callable[[nn.Module], None] | None,
    *,
    device: torch.device | None,
    skipped: Callable[[nn.Module], bool],
) -> None:
    """
    Give memory and values to tensors on the meta device below `modules`, except in modules that are `skipped`.

    `device`: where to put them; None: the current accelerator, or the CPU. Raises ConfigError naming the parameters of
    modules that cannot be initialised: without an `init_fn` they need a `reset_parameters`.
    """
    found = [module for module in _walk(modules, skipped) if _has_meta(module)]
    if not found:
        return
    helpless = [] if init_fn is not None else [module for module in found if not hasattr(module, "reset_parameters")]
    if helpless:
        raise ConfigError(
            [
                f"cannot initialise {', '.join(_meta_names(module))} of a {type(module).__name__}, on meta: it has no "
                "reset_parameters, and no param_init_fn was given"
                for module in helpless
            ],
            where="meta-device initialisation",
        )
    place = device or present_accelerator() or torch.device("cpu")
    tied: dict[int, nn.Parameter] = {}
    with torch.no_grad():
        for module in found:
            before = dict(module._parameters)
            module.to_empty(device=place, recurse=False)
            for key, parameter in before.items():
                made = module._parameters[key]
                if parameter is not None and made is not None:
                    module._parameters[key] = tied.setdefault(id(parameter), made)
        for module in found:
            if init_fn is not None:
                init_fn(module)
            else:
                module.reset_parameters()  # type: ignore[operator]


def _walk(modules: Sequence[nn.Module], skipped: Callable[[nn.Module], bool]) -> Iterator[nn.Module]:
    seen: set[int] = set()

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        if id(module) in seen:
            return
        seen.add(id(module))
        yield module
        for child in module.children():
            if not skipped(child):
                yield from visit(child)

    for module in modules:
        yield from visit(module)


def _has_meta(module: nn.Module) -> bool:
    own = [*module._parameters.values(), *module._buffers.values()]
    return any(tensor is not None and tensor.is_meta for tensor in own)


def _meta_names(module: nn.Module) -> list[str]:
    own = {**module._parameters, **module._buffers}
    return [name for name, tensor in own.items() if tensor is not None and tensor.is_meta]
