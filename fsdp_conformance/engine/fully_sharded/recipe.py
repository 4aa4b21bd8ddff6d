"""How parameters of a unit are stored: from parameters to flat parameters on chunks, and to others when they move."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fsdp_conformance.engine.chunks.chunk import Chunk
from fsdp_conformance.engine.chunks.config import ChunkConfig
from fsdp_conformance.engine.chunks.memory_pool import MemoryPool
from fsdp_conformance.engine.chunks.moving import forget_tensors, moved_chunk
from fsdp_conformance.engine.errors import ParameterMoved
from fsdp_conformance.engine.fully_sharded.flat_parameter import FlatParameter
from fsdp_conformance.engine.fully_sharded.member import Member
from fsdp_conformance.engine.fully_sharded.sharding_groups import ShardingGroups, part_group
from fsdp_conformance.engine.fully_sharded.tag import tag_of
from fsdp_conformance.engine.fully_sharded.unit import ShardedUnit
from fsdp_conformance.engine.sharding_strategy import CPUOffload, MixedPrecision

#: Bytes that tensors of a large unit are aligned to: what vector units and tensor cores read at once.
_ALIGN_BYTES = 16

#: Elements from which a unit is large: gaps are nothing beside them.
_LARGE_NUMEL = 4096


#: Units of more dtypes share tags with others, no more.
_DTYPES_PER_UNIT = 3


@dataclass(frozen=True, kw_only=True)
class UnitRecipe:
    """How a unit's parameters are stored; kept, because some may go over to an outer unit."""

    groups: ShardingGroups
    device: torch.device
    """Where the unit computes."""
    device_is_fixed: bool
    """Whether parameters may not be moved to another device any more."""
    offload: CPUOffload
    mixed_precision: MixedPrecision
    persist_numel: int
    """Parameters of at most so many elements stay whole on every rank, and their gradients are all-reduced."""
    part_size: int | None
    """Ranks of the smaller group that parameters are resharded to after forward; None: to the whole shard group."""
    ordinal: int
    """Its number among the units of its groups: the same on every rank."""

    def flat_parameters(self, members: Sequence[Member]) -> list[FlatParameter]:
        """One for each dtype, in the order in which dtypes occur. The parameters are sharded from then on."""
        kinds: dict[tuple[torch.dtype, bool], list[Member]] = {}
        for member in members:
            persists = 0 < member.parameter.numel() <= self.persist_numel
            kinds.setdefault((member.parameter.dtype, persists), []).append(member)
        return [
            self._flat_parameter(same, place, self.groups.replicated() if persists else self.groups)
            for place, ((_, persists), same) in enumerate(kinds.items())
        ]

    def _flat_parameter(self, members: Sequence[Member], place: int, groups: ShardingGroups) -> FlatParameter:
        tensors: list[Tensor] = [member.parameter.detach() for member in members]
        dtype = tensors[0].dtype
        tag = tag_of(_DTYPES_PER_UNIT * self.ordinal + place) if groups.size > 1 else None
        if tag is not None:
            tensors.append(torch.tensor(float(tag), dtype=dtype))
        config = self._config(self.device, dtype, sum(tensor.numel() for tensor in tensors))
        chunk = Chunk.of(
            pool_of(self.device),
            tensors,
            groups.shard,
            replica_group=groups.replica,
            config=config,
        )
        forget_tensors(chunk)
        return FlatParameter(
            chunk,
            members,
            tag=tag,
            name="the root",
            move_chunk=self.move_chunk,
            part_group=None
            if self.part_size is None or groups.shard.size() == 1
            else part_group(groups, self.part_size),
        )

    def _config(self, device: torch.device, dtype: torch.dtype, numel: int) -> ChunkConfig:
        precision = self.mixed_precision
        compute = precision.param_dtype if dtype.is_floating_point else None
        offloads = self.offload.offload_params
        return ChunkConfig(
            compute_dtype=compute,
            reduce_dtype=precision.reduce_dtype,
            shard_device=torch.device("cpu") if offloads else None,
            pin_memory=self.offload.pin_memory,
            align=_ALIGN_BYTES // min(dtype.itemsize, (compute or dtype).itemsize) if numel >= _LARGE_NUMEL else 1,
            bind=False,
            alias_whole=True,
            track_statistics=False,
        )

    def move_chunk(self, flat: FlatParameter, device: torch.device, dtype: torch.dtype) -> Chunk:
        """Another chunk, for parameters that were moved or cast. Raises ParameterMoved if they may not be."""
        old = flat.chunk
        if self.offload.offload_params:
            if device.type != "cpu":
                raise ParameterMoved(
                    f"parameters={device}, but should be on the CPU: they are offloaded",
                    where=flat.name,
                    hint="Do not move the module after it was wrapped",
                )
            device = old.pool.device
        elif device != old.pool.device and (self.device_is_fixed or old.pool.device.type != "cpu"):
            raise ParameterMoved(
                f"parameters={device}, but should be on {old.pool.device}, as when they were wrapped",
                where=flat.name,
            )
        if not dtype.is_floating_point:
            raise ParameterMoved(f"dtype={dtype}, but should be a floating-point dtype", where=flat.name)
        # Gaps stay where they are: the shards of other ranks are laid out like this one's.
        config = replace(self._config(device, dtype, old.layout.used_numel), align=old.config.align)
        chunk = moved_chunk(old, pool_of(device), dtype, config=config)
        if flat.tag is not None:
            tag = chunk.layout.shard_views(chunk.shard)[-1]
            tag.fill_(flat.tag)
        return chunk


@torch.no_grad()
def copied_unit(unit: ShardedUnit, memo: Mapping[int, Any]) -> ShardedUnit:
    """
    The twin of a unit whose modules were deep-copied with `memo`. Nothing is communicated, and gradients stay behind.
    """
    flats = []
    for flat in unit.flats:
        members = [member.copied(memo) for member in flat.members]
        old = flat.configured_chunk
        chunk = moved_chunk(old, old.pool, old.dtype, config=old.config)
        chunk.shard.copy_(old.shard)
        flats.append(
            FlatParameter(
                chunk,
                members,
                tag=flat.tag,
                name=flat.name,
                move_chunk=unit.recipe.move_chunk,
                part_group=flat.part_group,
            )
        )
    twin = ShardedUnit(
        flats,
        recipe=unit.recipe,
        buffers=unit.buffers.copied(memo),
        reshard_after_forward=unit.reshard_after_forward,
        foreign={},
    )
    twin.communication_hook = unit.communication_hook
    return twin


def pool_of(device: torch.device) -> MemoryPool:
    """The pool of a device, on this thread: units of one process share it while any of them is alive."""
    pools: weakref.WeakValueDictionary[str, MemoryPool] | None = getattr(_local, "pools", None)
    if pools is None:
        pools = _local.pools = weakref.WeakValueDictionary()
    pool = pools.get(str(device))
    if pool is None:
        # One buffer for gradients: the next unit's are copied in when this unit's have left it, as in FSDP2.
        pool = pools[str(device)] = MemoryPool(device, num_cooling=0)
    return pool


def next_ordinal(groups: ShardingGroups) -> int:
    """The number of one more unit on these groups, on this thread."""
    names = (groups.shard.group_name, "" if groups.replica is None else groups.replica.group_name)
    ordinals: dict[tuple[str, str], int] | None = getattr(_local, "ordinals", None)
    if ordinals is None:
        ordinals = _local.ordinals = {}
    ordinals[names] = ordinals.get(names, -1) + 1
    return ordinals[names]


_local = threading.local()
