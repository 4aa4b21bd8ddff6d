"""
Checkpoints in a directory: model and optimizer, written and read with torch.distributed.checkpoint.

A checkpoint loads with any number of ranks and any units. What the optimizer's state consists of is read from the
checkpoint, so an optimizer that has not stepped yet takes over all of it, and parameters without state stay without.
In a pipeline, each stage saves its module and its optimizer in the same directory; `stage` tells the optimizers apart.
"""

from __future__ import annotations

import copy
import os
from concurrent.futures import Future
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.optim import Optimizer

from fsdp_conformance.engine.errors import StructureMismatch
from fsdp_conformance.engine.fully_sharded.flat_parameter import FlatParameter
from fsdp_conformance.engine.fully_sharded.fully_shard import units_below
from fsdp_conformance.engine.fully_sharded.local_pieces import LocalPieces
from fsdp_conformance.engine.fully_sharded.model_state import (
    load_sharded_state_dict,
    original_names,
    own_pieces,
    sharded_state_dict,
)
from fsdp_conformance.engine.fully_sharded.optimizer_state import (
    is_sharded,
    load_optimizer_state,
    sharded_optimizer_state,
)

_MODEL, _OPTIMIZER = "model", "optim"


def save_checkpoint(
    module: nn.Module, optimizer: Optimizer | None, directory: str | os.PathLike[str], *, stage: str = ""
) -> None:
    """
    Save model and optimizer in a directory that every rank sees. Collective over all ranks.

    `stage`: where other ranks have other parts of a model, the name of the part that this one has. Names of parameters
    must be different in all parts.
    """
    save(_state_of(module, optimizer, stage), checkpoint_id=directory)


def save_checkpoint_async(
    module: nn.Module,
    optimizer: Optimizer | None,
    directory: str | os.PathLike[str],
    *,
    process_group: dist.ProcessGroup,
    stage: str = "",
) -> Future[Any]:
    """
    Start to save what model and optimizer are now, and return a future of the end. Collective.

    `process_group` has all ranks and a backend for CPU tensors, and nothing else may use it until the future is done.
    `stage`: see `save_checkpoint`.
    """
    state, writer = _state_of(module, optimizer, stage), _SnapshotWriter(directory)
    return cast("Future[Any]", async_save(state, storage_writer=writer, process_group=process_group))


@torch.no_grad()
def load_checkpoint(
    module: nn.Module, optimizer: Optimizer | None, directory: str | os.PathLike[str], *, stage: str = ""
) -> None:
    """
    Load what `save_checkpoint` has written, with any number of ranks. Collective over all ranks.

    Raises StructureMismatch if an optimizer is to be loaded and the checkpoint has none.
    """
    metadata = FileSystemReader(directory).read_metadata()
    state: dict[str, Any] = {_MODEL: sharded_state_dict(module)}
    if optimizer is not None:
        state[_optimizer_key(stage)] = _room_for_optimizer(module, metadata, _optimizer_key(stage))
    load(state, checkpoint_id=directory)
    load_sharded_state_dict(module, state[_MODEL])
    if optimizer is not None:
        load_optimizer_state(module, optimizer, _as_lists(state[_optimizer_key(stage)]))


def _state_of(module: nn.Module, optimizer: Optimizer | None, stage: str) -> dict[str, Any]:
    state: dict[str, Any] = {_MODEL: sharded_state_dict(module)}
    if optimizer is not None:
        state[_optimizer_key(stage)] = sharded_optimizer_state(module, optimizer)
    return state


def _optimizer_key(stage: str) -> str:
    """The key of the optimizer's state. It names the stage, because groups have only numbers, alike in all stages."""
    return f"{_OPTIMIZER} of {stage}" if stage else _OPTIMIZER


def _room_for_optimizer(module: nn.Module, metadata: Metadata, optimizer_key: str) -> dict[str, Any]:
    """The optimizer's state in a checkpoint, with room for its values: tensors as large as a parameter are sharded."""
    names = original_names(module)
    homes = {
        names[id(member.parameter)]: (flat, index)
        for unit in units_below(module)
        for flat in unit.flats
        for index, member in enumerate(flat.members)
    }
    room: dict[str, Any] = {}
    for key, path in metadata.planner_data.items():
        # An earlier version wrote down names of state without elements, and nothing of the state.
        if path[0] == optimizer_key and key in metadata.state_dict_metadata:
            inner = room
            *outer, last = map(str, path[1:])
            for part in outer:
                inner = inner.setdefault(part, {})
            home = homes.get(outer[1]) if outer[:1] == ["state"] and len(outer) > 1 else None
            inner[last] = _room(metadata.state_dict_metadata[key], last, home)
    if not room:
        raise StructureMismatch("the checkpoint has no optimizer state", where="load_checkpoint")
    return {"state": {}} | room


def _room(saved: object, key: str, home: tuple[FlatParameter, int] | None) -> Tensor | None:
    if not isinstance(saved, TensorStorageMetadata):
        return None
    dtype = saved.properties.dtype
    if home is None:
        return torch.empty(saved.size, dtype=dtype)
    flat, index = home
    if not is_sharded(key, saved.size, flat, index):
        return torch.empty(saved.size, dtype=dtype)
    return own_pieces(flat, index, torch.empty_like(flat.parts[index], dtype=dtype))


class _SnapshotWriter(FileSystemWriter):
    """Copies the state before `async_save` returns, so that training may go on while it is written."""

    def stage(self, state_dict: Any) -> Any:
        """Copies on the CPU."""
        return _snapshot(state_dict)


def _snapshot(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _snapshot(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_snapshot(item) for item in value])
    if isinstance(value, LocalPieces):
        return LocalPieces(_snapshot(value.part), value.shape, value.begin)
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.copy(value)


def _as_lists(state: dict[str, Any]) -> dict[str, Any]:
    """The groups as a list of dicts: a checkpoint that has tensors in them has their positions instead."""
    groups = state["param_groups"]
    if isinstance(groups, dict):
        groups = [groups[index] for index in sorted(groups, key=int)]
    return {**state, "param_groups": groups}
