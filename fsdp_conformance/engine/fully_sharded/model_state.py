"""
State dicts of a module with units inside: in full, or sharded for torch.distributed.checkpoint.

Names are those of the module before it was wrapped, every alias of a tied parameter included. Values are those of the
shards, in the parameters' own dtype. Whole values are put together one unit at a time.
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
from fsdp_conformance.engine.fully_sharded.unit import ShardedUnit


@torch.no_grad()
def full_state_dict(module: nn.Module, *, rank0_only: bool = False, offload_to_cpu: bool = False) -> dict[str, Any]:
    """
    Every parameter and persistent buffer in full. Collective.

    `rank0_only`: ranks of a shard group other than its first get an empty dict. `offload_to_cpu`: copies on the CPU.
    """
    units = units_below(module)
    values = _restored_buffers(units, offload_to_cpu)
    keeps = True
    for flat in _settled(units):
        payload = flat.gathered()
        keeps = keeps and (not rank0_only or flat.chunk.layout.rank == 0)
        if keeps:
            device = torch.device("cpu") if offload_to_cpu else payload.device
            for member, view in zip(flat.members, flat.chunk.layout.views(payload), strict=False):
                values[id(member.parameter)] = view.to(device, copy=True)
    if not keeps:
        return {}
    return {name: _value(value, values, offload_to_cpu) for name, value in original_state(module)}


@torch.no_grad()
def load_full_state_dict(
    module: nn.Module, state: Mapping[str, Any], *, strict: bool = True
) -> tuple[list[str], list[str]]:
    """
    Write a full state dict into shards and buffers; nothing is communicated: every rank takes its part.

    Returns the names that were missing and those that were not expected; with `strict` they are an error. Raises
    ParameterReplaced naming both, and every value of another shape; then nothing was written.
    """
    flats = list(_settled(units_below(module)))
    homes = {id(member.parameter): (flat, i) for flat in flats for i, member in enumerate(flat.members)}
    expected = dict(original_state(module))
    missing = [name for name in expected if name not in state]
    unexpected = [name for name in state if name not in expected]
    problems = [f"{name} is missing, but should be there" for name in missing if strict]
    problems += [f"{name} is there, but should not be: no parameter has that name" for name in unexpected if strict]
    for name, value in state.items():
        target = expected.get(name)
        if isinstance(target, Tensor) and isinstance(value, Tensor):
            flat, index = homes.get(id(target), (None, 0))
            shape = target.shape if flat is None else flat.members[index].shape
            if value.shape != shape:
                problems.append(f"shape={tuple(value.shape)} of {name}, but should be {tuple(shape)}")
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

    For torch.distributed.checkpoint, which can load it at another number of ranks. Collective: shards of a flat
    parameter are no rows, so each unit is gathered for a moment. 0-dim parameters are given in full.
    """
    units = units_below(module)
    values = _restored_buffers(units, offload=False)
    for flat in _settled(units):
        mesh = mesh_of(flat)
        payload = flat.gathered()
        for member, view in zip(flat.members, flat.chunk.layout.views(payload), strict=False):
            values[id(member.parameter)] = as_dtensor(view, mesh)
    return {name: _value(value, values, offload=False) for name, value in original_state(module)}


def load_sharded_state_dict(module: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Write a state dict with the DTensors of `sharded_state_dict`, at any number of ranks, into shards. Collective."""
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
    return DeviceMesh.from_group(flat.chunk.group, flat.chunk.pool.device.type)


def as_dtensor(full: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's rows of a whole tensor, copied, as a DTensor. A 0-dim tensor is copied whole."""
    if full.dim() == 0:
        return full.clone()
    rows = list(torch.chunk(full, mesh.size()))
    rank = mesh.get_local_rank()
    mine = rows[rank].clone() if rank < len(rows) else full.new_empty(0, *full.shape[1:])
    return DTensor.from_local(mine, mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride())


def _settled(units: Sequence[ShardedUnit]) -> Iterator[FlatParameter]:
    """The flat parameters of units, after what users have changed was taken over."""
    for unit in units:
        unit.check_idle("state dict")
        unit.follow_users()
        yield from unit.flats


def _restored_buffers(units: Sequence[ShardedUnit], offload: bool) -> dict[int, Tensor]:
    """Buffers that are in low precision, in the dtype that they had, by id."""
    found = {key: value for unit in units for key, value in unit.buffers.in_own_dtype().items()}
    return {key: value.cpu() if offload else value for key, value in found.items()}


def _value(value: Any, values: Mapping[int, Tensor], offload: bool) -> Any:
    found = values.get(id(value))
    if found is not None:
        return found
    if not isinstance(value, Tensor):
        return value
    return value.detach().to("cpu", copy=True) if offload else value.detach()
