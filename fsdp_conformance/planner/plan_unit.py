"""
What the planner knows of a model's units: elements, operations of a forward, bytes that are kept for backward.

The model is on the meta device: its forward runs without data, and is counted instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.planner.plan_forward import ForwardCount

#: Operations of a backward over those of its forward: one product for the inputs' gradients, one for the parameters'.
BACKWARD_PER_FORWARD = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanUnit:
    """One unit: what is gathered and reduced together."""

    name: str
    """The module's; "" for the root."""
    num_parameters: int
    numel: int
    """Elements of its parameters; one that is shared belongs to the unit that comes first."""
    itemsize: int
    """Bytes of an element as it is stored between steps."""
    forward_flops: float = 0.0
    """Operations of one forward of this rank, units inside of it aside."""
    activation_bytes: float = 0.0
    """What autograd keeps from forward to backward, each storage once, parameters aside."""


def plan_units(
    model: nn.Module, inputs: Sequence[Any], is_unit: Callable[[nn.Module, str], bool], *, compute_dtype: torch.dtype
) -> list[PlanUnit]:
    """
    The units of a model on the meta device, the root first, then in the order of its modules.

    `inputs` are one rank's arguments of forward; `is_unit(module, name)` says which modules are units beside the root.
    Forward runs in `compute_dtype`, to which the model is cast.
    Raises ConfigError for a model that is not on meta, has no parameters, or cannot run there.
    """
    real = [name for name, tensor in model.named_parameters() if not tensor.is_meta]
    if real or not any(True for _ in model.parameters()):
        what = f"{real[0]} is on {model.get_parameter(real[0]).device.type}" if real else "it has no parameters"
        raise ConfigError([f"model: {what}, but all parameters should be on meta"], where="plan_units")
    modules = {name: module for name, module in model.named_modules() if name == "" or is_unit(module, name)}
    owned = _owned_parameters(model, modules)
    itemsizes = {
        name: max((parameter.dtype.itemsize for parameter in parameters), default=1)
        for name, parameters in owned.items()
    }

    def cast(value: Any) -> Any:
        return value.to(compute_dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    counted = ForwardCount(modules)
    try:
        counted.run(model.to(compute_dtype), pytree.tree_map(cast, tuple(inputs)))
    except Exception as error:
        raise ConfigError(
            [f"forward on meta raised {type(error).__name__}: {error}, but should run: it is counted, not computed"],
            where="plan_units",
        ) from error
    return [
        PlanUnit(
            name=name,
            num_parameters=len(owned[name]),
            numel=sum(parameter.numel() for parameter in owned[name]),
            itemsize=itemsizes[name],
            forward_flops=counted.flops[name],
            activation_bytes=counted.kept_bytes[name],
        )
        for name in owned
    ]


def blocks_of_lists(model: nn.Module) -> Callable[[nn.Module, str], bool]:
    """The usual units: the members of every ModuleList of the model, the outermost lists."""
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    members = {
        f"{name}.{key}"
        for name in lists
        if not any(name.startswith(f"{outer}.") for outer in lists)
        for key, _ in model.get_submodule(name).named_children()
    }
    return lambda module, name: name in members


def named_classes(classes: Sequence[str]) -> Callable[[nn.Module, str], bool]:
    """Every module whose class has one of these names."""
    return lambda module, name: type(module).__name__ in classes


def _owned_parameters(model: nn.Module, modules: dict[str, nn.Module]) -> dict[str, list[nn.Parameter]]:
    """Each parameter with the innermost unit that has it."""
    owned: dict[str, list[nn.Parameter]] = {name: [] for name in modules}
    for name, parameter in model.named_parameters():
        inside = [unit for unit in modules if unit == "" or name.startswith(f"{unit}.")]
        owned[max(inside, key=len)].append(parameter)
    return owned
