"""
Where a collective along a mesh takes place: the group of this rank's row, from an axis of a DeviceMesh.

In a mesh of ranks [[0, 1], [2, 3]] the rows of axis 1 are [0, 1] and [2, 3], and those of axis 0 are [0, 2] and [1, 3].
Each row communicates separately, and its ranks are counted from 0: group rank 1 of axis 1 is rank 1 in one row and
rank 3 in the other.
"""

from __future__ import annotations

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fsdp_conformance.engine.communication import resolve_group
from fsdp_conformance.engine.errors import MeshError

#: A group, or one axis of a mesh by its index or its name.
Axis = ProcessGroup | tuple[DeviceMesh, int | str]

_WHERE = "axis of a mesh"


def axis_group(axis: Axis) -> ProcessGroup:
    """
    This rank's group along an axis. A group is returned unchanged.

    Raises MeshError for a missing or unknown axis and for a rank outside the mesh, and EngineError for a group that
    does not contain this rank.
    """
    if isinstance(axis, DeviceMesh):
        raise MeshError(f"axis must be one axis of a mesh, such as (mesh, 0), got {axis}", where=_WHERE)
    if not isinstance(axis, tuple):
        return resolve_group(axis)
    mesh, key = axis
    names = mesh.mesh_dim_names
    problems = []
    if isinstance(key, str):
        if not names:
            problems.append(f"axis must be an index, because the mesh has no names, got {key!r}")
        elif key not in names:
            problems.append(f"axis must be one of {', '.join(map(repr, names))}, got {key!r}")
    elif not -mesh.ndim <= key < mesh.ndim:
        problems.append(f"axis must be from {-mesh.ndim} to {mesh.ndim - 1}, got {key}")
    if mesh.get_coordinate() is None:
        problems.append(f"the mesh must contain this rank, got {mesh}")
    if problems:
        raise MeshError(problems, where=_WHERE)
    return mesh.get_group(key if isinstance(key, str) else key % mesh.ndim)


def communicates_from(group: ProcessGroup, device: torch.device) -> bool:
    """
    True if a group has a backend for tensors on a device.

    A process group written in Python is its own backend and names no devices, so it is asked.
    """
    named = group._device_types
    return not named or any(backend_device.type == device.type for backend_device in named)


def devices_of(group: ProcessGroup) -> str:
    """The types of device that a group has backends for, in messages."""
    return ", ".join(sorted({backend_device.type for backend_device in group._device_types}))
