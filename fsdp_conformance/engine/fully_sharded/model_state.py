"""
State dicts of a module with units inside: in full, or sharded for torch.distributed.checkpoint.

Names are those of the module before it was wrapped, including every alias of a tied parameter. Values come from the
shards, in the parameters' own dtype. Only one unit at a time is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fsdp_conformance.engine.errors import ParameterReplaced
from fsdp_conformance.engine.fully_sharded.flat_parameter import FlatParameter
from fsdp_conformance.engine.fully_sharded.fully_shard import clean_unit_name, units_below
from fsdp_conformance.engine.fully_sharded.schedule import schedule_of
from fsdp_conformance.engine.fully_sharded.unit import ShardedUnit


@torch.no_grad()
def full_state_dict(module: nn.Module, *, rank0_only: bool = False, offload_to_cpu: bool = False) -> dict[str, Any]:
    """
    Every parameter and persistent buffer in full. Collective.

    `rank0_only`: only the first rank of each shard group gets values; the others get {}. `offload_to_cpu`: on the CPU.
    """
    units = units_below(module)
    values = _restored_buffers(units, offload_to_cpu)
    keeps = True
    for flat in _settled(units):
        payload = flat.storage.gathered()
        keeps = keeps and (not rank0_only or flat.storage.layout.rank == 0)
        if keeps:
            device = torch.device("cpu") if offload_to_cpu else payload.device
            for member, view in zip(flat.members, flat.storage.layout.views(payload), strict=False):
                values[id(member.parameter)] = view.to(device, copy=True)
    if not keeps:
        return {}
    return {name: _value(value, values, offload_to_cpu) for name, value in original_state(module)}


@torch.no_grad()
def load_full_state_dict(
    module: nn.Module, state: Mapping[str, Any], *, strict: bool = True
) -> tuple[list[str], list[str]]:
    """
    Write a full state dict into shards and buffers, without communication: every rank takes its part.

    Returns the missing and the unexpected names. Raises ParameterReplaced, before anything is written, naming every
    value of the wrong shape and, with `strict`, the missing and unexpected names.
    """
    flats = list(_settled(units_below(module)))
    homes = {id(member.parameter): (flat, i) for flat in flats for i, member in enumerate(flat.members)}
    expected = dict(original_state(module))
    missing = [name for name in expected if name not in state]
    unexpected = [name for name in state if name not in expected]
    problems = [f"{name} is missing" for name in missing if strict]
    problems += [f"{name} is unexpected: no parameter or buffer has that name" for name in unexpected if strict]
    for name, value in state.items():
        target = expected.get(name)
        if isinstance(target, Tensor) and isinstance(value, Tensor):
            flat, index = homes.get(id(target), (None, 0))
            shape = target.shape if flat is None else flat.members[index].shape
            if value.shape != shape:
                problems.append(f"shape of {name}: expected {tuple(shape)}, got {tuple(value.shape)}")
    if problems:
        raise ParameterReplaced(problems, where="load_full_state_dict")
    for name, value in state.items():
        target = expected.get(name)
        if not isinstance(target, Tensor) or not isinstance(value, Tensor):
            continue
        flat, index = homes.get(id(target), (None, 0))
        if flat is None:
            target.copy_(value)
        else:
            flat.write(index, value)
    return missing, unexpected


@torch.no_grad()
def sharded_state_dict(module: nn.Module) -> dict[str, Any]:
    """
    Every parameter as a DTensor, sharded over its unit's group along the first dim, and every persistent buffer.

    For torch.distributed.checkpoint, which can load it on another number of ranks. Collective: shards of a flat
    parameter are not rows, so each unit is gathered briefly. 0-dim parameters are included in full.
    """
    units = units_below(module)
    values = _restored_buffers(units, offload=False)
    for flat in _settled(units):
        mesh = mesh_of(flat)
        payload = flat.storage.gathered()
        for member, view in zip(flat.members, flat.storage.layout.views(payload), strict=False):
            values[id(member.parameter)] = as_dtensor(view, mesh)
    return {name: _value(value, values, offload=False) for name, value in original_state(module)}


def load_sharded_state_dict(module: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Write the DTensors of a `sharded_state_dict` from any number of ranks into shards. Collective."""
    full = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}
    load_full_state_dict(module, full, strict=strict)


def original_state(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Original names of parameters (the objects that the optimizer has), persistent buffers and extra state."""
    for name, value in nn.Module.state_dict(module, keep_vars=True).items():
        yield clean_unit_name(name), value


def original_names(module: nn.Module) -> dict[int, str]:
    """The name that each parameter is listed under, by id."""
    return {id(parameter): clean_unit_name(name) for name, parameter in module.named_parameters()}


def mesh_of(flat: FlatParameter) -> DeviceMesh:
    """The shard group as a mesh."""
    return DeviceMesh.from_group(flat.storage.group, flat.storage.pool.device.type)


def as_dtensor(full: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's rows of a whole tensor, copied, as a DTensor. A 0-dim tensor is copied whole."""
    if full.dim() == 0:
        return full.clone()
    rows = list(torch.chunk(full, mesh.size()))
    rank = mesh.get_local_rank()
    mine = rows[rank].clone() if rank < len(rows) else full.new_empty(0, *full.shape[1:])
    return DTensor.from_local(mine, mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride())


def _settled(units: Sequence[ShardedUnit]) -> Iterator[FlatParameter]:
    """The flat parameters of units, after adopting what users have changed."""
    for unit in units:
        schedule_of(unit).check_idle(unit, "state dict")
        unit.follow_users()
        yield from unit.flats


def _restored_buffers(units: Sequence[ShardedUnit], offload: bool) -> dict[int, Tensor]:
    """Buffers in low precision, converted to their own dtype, by id."""
    found = {key: value for unit in units for key, value in unit.buffers.in_own_dtype().items()}
    return {key: value.cpu() if offload else value for key, value in found.items()}


def _value(value: Any, values: Mapping[int, Tensor], offload: bool) -> Any:
    found = values.get(id(value))
    if found is not None:
        return found
    if not isinstance(value, Tensor):
        return value
    return value.detach().to("cpu", copy=True) if offload else value.detach()
