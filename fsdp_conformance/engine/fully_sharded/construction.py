"""
From a module to a unit: the parameters it owns, the device they compute on, and checks before they are sharded.

Inner units come first; the unit of an outer module owns the rest. A parameter that two inner units share is taken over
by the first outer unit that contains both.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import parameter as nn_parameter
from torch.utils import _python_dispatch
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_conformance.engine.bucketing.broadcast import broadcast
from fsdp_conformance.engine.fully_sharded.sharding_groups import ShardingGroups
from fsdp_conformance.engine.fully_sharded.shown_parameters import Member, Place
from fsdp_conformance.engine.fully_sharded.unit import ForeignParameter, ShardedUnit
from fsdp_conformance.engine.mesh.axis import communicates_from, devices_of
from fsdp_conformance.engine.verification import verify_parameters
from fsdp_conformance.errors import ConfigError, Unsupported

_WHERE = "fully sharded module"


@dataclass(kw_only=True)
class OwnedTensors:
    """The tensors that a unit finds below its modules."""

    members: list[Member] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)
    buffer_places: list[tuple[dict[str, Tensor | None], str]] = field(default_factory=list)
    """Where modules register their buffers: a registry and a key."""
    foreign: dict[int, ForeignParameter] = field(default_factory=dict)
    """Parameters that other units own, by id, with their places outside those units."""


def owned_tensors(
    modules: Sequence[tuple[str, nn.Module]],
    *,
    is_unit: Callable[[nn.Module], bool],
    is_owned: Callable[[nn.Parameter], bool],
    ignored: set[int],
) -> OwnedTensors:
    """
    Parameters and buffers below `modules`, except those of inner units.

    `ignored`: the ids of modules and parameters that are left out.
    """
    owned = OwnedTensors()
    members: dict[int, Member] = {}
    buffers: dict[int, Tensor] = {}
    visited: set[int] = set()
    for name, module in _walk(modules, ignored, is_unit):
        if id(module) in visited:
            continue
        visited.add(id(module))
        for key, parameter in module._parameters.items():
            if parameter is None or id(parameter) in ignored:
                continue
            fqn = f"{name}.{key}" if name else key
            place = Place(module, key)
            if is_owned(parameter):
                owned.foreign.setdefault(id(parameter), ForeignParameter(fqn, parameter, [])).places.append(place)
            elif id(parameter) in members:
                members[id(parameter)].places.append(place)
            else:
                members[id(parameter)] = Member(fqn, parameter, [place])
        buffers.update({id(buffer): buffer for buffer in module._buffers.values() if buffer is not None})
        owned.buffer_places += [(module._buffers, key) for key in module._buffers]
    owned.members = list(members.values())
    owned.buffers = list(buffers.values())
    return owned


def _walk(
    modules: Sequence[tuple[str, nn.Module]], skipped: set[int], is_unit: Callable[[nn.Module], bool]
) -> Iterator[tuple[str, nn.Module]]:
    for name, module in modules:
        if id(module) not in skipped:
            yield name, module
            below = [
                (f"{name}.{key}" if name else key, child)
                for key, child in module._modules.items()
                if child is not None and not is_unit(child)
            ]
            yield from _walk(below, skipped, is_unit)


def check_members(members: Sequence[Member]) -> None:
    """Raise for parameters that cannot be sharded, with all reasons."""
    problems = []
    for member in members:
        parameter = member.parameter
        if parameter.dtype.is_complex:
            problems.append(
                f"dtype of {member.name} must be a floating-point dtype or one of integers, got {parameter.dtype}"
            )
        if parameter.grad is not None:
            problems.append(f"{member.name} has a gradient: wrap the module before the first backward")
    if problems:
        raise ConfigError(problems, where=_WHERE)
    lazy = [member.name for member in members if _is_lazy(member.parameter)]
    if lazy:
        raise Unsupported("meta_init", f"{', '.join(lazy)} have no shape yet: run a forward first")
    foreign = [member.name for member in members if _is_subclass(member.parameter)]
    if foreign:
        raise Unsupported("tp", f"{', '.join(foreign)} are tensor subclasses (DTensor), which are sharded already")


def compute_device_of(members: Sequence[Member], device_id: torch.device | None) -> torch.device:
    """
    Where a unit computes: `device_id` if given, otherwise the device of its parameters.

    Raises ConfigError for parameters on several devices without a `device_id`, or on an accelerator other than it.
    """
    devices: dict[torch.device, list[str]] = {}
    for member in members:
        devices.setdefault(member.parameter.device, []).append(member.name)
    if device_id is not None:
        foreign = [device for device in devices if device.type not in ("cpu", "meta") and device != device_id]
        if foreign:
            raise ConfigError(
                [
                    f"device of {', '.join(devices[device][:3])}: expected {device_id}, got {device}"
                    for device in foreign
                ],
                where=_WHERE,
            )
        return device_id
    if len(devices) > 1:
        where = "; ".join(f"{', '.join(names[:3])} on {device}" for device, names in devices.items())
        raise ConfigError([f"parameters must be on one device, got {len(devices)} ({where})"], where=_WHERE)
    return next(iter(devices), torch.device("cpu"))


@torch.no_grad()
def place_tensors(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Move parameters and buffers to a device, in place."""
    for tensor in tensors:
        if tensor.device != device:
            tensor.data = tensor.data.to(device)


def synchronise(tensors: Sequence[Tensor], groups: ShardingGroups) -> None:
    """
    Overwrite tensors with those of the groups' first rank. Collective.

    Raises ConfigError if a group cannot communicate from where they are.
    """
    for device in {tensor.device: None for tensor in tensors if not tensor.is_meta}:
        for group in (groups.shard, groups.replica):
            if group is not None and group.size() > 1 and not communicates_from(group, device):
                types = devices_of(group)
                problem = f"sync_module_states needs a module on a device of its process group ({types}), got {device}"
                raise ConfigError([f"{problem}: move it there first, or pass device_id"], where=_WHERE)
    if groups.replica is not None:
        broadcast(tensors, groups.replica)
    broadcast(tensors, groups.shard)


def verify_unit(members: Sequence[Member], groups: ShardingGroups, device: torch.device, *, ignores: bool) -> None:
    """
    Raise StructureMismatch, on every rank, if ranks of a group would shard different parameters. Collective.

    Ranks that ignore different modules may have different names for what is left: `ignores` is whether this one ignores
    any. Skipped for a group that cannot communicate from the parameters' device, from which they are moved later.
    """
    named = [(member.name, member.parameter) for member in members]
    for group in (groups.shard, groups.replica):
        if group is not None and group.size() > 1 and communicates_from(group, device):
            verify_parameters(named, group, device=device, names_matter=not ignores)


class OwnerRegistry:
    """Which unit owns a parameter. Keeps neither alive."""

    def __init__(self) -> None:
        self._owners: MutableMapping[nn.Parameter, weakref.ref[ShardedUnit]] = WeakIdKeyDictionary()

    def of(self, parameter: nn.Parameter) -> ShardedUnit | None:
        """The unit, or None."""
        reference = self._owners.get(parameter)
        return None if reference is None else reference()

    def note(self, members: Iterable[Member], unit: ShardedUnit) -> None:
        """Make `unit` the owner of some parameters."""
        reference = weakref.ref(unit)
        for member in members:
            self._owners[member.parameter] = reference


#: Untyped, because mypy assumes that no parameter is either.
_is_lazy: Callable[[Any], bool] = nn_parameter.is_lazy
_is_subclass: Callable[[object], bool] = _python_dispatch.is_traceable_wrapper_subclass
