"""
State of an optimizer over sharded parameters: saved in full or sharded for torch.distributed.checkpoint, and loaded.

A state dict is {"state": {name: {key: value}}, "param_groups": [{"params": [names], ...}]}. Tensors as large as the
rank's part of their parameter are sharded with it; others, such as step counters, are the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_conformance.engine.errors import StructureMismatch
from fsdp_conformance.engine.fully_sharded.flat_parameter import FlatParameter
from fsdp_conformance.engine.fully_sharded.fully_shard import units_below
from fsdp_conformance.engine.fully_sharded.local_pieces import LocalPieces
from fsdp_conformance.engine.fully_sharded.model_state import fits, original_names, own_pieces, settled
from fsdp_conformance.engine.verification import agree_on_text


@torch.no_grad()
def full_optimizer_state(
    module: nn.Module, optimizer: Optimizer, *, rank0_only: bool = False, offload_to_cpu: bool = False
) -> dict[str, Any]:
    """
    The state in full. Collective.

    `rank0_only`: ranks other than the first of their shard group get no sharded tensors. Raises StructureMismatch on
    every rank if ranks have state for different parameters.
    """

    def whole(flat: FlatParameter, view: Tensor) -> Tensor | None:
        if rank0_only and flat.storage.layout.rank != 0:
            return None
        return view.to("cpu" if offload_to_cpu else view.device, copy=True)

    names = original_names(module)
    found: dict[str, dict[str, Any]] = {}
    flats = list(_flats(module))
    for flat in flats:
        found |= _state_of(flat, optimizer, names, whole)
    owned = {id(member.parameter) for flat in flats for member in flat.members}
    for parameter, entries in optimizer.state.items():
        # Parameters outside any unit are not sharded.
        name = names.get(id(parameter))
        if name is not None and name not in found and id(parameter) not in owned:
            found[name] = dict(entries)
    state = {name: found[name] for name in names.values() if name in found}
    return {"state": state, "param_groups": _named_groups(optimizer, names)}


@torch.no_grad()
def sharded_optimizer_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """This rank's part of the state, as live storage, for torch.distributed.checkpoint. Not collective."""
    names = original_names(module)
    places = {id(member.parameter): (flat, i) for flat in _flats(module) for i, member in enumerate(flat.members)}
    found: dict[str, dict[str, Any]] = {}
    for parameter, entries in optimizer.state.items():
        flat, index = places.get(id(parameter), (None, 0))
        if id(parameter) in names:
            found[names[id(parameter)]] = {
                key: own_pieces(flat, index, value) if flat is not None and _is_part(value, flat, index) else value
                for key, value in entries.items()
            }
    return {"state": found, "param_groups": _named_groups(optimizer, names)}


