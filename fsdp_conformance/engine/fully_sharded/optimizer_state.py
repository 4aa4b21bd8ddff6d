"""
State of an optimizer over sharded parameters: saved in full or sharded for torch.distributed.checkpoint, and loaded.

A state dict is {"state": {name: {key: value}}, "param_groups": [{"params": [names], ...}]}. Tensors as large as the
rank's part of their parameter are sharded with it; others, such as step counters, are the same on every rank that has
elements of the parameter. A rank without elements has nothing to say about it: it cannot tell whether any rank has used
the parameter, and may count steps that the others have skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_conformance.engine.errors import StructureMismatch
from fsdp_conformance.engine.fully_sharded.flat_parameter import FlatParameter
from fsdp_conformance.engine.fully_sharded.fully_shard import units_below
from fsdp_conformance.engine.fully_sharded.local_pieces import LocalPieces
from fsdp_conformance.engine.fully_sharded.model_state import fits, original_names, own_pieces, settled
from fsdp_conformance.engine.verification import values_of_ranks

#: State that torch's optimizers have once for each parameter: tensors without dims, as a scalar parameter's state is.
_KEPT_ONCE = frozenset({"step", "eta", "mu", "mu_product"})


class _Entries(NamedTuple):
    """A parameter's state on a rank with elements of it, as that rank describes it to the others."""

    sharded: dict[str, torch.dtype]
    whole: dict[str, Any]
    """The entries that are not sharded. Tensors are on the CPU."""
    off_cpu: frozenset[str]
    """The keys of the tensors in `whole` that are not on the CPU on that rank."""


@torch.no_grad()
def full_optimizer_state(
    module: nn.Module, optimizer: Optimizer, *, rank0_only: bool = False, offload_to_cpu: bool = False
) -> dict[str, Any]:
    """
    The state in full. Collective.

    `rank0_only`: ranks other than the first of their shard group get no sharded tensors. Raises StructureMismatch on
    every rank if ranks with elements of a parameter have different state for it.
    """

    def whole(flat: FlatParameter, view: Tensor) -> Tensor | None:
        if rank0_only and flat.storage.layout.rank != 0:
            return None
        return view.to("cpu" if offload_to_cpu else view.device, copy=True)

    names = original_names(module)
    state_by_name: dict[str, dict[str, Any]] = {}
    flats = list(_flats(module))
    for flat in flats:
        state_by_name |= _state_of(flat, optimizer, names, whole)
    owned = {id(member.parameter) for flat in flats for member in flat.members}
    for parameter, entries in optimizer.state.items():
        # Parameters outside any unit are not sharded.
        name = names.get(id(parameter))
        if name is not None and name not in state_by_name and id(parameter) not in owned:
            state_by_name[name] = dict(entries)
    state = {name: state_by_name[name] for name in names.values() if name in state_by_name}
    return {"state": state, "param_groups": _named_groups(optimizer, names)}


@torch.no_grad()
def sharded_optimizer_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """
    This rank's part of the state, as live storage, for torch.distributed.checkpoint. Not collective.

    Parameters of which this rank has no elements are left to the others.
    """
    names = original_names(module)
    places = {id(member.parameter): (flat, i) for flat in _flats(module) for i, member in enumerate(flat.members)}
    state_by_name: dict[str, dict[str, Any]] = {}
    for parameter, entries in optimizer.state.items():
        flat, index = places.get(id(parameter), (None, 0))
        if id(parameter) in names and (flat is None or flat.has_elements(index)):
            state_by_name[names[id(parameter)]] = {
                key: own_pieces(flat, index, value) if flat is not None and _is_part(value, flat, index) else value
                for key, value in entries.items()
            }
    return {"state": state_by_name, "param_groups": _named_groups(optimizer, names)}


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
            key: _own_part(name, key, flat, index, value) if isinstance(value, Tensor) else value
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


def is_sharded(key: str, shape: torch.Size, flat: FlatParameter, index: int) -> bool:
    """True if a whole tensor of that shape in an optimizer's state is sharded with its parameter."""
    return shape == flat.members[index].shape and (len(shape) > 0 or key not in _KEPT_ONCE)


