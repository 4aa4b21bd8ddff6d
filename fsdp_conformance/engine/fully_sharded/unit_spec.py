"""How a unit's parameters are stored: makes flat parameters, and new storage for them when they move."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_conformance.engine.chunks.memory_pool import MemoryPool
from fsdp_conformance.engine.chunks.storage import ShardedStorage, StorageConfig
from fsdp_conformance.engine.errors import ParameterMoved
from fsdp_conformance.engine.fully_sharded.flat_parameter import FlatParameter
from fsdp_conformance.engine.fully_sharded.order_watch import tag_of
from fsdp_conformance.engine.fully_sharded.sharding_groups import ShardingGroups, part_group
from fsdp_conformance.engine.fully_sharded.shown_parameters import Member
from fsdp_conformance.engine.sharding_strategy import CPUOffload, MixedPrecision

#: Alignment of tensors in a large unit, in bytes: what vector units and tensor cores read at once.
_ALIGN_BYTES = 16

#: A unit with at least this many elements is large: gaps are negligible.
_LARGE_NUMEL = 4096

#: A unit with more dtypes shares tags with others, which is harmless.
_DTYPES_PER_UNIT = 3


@dataclass(frozen=True, kw_only=True)
class UnitSpec:
    """How a unit's parameters are stored. Kept by the unit, because some may later go to an outer unit."""

    groups: ShardingGroups
    device: torch.device
    """Where the unit computes."""
    device_is_fixed: bool
    """True if moving parameters to another device is an error."""
    offload: CPUOffload
    mixed_precision: MixedPrecision
    persist_numel: int
    """Parameters of at most this many elements stay whole on every rank, and their gradients are all-reduced."""
    part_size: int | None
    """Size of the smaller group that parameters are resharded to after forward; None: the whole shard group."""
    ordinal: int
    """Its number among the units of its groups: the same on every rank."""

    def flat_parameters(self, members: Sequence[Member]) -> list[FlatParameter]:
        """Make one flat parameter per dtype, in order of occurrence. The parameters are sharded from then on."""
        kinds: dict[tuple[torch.dtype, bool], list[Member]] = {}
        for member in members:
            persists = 0 < member.parameter.numel() <= self.persist_numel
            kinds.setdefault((member.parameter.dtype, persists), []).append(member)
        return [
            self._flat_parameter(kind_members, place, self.groups.replicated() if persists else self.groups)
            for place, ((_, persists), kind_members) in enumerate(kinds.items())
        ]

    def _flat_parameter(self, members: Sequence[Member], place: int, groups: ShardingGroups) -> FlatParameter:
        tensors: list[Tensor] = [member.parameter.detach() for member in members]
        dtype = tensors[0].dtype
        tag = tag_of(_DTYPES_PER_UNIT * self.ordinal + place, dtype) if groups.size > 1 else None
        if tag is not None:
            tensors.append(torch.tensor(tag, dtype=dtype))
        config = self._config(self.device, dtype, sum(tensor.numel() for tensor in tensors))
        storage = ShardedStorage.of(
            pool_of(self.device), tensors, groups.shard, replica_group=groups.replica, config=config
        )
        return FlatParameter(
            storage,
            members,
            tag=tag,
            name="the root",
            move_storage=self.move_storage,
            part_group=None
            if self.part_size is None or groups.shard.size() == 1
            else part_group(groups, self.part_size),
        )

    def _config(self, device: torch.device, dtype: torch.dtype, numel: int) -> StorageConfig:
        precision = self.mixed_precision
        # Integers are not rounded numbers: quantised weights, for example, are codes.
        compute, reduce = (precision.param_dtype, precision.reduce_dtype) if dtype.is_floating_point else (None, None)
        offloads = self.offload.offload_params
        return StorageConfig(
            compute_dtype=compute,
            reduce_dtype=reduce,
            shard_device=torch.device("cpu") if offloads else None,
            pin_memory=self.offload.pin_memory,
            align=_ALIGN_BYTES // min(dtype.itemsize, (compute or dtype).itemsize) if numel >= _LARGE_NUMEL else 1,
            alias_whole=True,
        )

    def move_storage(self, flat: FlatParameter, device: torch.device, dtype: torch.dtype) -> ShardedStorage:
        """New storage for parameters that were moved or cast. Raises ParameterMoved if that is not allowed."""
        old = flat.storage
        if self.offload.offload_params:
            if device.type != "cpu":
                raise ParameterMoved(
                    f"offloaded parameters must stay on the CPU, got {device}",
                    where=flat.name,
                    hint="Do not move the module after wrapping it",
                )
            device = old.pool.device
        elif device != old.pool.device and (self.device_is_fixed or old.pool.device.type != "cpu"):
            raise ParameterMoved(
                f"parameters must stay on {old.pool.device}, where they were wrapped, got {device}",
                where=flat.name,
            )
        if dtype is not old.dtype and not (dtype.is_floating_point and old.dtype.is_floating_point):
            kind = "a floating-point dtype" if old.dtype.is_floating_point else f"their dtype {old.dtype}"
            raise ParameterMoved(f"parameters must keep {kind}, got {dtype}", where=flat.name)
        # Gaps stay in place: the shards of other ranks are laid out like this one's.
        config = replace(self._config(device, dtype, old.layout.used_numel), align=old.config.align)
        storage = old.moved(pool_of(device), dtype, config=config)
        if flat.tag is not None:
            tag = storage.layout.shard_views(storage.shard)[-1]
            tag.fill_(flat.tag)
        return storage


def pool_of(device: torch.device) -> MemoryPool:
    """The pool of a device for this thread. Units share it as long as any of them is alive."""
    pools: weakref.WeakValueDictionary[str, MemoryPool] | None = getattr(_local, "pools", None)
    if pools is None:
        pools = _local.pools = weakref.WeakValueDictionary()
    pool = pools.get(str(device))
    if pool is None:
        # One buffer for gradients, as in FSDP2: the next unit's are copied in once this unit's have left.
        pool = pools[str(device)] = MemoryPool(device, num_cooling=0)
    return pool


def next_ordinal(groups: ShardingGroups) -> int:
    """A number for a new unit on these groups, in order of creation on this thread."""
    # Not by the groups' names alone: torch uses a name again once its group is destroyed, and ranks that had no part in
    # that group would count differently from then on.
    ordinals: weakref.WeakKeyDictionary[ProcessGroup, dict[str, int]] | None = getattr(_local, "ordinals", None)
    if ordinals is None:
        ordinals = _local.ordinals = weakref.WeakKeyDictionary()
    counts = ordinals.setdefault(groups.shard, {})
    replica = "" if groups.replica is None else groups.replica.group_name
    counts[replica] = counts.get(replica, -1) + 1
    return counts[replica]


_local = threading.local()
