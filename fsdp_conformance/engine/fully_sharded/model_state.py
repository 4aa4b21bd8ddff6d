"""
State dicts of a module with units inside: in full, or sharded for torch.distributed.checkpoint.

Names are those of the module before it was wrapped, including every alias of a tied parameter. Values come from the
shards, in the parameters' own dtype. A full state dict gathers one unit at a time; a sharded one gathers nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_conformance.engine.errors import ParameterReplaced
from fsdp_conformance.engine.fully_sharded.flat_parameter import FlatParameter
from fsdp_conformance.engine.fully_sharded.fully_shard import clean_unit_name, units_below
from fsdp_conformance.engine.fully_sharded.local_pieces import LocalPieces
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
    for flat in settled(units):
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
    flats = list(settled(units_below(module)))
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
    This rank's part of every parameter, and every persistent buffer, as live storage. Not collective.

    For torch.distributed.checkpoint, which loads it in place, also on another number of ranks: `local_pieces`.
    """
    units = units_below(module)
    values = _restored_buffers(units, offload=False)
    for flat in settled(units):
        for index, member in enumerate(flat.members):
            values[id(member.parameter)] = own_pieces(flat, index, flat.parts[index])
    return {name: _value(value, values, offload=False) for name, value in original_state(module)}


@torch.no_grad()
def load_sharded_state_dict(
    module: nn.Module, state: Mapping[str, Any], *, strict: bool = True
) -> tuple[list[str], list[str]]:
    """
    Take over a `sharded_state_dict` of this module whose values were loaded. Collective if it has DTensors.

    Returns the missing and the unexpected names. Raises ParameterReplaced for parts that do not fit and, with `strict`,
    for missing and unexpected names, before anything is written.
    """
    flats = list(settled(units_below(module)))
    homes = {id(member.parameter): (flat, i) for flat in flats for i, member in enumerate(flat.members)}
    expected = dict(original_state(module))
    own: list[tuple[FlatParameter, int, Tensor]] = []
    others: dict[str, object] = {}
    for name, value in state.items():
        if isinstance(value, LocalPieces):
            flat, index = homes.get(id(expected.get(name)), (None, 0))
            if flat is None or not fits(value, flat, index):
                raise ParameterReplaced(
                    f"{name}: expected a part of this module's parameters, got one of {tuple(value.shape)}",
                    where="load_sharded_state_dict",
                )
            own.append((flat, index, value.part))
        else:
            others[name] = value.full_tensor() if isinstance(value, DTensor) else value
    missing = [name for name in expected if name not in state]
    unexpected = [name for name in state if name not in expected]
    if strict and (missing or unexpected):
        problems = [f"{name} is missing" for name in missing]
        problems += [f"{name} is unexpected: no parameter or buffer has that name" for name in unexpected]
        raise ParameterReplaced(problems, where="load_sharded_state_dict")
    load_full_state_dict(module, others, strict=False)
    for flat, index, part in own:
        flat.write_part(index, part)
    return missing, unexpected


def own_pieces(flat: FlatParameter, index: int, part: Tensor) -> Tensor:
    """This rank's part of a tensor of a parameter's shape, for a checkpoint. On one rank, the tensor itself."""
    part = part.detach()
    if flat.is_whole:
        return part
    if not flat.members[index].shape.numel():
        # Nothing would be saved of it in pieces, and then it would be missing.
        return part.view(flat.members[index].shape)
    return LocalPieces(part, flat.members[index].shape, flat.storage.layout.shard_slice(index).begin)


def fits(value: LocalPieces, flat: FlatParameter, index: int) -> bool:
    """True if a rank's part is that of this parameter, which need not be the same storage."""
    if flat.is_whole or value.shape != flat.members[index].shape:
        return False
    begin, end, _ = flat.storage.layout.shard_slice(index)
    return value.begin == begin and value.part.numel() == end - begin


def original_state(module: nn.Module) -> Iterator[tuple[str, object]]:
    """Original names of parameters (the objects that the optimizer has), persistent buffers and extra state."""
    for name, value in nn.Module.state_dict(module, keep_vars=True).items():
        yield clean_unit_name(name), value


def original_names(module: nn.Module) -> dict[int, str]:
    """The name that each parameter is listed under, by id."""
    return {id(parameter): clean_unit_name(name) for name, parameter in module.named_parameters()}


def settled(units: Sequence[ShardedUnit]) -> Iterator[FlatParameter]:
    """The flat parameters of units, after adopting what users have changed. Raises TrainingStateError in a step."""
    for unit in units:
        unit.schedule.check_idle(unit, "state dict")
        unit.follow_users()
        yield from unit.flats


def _restored_buffers(units: Sequence[ShardedUnit], offload: bool) -> dict[int, Tensor]:
    """Buffers in low precision, converted to their own dtype, by id."""
    buffers = {key: value for unit in units for key, value in unit.buffers.in_own_dtype().items()}
    return {key: value.cpu() if offload else value for key, value in buffers.items()}


def _value(value: object, values: Mapping[int, Tensor], offload: bool) -> object:
    replacement = values.get(id(value))
    if replacement is not None:
        return replacement
    if not isinstance(value, Tensor):
        return value
    return value.detach().to("cpu", copy=True) if offload else value.detach()