def _state_of(
    flat: FlatParameter,
    optimizer: Optimizer,
    names: Mapping[int, str],
    finish: Callable[[FlatParameter, Tensor], Tensor | None],
) -> dict[str, dict[str, Any]]:
    """State of the parameters in one storage. One all-gather per kind of tensor."""
    storage = flat.storage
    states = [optimizer.state.get(member.parameter, {}) for member in flat.members]
    descriptions = _described_by_holders(flat, states)
    state_by_name: dict[str, dict[str, Any]] = {}
    for index, (member, entries, description) in enumerate(zip(flat.members, states, descriptions, strict=True)):
        if description is not None:
            is_described_here = storage.layout.holders(index)[0] == storage.layout.rank
            state_by_name[names[id(member.parameter)]] = {
                key: entries[key]
                if is_described_here
                else _placed(value, storage.pool.device, key in description.off_cpu)
                for key, value in description.whole.items()
            }
    dtypes = {key: dtype for each in descriptions if each is not None for key, dtype in each.sharded.items()}
    for key, dtype in sorted(dtypes.items()):
        shard = torch.zeros(storage.layout.shard_numel, dtype=dtype, device=storage.shard_device)
        has_key = [each is not None and key in each.sharded for each in descriptions]
        for entries, has, part in zip(states, has_key, storage.layout.parts(shard), strict=False):
            if has and part.numel():
                part.copy_(entries[key])
        views = storage.layout.views(flat.storage.gathered(shard))
        for member, has, view in zip(flat.members, has_key, views, strict=False):
            if has:
                value = finish(flat, view)
                if value is not None:
                    state_by_name[names[id(member.parameter)]][key] = value
    return state_by_name


def _described_by_holders(flat: FlatParameter, states: Sequence[Mapping[str, Any]]) -> list[_Entries | None]:
    """
    The state of each parameter on the first rank with elements of it; None for no state. Collective.

    Raises StructureMismatch on every rank if others with elements have state with other names or dtypes.
    """
    layout, group = flat.storage.layout, flat.storage.group
    own_entries = [
        _described(entries, part) if entries and flat.has_elements(index) else None
        for index, (entries, part) in enumerate(zip(states, flat.parts, strict=True))
    ]
    if flat.is_whole:
        return own_entries
    by_rank: list[list[_Entries | None]] = values_of_ranks(own_entries, group)
    problems = []
    for index, member in enumerate(flat.members):
        first, *others = layout.holders(index)
        kinds = {rank: _kind(by_rank[rank][index]) for rank in (first, *others)}
        different = [rank for rank in others if kinds[rank] != kinds[first]]
        if different:
            problems.append(
                f"optimizer state of {member.name} of group ranks {different} differs from that of rank {first}"
            )
    if problems:
        raise StructureMismatch(problems, where=f"{flat.name}, rank {layout.rank}")
    return [by_rank[layout.holders(index)[0]][index] for index in range(len(flat.members))]


def _described(entries: Mapping[str, Any], part: Tensor) -> _Entries:
    """A parameter's state on this rank, as the rank describes it to the others."""
    sharded = {
        key: value.dtype
        for key, value in entries.items()
        if isinstance(value, Tensor) and value.shape == part.shape and key not in _KEPT_ONCE
    }
    whole = {key: value for key, value in entries.items() if key not in sharded}
    off_cpu = {key for key, value in whole.items() if isinstance(value, Tensor) and value.device.type != "cpu"}
    return _Entries(
        sharded, {key: value.cpu() if key in off_cpu else value for key, value in whole.items()}, frozenset(off_cpu)
    )


def _kind(entries: _Entries | None) -> object:
    """The part that has to be equal on all ranks."""
    return None if entries is None else (entries.sharded, set(entries.whole))


def _placed(value: Any, device: torch.device, off_cpu: bool) -> Any:
    """A value that another rank has described, on the device if it is not on the CPU there."""
    return value.to(device) if off_cpu else value


def _own_part(name: str, key: str, flat: FlatParameter | None, index: int, value: Tensor) -> Tensor:
    """
    This rank's part of the state tensor `key` of the parameter `name`. One not as large as the parameter is the same on
    all ranks.

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
    if flat is None or not is_sharded(key, value.shape, flat, index):
        return value.clone()
    return flat.part_of(index, value).to(flat.storage.shard_device, copy=True)


def _loaded_groups(
    optimizer: Optimizer, state: Mapping[str, Any], by_name: Mapping[str, nn.Parameter], positions: Mapping[int, int]
) -> list[dict[str, Any]]:
    """
    The optimizer's groups, with the hyper-parameters saved for the same parameters.

    Groups without parameters are matched by their place among such groups, because nothing else identifies them.
    """
    saved_groups = state.get("param_groups", ())
    saved = {name: group for group in saved_groups for name in group["params"]}
    empty = iter([group for group in saved_groups if not group["params"]])
    names = {id(parameter): name for name, parameter in by_name.items()}
    groups = []
    for group in optimizer.param_groups:
        own_names = [names[id(p)] for p in group["params"] if id(p) in names]
        saved_for_own = [saved[name] for name in own_names if name in saved]
        source = (saved_for_own[0] if saved_for_own else group) if own_names else next(empty, group)
        settings = {key: value for key, value in source.items() if key != "params"}
        groups.append({**settings, "params": [positions[id(p)] for p in group["params"]]})
    return groups


def _flats(module: nn.Module) -> Iterator[FlatParameter]:
    yield from settled(units_below(module))
