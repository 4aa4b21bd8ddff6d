"""The calls by which the bundled adapters of torch wrap a model, written down as source."""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import is_dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.adapters.vendors import torch_fsdp2
from fsdp_conformance.adapters.vendors.torch_ddp import TorchDDP
from fsdp_conformance.adapters.vendors.torch_fsdp1 import TorchFSDP1
from fsdp_conformance.adapters.vendors.torch_fsdp2 import TorchFSDP2

#: The engines, each with the capabilities of a plan that its calls alone provide.
_BY_CALLS: dict[type[Adapter], frozenset[str]] = {
    TorchFSDP2: frozenset({"zero3", "zero2", "hsdp", "reshard_after_forward", "reshard_int", "multi_module_unit"}),
    TorchFSDP1: frozenset(
        {"zero3", "zero2", "no_shard", "hsdp", "reshard_after_forward", "prefetch_backward", "prefetch_forward"}
    ),
    TorchDDP: frozenset({"no_shard"}),
}

#: Of any engine: the device, and what the training loop does.
_OF_THE_LOOP = frozenset({"cpu_compute", "no_sync", "clip_grad_norm"})


def engine_of(adapter: type[Adapter]) -> type[Adapter] | None:
    """
    The bundled engine whose calls are all that an adapter makes: itself, or for a variant of FSDP1, FSDP1.

    None for any other, also for one that inherits from such an adapter and makes other calls, as `torch-zero1` does.
    """
    return next((e for e in _BY_CALLS if adapter.__module__ == e.__module__ and issubclass(adapter, e)), None)


def beyond_calls(engine: type[Adapter], capabilities: frozenset[str]) -> list[str]:
    """The capabilities that a plan asks for and that these calls alone do not provide."""
    return sorted(capabilities - _BY_CALLS[engine] - _OF_THE_LOOP)


class Calls:
    """Recorded calls, as (function, names of the modules, arguments as source without those equal to defaults)."""

    def __init__(self) -> None:
        self.made: list[tuple[str, tuple[str, ...], dict[str, str]]] = []
        self.types: set[str] = set()
        """Names of torch.distributed.fsdp that the arguments use."""
        self.unwritable: list[str] = []
        """Arguments that have no short source."""
        self.names: dict[int, str] = {}

    def name_modules(self, model: nn.Module) -> None:
        """Remember the names of a model's modules, before it is wrapped."""
        self.names = {id(module): name for name, module in model.named_modules()}

    def note(self, function: Callable[..., Any], called: str, module: Any, given: Mapping[str, Any]) -> None:
        """Add a call."""
        modules = module if isinstance(module, list) else [module]
        defaults = {name: each.default for name, each in inspect.signature(function).parameters.items()}
        written = {
            name: self._source(name, value)
            for name, value in given.items()
            if not _is_default(value, defaults.get(name, inspect.Parameter.empty))
        }
        self.made.append((called, tuple(self.names[id(each)] for each in modules), written))

    def _source(self, name: str, value: Any) -> str:
        if isinstance(value, DeviceMesh):
            shape, names = tuple(value.mesh.shape), value.mesh_dim_names
            return f"init_device_mesh({value.device_type!r}, {shape!r}, mesh_dim_names={names!r})"
        if isinstance(value, enum.Enum):
            self.types.add(type(value).__name__)
            return f"{type(value).__name__}.{value.name}"
        if is_dataclass(value):
            self.types.add(type(value).__name__)
            return repr(value)
        if isinstance(value, torch.device):
            return f"torch.{value!r}"
        if value is None or isinstance(value, bool | int | float | str):
            return repr(value)
        self.unwritable.append(f"{name}={value!r}")
        return ""


def _is_default(value: Any, default: Any) -> bool:
    """True if the value is the default, or if the default is None and all fields have their default values."""
    if default is None and is_dataclass(value):
        kind: Any = type(value)
        return bool(value == kind())
    return bool(value is default or (type(value) is type(default) and value == default))


@contextmanager
def recorded(calls: Calls) -> Iterator[None]:
    """Inside, note each call of fully_shard, FullyShardedDataParallel and DistributedDataParallel."""

    def constructor(owner: type[nn.Module]) -> Callable[..., None]:
        original = owner.__init__

        @functools.wraps(original)
        def noted(self: nn.Module, module: nn.Module, *args: Any, **given: Any) -> None:
            calls.note(original, owner.__name__, module, given)
            original(self, module, *args, **given)

        return noted

    def sharded(module: Any, **given: Any) -> Any:
        calls.note(fully_shard, "fully_shard", module, given)
        return fully_shard(module, **given)

    with ExitStack() as patches:
        patches.enter_context(patch.object(torch_fsdp2, "fully_shard", sharded))
        for owner in (FullyShardedDataParallel, DistributedDataParallel):
            patches.enter_context(patch.object(owner, "__init__", constructor(owner)))
        yield
