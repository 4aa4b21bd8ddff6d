"""
The flat parameter: the parameters of one unit and dtype in one sharded storage.

    storage      their values: this rank's shard, and all of them while the unit is unsharded
    parts        this rank's part of each parameter, a view of the shard: the data of the original parameter, 1D (in a
                 group of one rank: all of it, in its shape)
    shown        the objects that modules see: originals, or leaves
    reduction    the reduction of their gradients

A leaf is a view of the unsharded storage. Autograd keeps leaves; their memory comes and goes with the block, behind the
same torch storage.

After the last parameter, a storage over more than one rank has a tag: see `order_watch`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_conformance.engine.chunks.storage import Gathering, ShardedStorage, StorageState, bytes_by_device
from fsdp_conformance.engine.errors import ParameterMoved, ParameterReplaced
from fsdp_conformance.engine.fully_sharded.gradient_reduction import GradientReduction
from fsdp_conformance.engine.fully_sharded.order_watch import OrderWatch
from fsdp_conformance.engine.fully_sharded.shown_parameters import Member, ShownParameters
from fsdp_conformance.engine.mesh.axis import communicates_from, devices_of

MoveStorage = Callable[["FlatParameter", torch.device, torch.dtype], ShardedStorage]
"""Takes a flat parameter, and the device and dtype that its parameters have now; returns a storage with its tag."""


class FlatParameter:
    """
    Parameters of one dtype in a storage; see the module's docstring.

    `storage` must be sharded and hold the values of `members` in order, followed by the tag if there is one. `tag` is
    None for a storage on one rank. `move_storage` makes another storage of the same layout when users have moved or
    cast the parameters; it raises ParameterMoved if they may not. `part_group`: a smaller group that the storage is
    resharded to after forward.
    """

    def __init__(
        self,
        storage: ShardedStorage,
        members: Sequence[Member],
        *,
        tag: int | None,
        name: str,
        move_storage: MoveStorage,
        part_group: ProcessGroup | None = None,
    ) -> None:
        self._move_storage = move_storage
        self.part_group = part_group
        self.shown = ShownParameters(members, name)
        self.members = self.shown.members
        self.tag = tag
        # The gather whose tag was compared: `finish_gather` is called again for units that stay unsharded.
        self._checked: Gathering | None = None
        # Version counters at the last gather and at the last forward: the number of `write`s, and each parameter's. At
        # the last gather also the number of optimizer steps.
        self._versions: list[int] = []
        self._forward_versions: list[int] = []
        self._writes = 0
        self._steps = 0
        # The data that this rank keeps after forward if it reshards to a smaller group: 1D, numel // group size.
        self._part: Tensor | None = None
        self.is_full_precision = False
        """True if it computes and reduces in the parameters' own dtype, whatever was configured."""
        # A storage with the same shard, in the other precision.
        self._other: ShardedStorage | None = None
        self._take_storage(storage)
        self.reduction = GradientReduction(storage, self.shown, tag=tag)
        self.shown.follow_flags()

    @property
    def name(self) -> str:
        """The name of its unit, for messages."""
        return self.shown.name

    def _take_storage(self, storage: ShardedStorage) -> None:
        """Use `storage`, whose shard has the values, from now on."""
        self.storage = storage
        self.is_whole = storage.layout.world_size == 1
        """True if this rank has every element of every parameter."""
        self.parts = storage.layout.parts(storage.shard)[: len(self.members)]
        """This rank's part of each parameter, as a view of the shard."""
        # Empty tensors have no address to compare.
        self._addresses = [part.data_ptr() if part.numel() else None for part in self.parts]
        for member, part in zip(self.members, self.parts, strict=True):
            member.parameter.data = part
        self.shown.view(storage.lasting_views())
        self._unreachable = [
            f"{self.members[0].name} must be on a device of its process group ({devices_of(group)}), got "
            f"{storage.pool.device}"
            for group in (storage.group, storage.replica_group)
            if group is not None and group.size() > 1 and not communicates_from(group, storage.pool.device)
        ]

    @property
    def configured_storage(self) -> ShardedStorage:
        """The storage in the configured precision."""
        return self._other if self.is_full_precision and self._other is not None else self.storage

    @property
    def is_lowered(self) -> bool:
        """True if it was configured to compute or to reduce in another dtype than the parameters' own."""
        storage = self.configured_storage
        return storage.compute_dtype is not storage.dtype or storage.reduce_dtype is not storage.dtype

    def use_full_precision(self, full: bool) -> None:
        """Compute and reduce in the parameters' own dtype, or as configured. No collective may be under way."""
        # Uploads of the shard still under way end before those of the next gather, which is waited for.
        self.release()
        other = self._other
        if other is None:
            other = self.storage.sharing(config=replace(self.storage.config, compute_dtype=None, reduce_dtype=None))
        self._other = self.storage
        self._take_storage(other)
        self.reduction.use(other)
        self.is_full_precision = full

    @property
    def memory_usage(self) -> dict[str, int]:
        """Bytes held now, by device type: shard, unsharded data, and gradients that have yet to be reduced."""
        waiting = [gradient for gradient in self.reduction.leaf_gradients if gradient is not None]
        return bytes_by_device([*self.storage.tensors_held, *self.reduction.gradients.tensors_held, *waiting])

    # --- values ------------------------------------------------------------------------------------------------------

    def follow_users(self) -> None:
        """
        Adopt what users have changed since the last forward, while modules see the originals.

        That is: values assigned to `.data`, another device or dtype, and `requires_grad`. Raises ParameterReplaced for
        another object or shape, ParameterMoved for a device or dtype that is not supported, and for a device from which
        the group cannot communicate.
        """
        self.shown.check_places()
        if self._is_detached():
            self._adopt()
        if self._unreachable:
            raise ParameterMoved(self._unreachable, where=self.name, hint="Move the module there, or pass device_id.")
        self.shown.follow_flags()

    def _is_detached(self) -> bool:
        """True if the data of a parameter were replaced, so that it is no longer a view of the shard."""
        for member, part, address in zip(self.members, self.parts, self._addresses, strict=True):
            data = member.parameter
            if (
                (address is not None and data.data_ptr() != address)
                or data.device != part.device
                or data.dtype is not part.dtype
                or data.shape != part.shape
            ):
                return True
        return False

    def _adopt(self) -> None:
        """Copy what users have assigned to `.data` to the shard, and make the originals views of it again."""
        problems = [
            f"shape of {member.name}: expected {tuple(part.shape)}, this rank's part of {tuple(member.shape)}, "
            f"got {tuple(member.parameter.shape)}"
            for member, part in zip(self.members, self.parts, strict=True)
            if member.parameter.shape != part.shape
        ]
        if problems:
            raise ParameterReplaced(problems, where=self.name, hint="Write in place, or in summon_full_params.")
        kinds = {(member.parameter.device, member.parameter.dtype) for member in self.members}
        if len(kinds) > 1:
            raise ParameterMoved(
                "parameters of a unit must stay on one device and in one dtype, got "
                f"{', '.join(sorted(f'{device} in {dtype}' for device, dtype in kinds))}",
                where=self.name,
            )
        # Before new storage is taken: that makes the originals views of its shard, which has no values yet.
        values = [member.parameter.data for member in self.members]
        (kind,) = kinds
        if kind != (self.storage.shard.device, self.storage.dtype):
            self.release()
            self._take_storage(self._move_storage(self, *kind))
            self.reduction.use(self.storage)
            self._other, self.is_full_precision = None, False
        self.storage.wait_shard_reads()
        with torch.no_grad():
            for member, part, value in zip(self.members, self.parts, values, strict=True):
                # Parameters that the user has left alone are still views of the shard.
                if part.data_ptr() != value.data_ptr():
                    part.copy_(value)
                member.parameter.data = part

    @property
    def is_stale(self) -> bool:
        """True if a parameter was written since the gather, so that the unsharded values are out of date."""
        return self._versions != [self._steps, *self._current_versions()]

    def note_step(self) -> None:
        """Note that an optimizer that has parameters of the unit has stepped."""
        self._steps += 1

    def note_forward(self) -> None:
        """Remember the parameters' versions: the backward of the forward that begins needs these values."""
        self._forward_versions = self._current_versions()

    def check_unwritten(self) -> None:
        """Raise ParameterReplaced if a parameter was written since the forward: the backward would use new values."""
        self.shown.check_places()
        current = self._current_versions()
        if self._forward_versions and self._forward_versions != current:
            written = [
                member.name
                for member, old_version, new_version in zip(
                    self.members, self._forward_versions[1:], current[1:], strict=True
                )
                if old_version != new_version or self._forward_versions[0] != current[0]
            ]
            raise ParameterReplaced(
                f"{', '.join(written)} was modified between forward and backward",
                where=self.name,
            )

    def _current_versions(self) -> list[int]:
        return [self._writes, *(member.parameter._version for member in self.members)]

    def announce(self, watch: OrderWatch) -> None:
        """
        Compare with peers that all are about to gather this unit.

        Raises ExecutionOrderError. Not on the CPU, where gloo compares sizes and each tag is checked when it arrives.
        """
        storage = self.storage
        if self.tag is not None and storage.pool.device.type != "cpu":
            watch.announce_all(
                (storage.group,), "gather", numel=storage.layout.shard_numel, unit=f"unit {self.tag} ({self.name})"
            )

    def start_gather(self, after: torch.Event | None) -> None:
        """Begin to unshard, unless it has begun."""
        if self.storage.is_gathered:
            return
        part, self._part = self._part, None
        if part is not None and self.part_group is not None and not self.is_stale:
            # The part was copied before its block was released, and the gather's stream gets the block after that.
            # Without that order a gather reads parts that are still being written (as in pytorch#197827).
            self.storage.gather_parts(part, self.part_group, after=after)
            return
        # Before the gather, not when it arrives: a write in between is not gathered, and must make the data stale.
        self._versions = [self._steps, *self._current_versions()]
        self.storage.access(async_op=True, after=after)

    def finish_gather(self, watch: OrderWatch) -> None:
        """Wait for the gather. Raises ExecutionOrderError if another unit's data arrived; `watch` checks on a GPU."""
        gathering = self.storage.access(async_op=True)
        gathering.wait()
        self.shown.unseal()
        if gathering is not self._checked:
            self._checked = gathering
            if self.tag is not None and not self.is_whole:
                at_once = self.storage.pool.device.type == "cpu"
                watch.check(self.name, self.tag, self.storage.views[-1], at_once=at_once)

    def shrink(self) -> None:
        """Free the unsharded data, except for this rank's part in the smaller group if there is one."""
        part = None
        # Only if the data have arrived: the part is copied on the stream that computes.
        if self.part_group is not None and self.storage.state is StorageState.UNSHARDED and not self.is_whole:
            part = self.storage.payload.chunk(self.part_group.size())[self.part_group.rank()].clone()
        # `release` drops the part of the last forward.
        self.release()
        self._part = part

    def release(self) -> None:
        """Free the unsharded data, if there are any."""
        self._part = None
        if self.storage.is_gathered:
            self._checked = None
            self.storage.release()
            if not self.has_memory:
                self.shown.seal()

    @property
    def is_unsharded(self) -> bool:
        """True if whole parameters are held, or being gathered."""
        return self.storage.is_gathered

    @property
    def has_memory(self) -> bool:
        """True if the leaves have memory, even if their values have yet to arrive."""
        return self.storage.is_gathered or self.storage.aliases_shard

    # --- whole values ------------------------------------------------------------------------------------------------

    def has_elements(self, index: int) -> bool:
        """True if this rank has elements of a parameter, or if there are none."""
        return self.storage.layout.rank in self.storage.layout.holders(index)

    def part_of(self, index: int, whole: Tensor) -> Tensor:
        """This rank's part of a tensor of a parameter's shape."""
        if self.is_whole:
            return whole
        begin, end, _ = self.storage.layout.shard_slice(index)
        return whole.reshape(-1)[begin:end]

    @torch.no_grad()
    def write(self, index: int, whole: Tensor) -> None:
        """Set a parameter to the values of `whole`, of its whole shape. Frees the unsharded data."""
        self.write_part(index, self.part_of(index, whole.detach()))

    @torch.no_grad()
    def write_part(self, index: int, part: Tensor) -> None:
        """Set this rank's part of a parameter, or note that it was written in place. Frees the unsharded data."""
        self.release()
        # Counted here, because writing to a view of the shard does not change the original's version counter.
        self._writes += 1
        self.storage.wait_shard_reads()
        if part.data_ptr() != self.parts[index].data_ptr():
            self.parts[index].copy_(part)

    @torch.no_grad()
    def restore(self) -> None:
        """Make the originals whole again, with their own memory. The flat parameter is then unusable. Collective."""
        for member, value in zip(self.members, self.storage.layout.views(self.storage.gathered()), strict=False):
            # A copy for each: as views they would keep the whole unit alive.
            member.parameter.data = value.clone()

    def reset(self) -> None:
        """Drop what an interrupted step has left behind."""
        self._checked = self._part = None
        try:
            self.reduction.reset()
        finally:
            self.storage.reset()
            if not self.has_memory:
                self.shown.seal()
