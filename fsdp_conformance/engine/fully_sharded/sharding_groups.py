"""The groups of a unit, from what users pass: one to shard over, and one to replicate over."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fsdp_conformance.engine.communication import resolve_group
from fsdp_conformance.engine.mesh.axis import axis_group
from fsdp_conformance.engine.sharding_strategy import ShardingStrategy
from fsdp_conformance.errors import ConfigError

_WHERE = "process_group and device_mesh"


class ShardingGroups(NamedTuple):
    """Where a unit communicates."""

    shard: ProcessGroup
    """Parameters are gathered, and gradients reduce-scattered, over it."""
    replica: ProcessGroup | None
    """Gradients are all-reduced over it; its members hold the same shard. None: there is one replica."""

    @property
    def size(self) -> int:
        """Ranks that gradients are averaged over."""
        return self.shard.size() * (1 if self.replica is None else self.replica.size())

    def replicated(self) -> ShardingGroups:
        """Groups of the same ranks in which each rank holds everything. Collective the first time."""
        if self.replica is not None or self.shard.size() == 1:
            return self
        return ShardingGroups(_own_group(), self.shard)


def sharding_groups(
    group: ProcessGroup | tuple[ProcessGroup, ProcessGroup] | None,
    mesh: DeviceMesh | None,
    strategy: ShardingStrategy,
) -> ShardingGroups:
    """
    The groups that a strategy uses. Collective if a group of one rank has to be created.

    `group`: one group, or a shard group and a replica group. `mesh`: one axis, or a replica axis and a shard axis.
    Raises ConfigError if both are given, if their number does not fit the strategy, or if the mesh has more axes.
    """
    if mesh is not None and group is not None:
        raise ConfigError(["pass either process_group or device_mesh, not both"], where=_WHERE)
    if mesh is not None:
        group = _groups_of(mesh)
    if strategy.is_hybrid:
        if not isinstance(group, tuple) or len(group) != 2:
            raise ConfigError(
                [f"{strategy.name} needs a shard group and a replica group, got process_group={group!r}"],
                where=_WHERE,
            )
        shard, replica = (resolve_group(each) for each in group)
        return ShardingGroups(shard, replica if replica.size() > 1 else None)
    if isinstance(group, tuple):
        raise ConfigError([f"{strategy.name} takes one group, got two: HYBRID_SHARD takes two"], where=_WHERE)
    resolved = resolve_group(group)
    if strategy is ShardingStrategy.NO_SHARD and resolved.size() > 1:
        return ShardingGroups(_own_group(), resolved)
    return ShardingGroups(resolved, None)


def _groups_of(mesh: DeviceMesh) -> ProcessGroup | tuple[ProcessGroup, ProcessGroup]:
    if mesh.ndim == 1:
        return axis_group((mesh, 0))
    if mesh.ndim == 2:
        return axis_group((mesh, 1)), axis_group((mesh, 0))
    raise ConfigError([f"device_mesh must have 1 or 2 axes, got {mesh.ndim}"], where=_WHERE)


def part_group(groups: ShardingGroups, size: int) -> ProcessGroup:
    """
    The group of `size` consecutive ranks of the shard group that contains this rank. Collective the first time.

    Raises ConfigError if `size` does not divide the shard group.
    """
    whole = groups.shard
    if not 1 <= size <= whole.size() or whole.size() % size:
        raise ConfigError(
            [f"reshard_after_forward must divide the shard group's size {whole.size()}, got {size}"],
            where=_WHERE,
        )
    if size == whole.size():
        return whole
    ranks = dist.get_process_group_ranks(whole)
    first = whole.rank() // size * size
    members = tuple(ranks[first : first + size])
    return _group_of(members)


def _own_group() -> ProcessGroup:
    """A group that contains only this rank."""
    return _group_of((dist.get_rank(),))


def _group_of(members: tuple[int, ...]) -> ProcessGroup:
    """The group of these global ranks, which include this one. Created once per default group."""
    world = dist.group.WORLD
    entry = _groups.get((id(world), members))
    if entry is None or entry[0] is not world:
        group = cast(ProcessGroup, dist.new_group(list(members), use_local_synchronization=True))
        entry = _groups[id(world), members] = (world, group)
    return entry[1]


#: Each with the default group it was created under: ranks that are threads have one each.
_groups: dict[tuple[int, tuple[int, ...]], tuple[object, ProcessGroup]] = {}