@torch.no_grad()
def load_optimizer_state(module: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """
    Load a full state dict, saved with any number of ranks and any units, or a sharded one of this model.

    Parameters that are not in it end up without state. Collective if it has DTensors. Raises StructureMismatch naming
    unknown parameters and parts that do not fit.
    """
    optimizer.load_state_dict(loadable_optimizer_state(module, optimizer, state))


@torch.no_grad()
def loadable_optimizer_state(module: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """
    This rank's part of a full or sharded state dict, as `optimizer.load_state_dict` takes it.

    Raises StructureMismatch naming unknown parameters and parts that do not fit, or if it is not a state dict.
    """
    if "state" not in state:
        raise StructureMismatch(
            f"expected a state dict with 'state' and 'param_groups', got the keys {sorted(map(str, state))}",
            where="load_optimizer_state",
            hint="Pass it on every rank; with rank0_only only the first rank of a group has it.",
        )
    names = original_names(module)
    by_name = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"] if id(p) in names}
    unknown = sorted(set(state["state"]) - set(by_name))
    if unknown:
        raise StructureMismatch(
            f"the state has parameters that the optimizer does not: {', '.join(unknown)}",
            where="load_optimizer_state",
        )
    homes = {id(m.parameter): (flat, i) for flat in _flats(module) for i, m in enumerate(flat.members)}
    positions = {id(p): i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    loaded: dict[int, dict[str, Any]] = {}
    for name, entries in state["state"].items():
        parameter = by_name[name]
        flat, index = homes.get(id(parameter), (None, 0))
        loaded[positions[id(parameter)]] = {
            key: _own_part(name, flat, index, value) if isinstance(value, Tensor) else value
            for key, value in entries.items()
        }
    groups = _loaded_groups(optimizer, state, by_name, positions)
    return {"state": loaded, "param_groups": groups}


def _named_groups(optimizer: Optimizer, names: Mapping[int, str]) -> list[dict[str, Any]]:
    """The settings of the optimizer's groups, with names in place of parameters."""
    return [
        {**{key: value for key, value in group.items() if key != "params"}}
        | {"params": [names[id(p)] for p in group["params"] if id(p) in names]}
        for group in optimizer.param_groups
    ]


def _is_part(value: object, flat: FlatParameter, index: int) -> bool:
    """True if a value in an optimizer's state is sharded with its parameter."""
    return isinstance(value, Tensor) and not flat.is_whole and value.shape == flat.parts[index].shape


def _state_of(
    flat: FlatParameter,
    optimizer: Optimizer,
    names: Mapping[int, str],
    finish: Callable[[FlatParameter, Tensor], Tensor | None],
) -> dict[str, dict[str, Any]]:
    """State of the parameters in one storage. One all-gather per kind of tensor."""
    storage = flat.storage
    states = [optimizer.state.get(member.parameter, {}) for member in flat.members]
    sharded = [
        {key for key, value in entries.items() if isinstance(value, Tensor) and value.shape == part.shape}
        for entries, part in zip(states, flat.parts, strict=True)
    ]
    # A step counter of a parameter of one element has its shape on no rank but one.
    sharded = [{key for key in keys if key != "step"} for keys in sharded]
    known = [sorted(map(str, entries)) for entries in states]
    agree_on_text(repr(known), storage.group, device=storage.pool.device, what=f"optimizer state of {flat.name}")
    found: dict[str, dict[str, Any]] = {
        names[id(member.parameter)]: {key: value for key, value in entries.items() if key not in keys}
        for member, entries, keys in zip(flat.members, states, sharded, strict=True)
        if entries
    }
    for key in sorted({key for keys in sharded for key in keys}):
        dtype = next(entries[key].dtype for entries, keys in zip(states, sharded, strict=True) if key in keys)
        shard = torch.zeros(storage.layout.shard_numel, dtype=dtype, device=storage.shard_device)
        parts = storage.layout.parts(shard)
        for entries, keys, part in zip(states, sharded, parts, strict=False):
            if key in keys:
                part.copy_(entries[key])
        views = storage.layout.views(flat.storage.gathered(shard))
        for member, keys, view in zip(flat.members, sharded, views, strict=False):
            if key in keys:
                value = finish(flat, view)
                if value is not None:
                    found[names[id(member.parameter)]][key] = value
    return found


def _own_part(name: str, flat: FlatParameter | None, index: int, value: Tensor) -> Tensor:
    """
    This rank's part of a state tensor of the parameter `name`. One not as large as the parameter is the same on all
    ranks.

    Raises StructureMismatch for a part of a parameter that is sharded in another way.
    """
    if isinstance(value, LocalPieces):
        if flat is None or not fits(value, flat, index):
            raise StructureMismatch(
                f"state of {name}: expected this rank's part of it, got a part of {tuple(value.shape)} that begins "
                f"at element {value.begin} and has {value.part.numel()}",
                where="load_optimizer_state",
                hint="For other units or ranks, save it in full, or load it with torch.distributed.checkpoint.",
            )
        return value.part.to(flat.storage.shard_device, copy=True)
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if flat is None or value.shape != flat.members[index].shape or (value.dim() == 0):
        return value.clone()
    return flat.part_of(index, value).to(flat.storage.shard_device, copy=True)


def _loaded_groups(
    optimizer: Optimizer, state: Mapping[str, Any], by_name: Mapping[str, nn.Parameter], positions: Mapping[int, int]
) -> list[dict[str, Any]]:
    """The optimizer's groups, with the hyper-parameters saved for the same parameters."""
    saved = {name: group for group in state.get("param_groups", ()) for name in group["params"]}
    names = {id(parameter): name for name, parameter in by_name.items()}
    groups = []
    for group in optimizer.param_groups:
        known = [saved[names[id(p)]] for p in group["params"] if names.get(id(p)) in saved]
        settings = {key: value for key, value in (known[0] if known else group).items() if key != "params"}
        groups.append({**settings, "params": [positions[id(p)] for p in group["params"]]})
    return groups


def _flats(module: nn.Module) -> Iterator[FlatParameter]:
    yield from settled(units_below(module))
