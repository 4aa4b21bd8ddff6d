"""
Where a collective along a mesh takes place: the group of this rank's row, from an axis of a DeviceMesh or as it is.

In a mesh of ranks [[0, 1], [2, 3]] axis 1 has the rows [0, 1] and [2, 3], and axis 0 has [0, 2] and [1, 3]. Each row
communicates by itself, and its ranks are counted from 0: group rank 1 of axis 1 is rank 1 in the one row and 3 in the
other.
"""

from __future__ import annotations

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fsdp_conformance.engine.errors import MeshError
from fsdp_conformance.engine.flat_collectives import resolve_group

#: A group, or one axis of a mesh by its index or its name.
Axis = ProcessGroup | tuple[DeviceMesh, int | str]

_WHERE = "axis of a mesh"


def axis_group(axis: Axis) -> ProcessGroup:
    """
    The group that this rank is in along an axis; a group is its own.

    Raises MeshError for an axis that the mesh does not have, or none, and for a rank that is not in the mesh;
    EngineError for a group that this rank is not in.
    """
    if isinstance(axis, DeviceMesh):
        raise MeshError(f"axis={axis}, but should be one of its axes: (mesh, 0)", where=_WHERE)
    if not isinstance(axis, tuple):
        return resolve_group(axis)
    mesh, key = axis
    names = mesh.mesh_dim_names or ()
    problems = []
    if isinstance(key, str):
        if key not in names:
            problems.append(f"axis={key!r}, but should be one of {', '.join(map(repr, names)) or 'none: unnamed axes'}")
    elif not -mesh.ndim <= key < mesh.ndim:
        problems.append(f"axis={key}, but should be from {-mesh.ndim} to {mesh.ndim - 1}")
    if mesh.get_coordinate() is None:
        problems.append(f"{mesh}, but should be a mesh that this rank is in")
    if problems:
        raise MeshError(problems, where=_WHERE)
    return mesh.get_group(key if isinstance(key, str) else key % mesh.ndim)


def communicates_from(group: ProcessGroup, device: torch.device) -> bool:
    """Whether a group has a backend for tensors on a device."""
    return any(known.type == device.type for known in group._device_types)


def source_problems(source: int, group: ProcessGroup) -> list[str]:
    """What is wrong with a group rank that is to be the source of a collective."""
    if 0 <= source < group.size():
        return []
    return [f"source={source}, but should be a rank of the group: from 0 to {group.size() - 1}"]
