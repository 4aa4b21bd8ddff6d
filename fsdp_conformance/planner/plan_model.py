"""
A model as the planner sees it: built on the meta device, cut into units, and counted by one forward without data.

For each unit: its elements, the operations of a forward, and the bytes that autograd keeps for backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from fsdp_conformance.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanUnit:
    """One unit: parameters that are gathered and reduced together."""

    name: str
    """The module's name; "" for the root."""
    num_parameters: int
    numel: int
    """Elements of its parameters. A shared parameter belongs to the first of its units."""
    itemsize: int
    """Bytes per element as stored between steps."""
    forward_flops: float = 0.0
    """Operations of one forward of this rank, without those of inner units."""
    activation_bytes: float = 0.0
    """Bytes that autograd keeps from forward to backward: each storage once, without parameters."""


def counted(build: Callable[[], Any], classes: Sequence[str], *, compute_dtype: torch.dtype) -> list[PlanUnit]:
    """
    The units of the model that `build` returns with the inputs of one rank's forward: `model, (tokens,)`.

    `build` is called with meta as the default device. `classes` names the classes that become units; if it is empty,
    these are the members of module lists. Raises ConfigError if `build` raises or returns something else, and for
    classes that the model does not have.
    """
    where = "plan"
    try:
        with torch.device("meta"):
            built = build()
    except Exception as error:
        raise ConfigError(
            [f"the model's function must build it on the meta device, but raised {type(error).__name__}: {error}"],
            where=where,
        ) from error
    match built:
        case (nn.Module() as model, (list() | tuple()) as inputs):
            pass
        case _:
            problem = (
                "the model's function must return a module and a tuple of the inputs of one rank's forward, such as "
                f"model, (tokens,), got {_described(built)}"
            )
            raise ConfigError([problem], where=where)
    present = {type(module).__name__ for module in model.modules()}
    problems = [
        f"units must be classes of the model ({', '.join(sorted(present))}), got {name!r}"
        for name in classes
        if name not in present
    ]
    if problems:
        raise ConfigError(problems, where=where)
    is_unit = named_classes(classes) if classes else blocks_of_lists(model)
    return plan_units(model, inputs, is_unit, compute_dtype=compute_dtype)


def _described(built: object) -> str:
    if isinstance(built, tuple):
        return f"({', '.join(type(each).__name__ for each in built)})"
    return type(built).__name__


def plan_units(
    model: nn.Module, inputs: Sequence[Any], is_unit: Callable[[nn.Module, str], bool], *, compute_dtype: torch.dtype
) -> list[PlanUnit]:
    """
    The units of a model on the meta device: the root first, then the others in the order of its modules.

    `inputs` are the arguments of one rank's forward; `is_unit(module, name)` selects the units besides the root. Casts
    the model to `compute_dtype` and runs a forward. Raises ConfigError for a model that is not on meta, has no
    parameters, or cannot run there.
    """
    parameters = list(model.named_parameters())
    real = [name for name, parameter in parameters if not parameter.is_meta]
    if real or not parameters:
        got = f"{real[0]} on {model.get_parameter(real[0]).device.type}" if real else "none"
        raise ConfigError([f"the model's parameters must be on the meta device, got {got}"], where="plan_units")
    modules = {name: module for name, module in model.named_modules() if name == "" or is_unit(module, name)}
    owned = _owned_parameters(model, modules)
    itemsizes = {
        name: max((parameter.dtype.itemsize for parameter in parameters), default=1)
        for name, parameters in owned.items()
    }

    def cast(value: Any) -> Any:
        return value.to(compute_dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    count = _ForwardCount(modules)
    try:
        count.run(model.to(compute_dtype), pytree.tree_map(cast, tuple(inputs)))
    except Exception as error:
        raise ConfigError(
            [f"the model's forward must run on the meta device, but raised {type(error).__name__}: {error}"],
            where="plan_units",
        ) from error
    return [
        PlanUnit(
            name=name,
            num_parameters=len(owned[name]),
            numel=sum(parameter.numel() for parameter in owned[name]),
            itemsize=itemsizes[name],
            forward_flops=count.flops[name],
            activation_bytes=count.kept_bytes[name],
        )
        for name in owned
    ]


def blocks_of_lists(model: nn.Module) -> Callable[[nn.Module, str], bool]:
    """Selects the usual units: the members of every outermost ModuleList of the model."""
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    members = {
        f"{name}.{key}"
        for name in lists
        if not any(name.startswith(f"{outer}.") for outer in lists)
        for key, _ in model.get_submodule(name).named_children()
    }
    return lambda module, name: name in members


def named_classes(classes: Sequence[str]) -> Callable[[nn.Module, str], bool]:
    """Selects every module whose class has one of these names."""
    return lambda module, name: type(module).__name__ in classes


def _owned_parameters(model: nn.Module, modules: dict[str, nn.Module]) -> dict[str, list[nn.Parameter]]:
    """The parameters of each unit. A parameter belongs to the innermost unit that contains it."""
    owned: dict[str, list[nn.Parameter]] = {name: [] for name in modules}
    for name, parameter in model.named_parameters():
        inside = [unit for unit in modules if unit == "" or name.startswith(f"{unit}.")]
        owned[max(inside, key=len)].append(parameter)
    return owned


class _ForwardCount:
    """Counts one forward on the meta device: each unit's operations and the bytes that autograd keeps of it."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.modules = modules
        self.flops = dict.fromkeys(modules, 0.0)
        self.kept_bytes = dict.fromkeys(modules, 0.0)
        self._running: list[str] = []
        self._seen = 0
        # Keeps the storages alive, so that no other storage can get their address.
        self._kept: dict[int, torch.UntypedStorage] = {}

    def run(self, model: nn.Module, inputs: Sequence[Any]) -> None:
        """Run the forward. Raises what it raises."""
        for parameter in model.parameters():
            storage = parameter.untyped_storage()
            self._kept[storage._cdata] = storage
        counter = FlopCounterMode(display=False)
        keeping = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)
        with self._watched(counter), counter, keeping, _FusedAttention():
            model(*inputs)

    @contextmanager
    def _watched(self, counter: FlopCounterMode) -> Iterator[None]:
        handles = []
        for name, module in self.modules.items():
            handles.append(module.register_forward_pre_hook(lambda *_, name=name: self._enter(name, counter)))
            handles.append(module.register_forward_hook(lambda *_: self._leave(counter)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str, counter: FlopCounterMode) -> None:
        self._settle(counter)
        self._running.append(name)

    def _leave(self, counter: FlopCounterMode) -> None:
        self._settle(counter)
        self._running.pop()

    def _settle(self, counter: FlopCounterMode) -> None:
        """Charge the operations since the last call to the unit that was running."""
        total = counter.get_total_flops()
        if self._running:
            self.flops[self._running[-1]] += total - self._seen
        self._seen = total

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._kept:
            self._kept[storage._cdata] = storage
            self.kept_bytes[self._running[-1]] += storage.nbytes()
        return tensor


class _FusedAttention(TorchFunctionMode):
    """
    Runs attention without a mask as the fused kernel of accelerators, which does not keep the weights.

    The meta device would choose the plain kernel and count a tokens-by-tokens matrix for each head.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        return _attention(func, *args, **kwargs)


def _attention(
    plain: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    output: Tensor
    if attn_mask is not None or query.dim() != 4:
        output = plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return output
    if enable_gqa:
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    output = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    return output
