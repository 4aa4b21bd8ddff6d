"""
The flat parameter: the parameters of one unit and dtype in one sharded storage, and what modules see in their place.

    original parameter   the object that the module had and the optimizer has: 1D, this rank's part of the storage's
                         shard (in a group of one rank: all of it, in its shape)
    leaf                 what a forward uses: a parameter of the original shape, a view of the unsharded storage.
                         Autograd keeps it; its memory comes and goes with the block, behind the same torch storage
    place                a module's parameter table and a key, where either of them is registered

A storage over more than one rank ends with a tag, the number of its unit, after the last parameter. The tag is gathered
and averaged with the rest, so a rank whose peers run another unit finds out at the first collective, without an extra
message.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fsdp_conformance.engine.chunks.gradients import Reduction
from fsdp_conformance.engine.chunks.storage import Gathering, ShardedStorage, StorageState
from fsdp_conformance.engine.errors import ExecutionOrderError, ParameterMoved, ParameterReplaced, UsedWhileSharded
from fsdp_conformance.engine.fully_sharded.order_watch import OrderWatch
from fsdp_conformance.engine.mesh.axis import communicates_from, devices_of


class Place:
    """Where a parameter is registered: under a key of a module, which it does not keep alive."""

    __slots__ = ("_module", "key", "registry")

    def __init__(self, module: nn.Module, key: str) -> None:
        self.registry = module._parameters
        self.key = key
        # Modules that override __setattr__ (RNNs, for example) also keep their parameters elsewhere.
        usual = getattr(type(module), "__setattr__", None) is nn.Module.__setattr__
        self._module = None if usual else weakref.ref(module)

    def register(self, parameter: nn.Parameter) -> None:
        """Register `parameter` under the key."""
        module = None if self._module is None else self._module()
        if module is None:
            self.registry[self.key] = parameter
        else:
            setattr(module, self.key, parameter)

    def copied(self, memo: Mapping[int, Any]) -> Place:
        """The same place in a deep copy of the module."""
        twin = Place.__new__(Place)
        twin.key, twin.registry = self.key, memo[id(self.registry)]
        module = None if self._module is None else self._module()
        twin._module = None if module is None else weakref.ref(memo[id(module)])
        return twin


@dataclass(eq=False, slots=True)
class Member:
    """One parameter of a unit."""

    name: str
    """Its name below the unit's module; the first of its names if it is tied."""
    parameter: nn.Parameter
    places: list[Place]
    shape: torch.Size = field(init=False)
    """Of the whole parameter, unsharded."""

    is_guarded: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.shape = self.parameter.shape

    def copied(self, memo: Mapping[int, Any]) -> Member:
        """The same parameter of a deep copy of the modules."""
        twin = Member(self.name, memo[id(self.parameter)], [place.copied(memo) for place in self.places])
        twin.shape = self.shape
        return twin

    def guard(self) -> None:
        """Make a backward that reaches the original raise: it is a shard, so its gradient would be wrong."""
        name, self.is_guarded = self.name, True

        def refuse(_: Tensor) -> None:
            raise UsedWhileSharded(
                f"{name} was used while it was sharded: use it only in the forward of its unit",
                where="backward",
            )

        self.parameter.register_hook(refuse)  # type: ignore[no-untyped-call]

    def show_hooks(self, leaf: nn.Parameter) -> None:
        """Let hooks that users have registered on the original see the gradients of the leaf."""
        registered = self.parameter._backward_hooks or {}
        own, *_ = registered
        hooks = OrderedDict((key, hook) for key, hook in registered.items() if key != own)
        if hooks != leaf._backward_hooks:
            leaf._backward_hooks = hooks


class ReductionHook(NamedTuple):
    """What replaces the average in a reduction: see `FullyShardedDataParallel.register_comm_hook`."""

    state: object
    function: Callable[..., object]
    fills_shard: bool = True
    """Whether it gets a shard to fill; otherwise it reduces the gradient in place."""


MoveStorage = Callable[["FlatParameter", torch.device, torch.dtype], ShardedStorage]
"""From a flat parameter, and the device and dtype that its parameters have now, to a new storage with its tag."""


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
        self.members = list(members)
        self.name = name
        self.tag = tag
        self._places = [(place, index) for index, member in enumerate(members) for place in member.places]
        self.leaves: list[nn.Parameter] = []
        # What the modules have, one for each member: originals, leaves, or whole copies.
        self._shown: Sequence[nn.Parameter] = [member.parameter for member in members]
        self._checked: Gathering | None = None
        # Version counters of what was gathered, and at the last forward: that of `write`, and each parameter's.
        self._versions: list[int] = []
        self._forward_versions: list[int] = []
        self._writes = 0
        # What this rank keeps after forward if it reshards to a smaller group: 1D, numel // group size.
        self._part: Tensor | None = None
        self._reduction: Reduction | None = None
        # Sums over the shard group that still have to be reduced over the replicas: 1D, in the reduce dtype.
        self._partial: Tensor | None = None
        self._defers_replicas = False
        # What a user's hook has reduced.
        self._delivered: list[nn.Parameter] = []
        self._used: list[bool] = []
        self.is_full_precision = False
        """Whether it computes and reduces in the parameters' own dtype, whatever was configured."""
        # A storage with the same shard, in the other precision.
        self._other: ShardedStorage | None = None
        self.take_storage(storage)
        self._follow_flags()

    def take_storage(self, storage: ShardedStorage) -> None:
        """Use `storage`, whose shard has the values, from now on."""
        self.storage = storage
        shard = storage.shard
        self.is_whole = storage.layout.world_size == 1
        """Whether this rank has every element of every parameter."""
        parts = storage.layout.views(shard) if self.is_whole else storage.layout.shard_views(shard)
        self.parts = parts[: len(self.members)]
        """This rank's part of each parameter, as a view of the shard."""
        self._addresses = [part.data_ptr() if part.numel() else None for part in self.parts]
        for member, part in zip(self.members, self.parts, strict=True):
            member.parameter.data = part
        views = storage.lasting_views()
        for index, member in enumerate(self.members):
            if index < len(self.leaves):
                self.leaves[index].data = views[index]
            else:
                self.leaves.append(_leaf(member.parameter, views[index]))
        self._unreachable = [
            f"{self.members[0].name} must be on a device of its process group ({devices_of(group)}), got "
            f"{storage.pool.device}"
            for group in (storage.group, storage.replica_group)
            if group is not None and group.size() > 1 and not communicates_from(group, storage.pool.device)
        ]
        self._reduces_nothing = (
            self.is_whole
            and storage.num_replicas == 1
            and storage.reduces_in_place
            and storage.compute_dtype is storage.dtype
        )
        self._tag_gradient: Tensor | None = None
        if self.tag is not None:
            self._averaged_tag = averaged_tag(self.tag, storage.reduce_dtype)
            self._tag_gradient = torch.tensor(float(self._averaged_tag), device=storage.pool.device)

    @property
    def configured_storage(self) -> ShardedStorage:
        """The storage in the configured precision."""
        return self._other if self.is_full_precision and self._other is not None else self.storage

    @property
    def is_lowered(self) -> bool:
        """Whether it was configured to compute or to reduce in another dtype than the parameters' own."""
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
        self.take_storage(other)
        self.is_full_precision = full

    # --- what the modules see ----------------------------------------------------------------------------------------

    def register(self, parameters: Sequence[nn.Parameter]) -> None:
        """
        Register `parameters`, one for each member, with the modules.

        What a user has registered in place of one of them stays there: `check_places` raises for it.
        """
        for place, index in self._places:
            if place.registry.get(place.key) is self._shown[index]:
                place.register(parameters[index])
        self._shown = parameters

    def register_leaves(self) -> None:
        """Modules see whole parameters."""
        self.register(self.leaves)

    def register_originals(self) -> None:
        """Modules see the objects that the optimizer has."""
        self.register([member.parameter for member in self.members])

    @property
    def is_trained(self) -> bool:
        """Whether a parameter gets a gradient."""
        return any(member.parameter.requires_grad for member in self.members)

    def watch_leaves(self, on_gradient: Callable[[], None]) -> None:
        """Call `on_gradient` whenever a leaf has received its gradient."""
        for leaf in self.leaves:
            leaf.register_post_accumulate_grad_hook(lambda _: on_gradient())  # type: ignore[no-untyped-call]

    # --- values ------------------------------------------------------------------------------------------------------

    def follow_users(self) -> None:
        """
        Adopt what users have changed since the last forward, while modules see the originals.

        That is: values assigned to `.data`, another device or dtype, and `requires_grad`. Raises ParameterReplaced for
        another object or shape, ParameterMoved for a device or dtype that is not supported, and for a device from which
        the group cannot communicate.
        """
        self.check_places()
        if self._is_detached():
            self._adopt()
        if self._unreachable:
            raise ParameterMoved(self._unreachable, where=self.name, hint="Move the module there, or pass device_id.")
        self._follow_flags()

    def check_places(self) -> None:
        """Raise ParameterReplaced if a module no longer has the parameter that was registered with it last."""
        replaced = [
            self.members[index].name
            for place, index in self._places
            if place.registry.get(place.key) is not self._shown[index]
        ]
        if replaced:
            raise ParameterReplaced(
                f"{', '.join(replaced)} was replaced by another parameter object after wrapping",
                where=self.name,
                hint="Wrap the module again, or write the new values into the parameter.",
            )

    def _follow_flags(self) -> None:
        for member, leaf in zip(self.members, self.leaves, strict=True):
            parameter = member.parameter
            if leaf.requires_grad != parameter.requires_grad:
                leaf.requires_grad_(parameter.requires_grad)
            if parameter.requires_grad and not member.is_guarded:
                member.guard()
            if parameter.requires_grad and (len(parameter._backward_hooks or ()) > 1 or leaf._backward_hooks):
                member.show_hooks(leaf)

    def _is_detached(self) -> bool:
        """Whether the data of a parameter were replaced, so that it is no longer a view of the shard."""
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
        values = [member.parameter.data for member in self.members]
        (kind,) = kinds
        if kind != (self.storage.shard.device, self.storage.dtype):
            self.release()
            self.take_storage(self._move_storage(self, *kind))
            self._other, self.is_full_precision = None, False
        self.storage.wait_shard_reads()
        with torch.no_grad():
            for member, part, value in zip(self.members, self.parts, values, strict=True):
                if part.data_ptr() != value.data_ptr():
                    part.copy_(value)
                member.parameter.data = part

    @property
    def is_stale(self) -> bool:
        """Whether a parameter was written since the gather, so that the unsharded values are out of date."""
        return self._versions != self._current_versions()

    def note_forward(self) -> None:
        """Remember the parameters' versions: the backward of the forward that begins needs these values."""
        self._forward_versions = self._current_versions()

    def check_unwritten(self) -> None:
        """Raise ParameterReplaced if a parameter was written since the forward: the backward would use new values."""
        self.check_places()
        current = self._current_versions()
        if self._forward_versions and self._forward_versions != current:
            written = [
                member.name
                for member, before, now in zip(self.members, self._forward_versions[1:], current[1:], strict=True)
                if before != now or self._forward_versions[0] != current[0]
            ]
            raise ParameterReplaced(
                f"{', '.join(written)} was modified between forward and backward",
                where=self.name,
            )

    def _current_versions(self) -> list[int]:
        return [self._writes, *(member.parameter._version for member in self.members)]

    def announce(self, watch: OrderWatch, what: str) -> None:
        """
        Let `watch` compare with peers that all are about to do the same ("gather" or "reduction").

        Raises ExecutionOrderError. Not on the CPU, where gloo compares sizes and each tag is checked when it arrives.
        """
        storage = self.storage
        if self.tag is None or storage.pool.device.type == "cpu":
            return
        for group in (storage.group, storage.replica_group if what == "reduction" else None):
            if group is not None and group.size() > 1:
                numel = storage.layout.shard_numel
                watch.announce(group, f"{what} ({numel} elements a rank)", f"unit {self.tag} ({self.name})")

    def start_gather(self, after: Any) -> None:
        """Begin to unshard, unless it has begun."""
        if self.storage.is_gathered:
            return
        part, self._part = self._part, None
        if part is not None and self.part_group is not None and not self.is_stale:
            # The part was copied before its block was released, and the gather's stream gets the block after that.
            self.storage.gather_parts(part, self.part_group, after=after)
            return
        self._versions = self._current_versions()
        self.storage.access(async_op=True, after=after)

    def finish_gather(self, watch: OrderWatch) -> None:
        """Wait for the gather. Raises ExecutionOrderError if another unit's data arrived; `watch` checks on a GPU."""
        gathering = self.storage.access(async_op=True)
        gathering.wait()
        if gathering is not self._checked:
            self._checked = gathering
            if self.tag is not None and self.storage.pool.device.type == "cpu":
                check_tag(self.storage.views[-1], self.tag, "gathered", name=self.name)
            elif self.tag is not None and not self.is_whole:
                watch.note(self.name, self.tag, self.storage.views[-1])

    def shrink(self) -> None:
        """Free the unsharded data, except for this rank's part in the smaller group if there is one."""
        part = None
        if self.part_group is not None and self.storage.state is StorageState.UNSHARDED and not self.is_whole:
            part = self.storage.payload.chunk(self.part_group.size())[self.part_group.rank()].clone()
        self.release()
        self._part = part

    def release(self) -> None:
        """Free the unsharded data, if there are any."""
        self._part = None
        if self.storage.is_gathered:
            self._checked = None
            self.storage.release()

    @property
    def is_unsharded(self) -> bool:
        """Whether whole parameters are held, or being gathered."""
        return self.storage.is_gathered

    # --- gradients ---------------------------------------------------------------------------------------------------

    @property
    def has_gradients(self) -> bool:
        """Whether gradients have yet to be reduced."""
        return self.storage.has_gradients or any(leaf.grad is not None for leaf in self.leaves)

    @property
    def has_partial(self) -> bool:
        """Whether sums over the shard group have yet to be reduced over the replicas."""
        return self._partial is not None

    def accumulate(self) -> None:
        """
        Keep the leaves' gradients, in the dtype of the reduction, to be reduced later.

        In the dtype of the leaves they stay where they are, and autograd adds the next ones in place: a buffer would be
        one more copy of the unit while it is filled.
        """
        adds_in_place = self._reduces_nothing or self.storage.reduce_dtype is self.storage.compute_dtype
        if not adds_in_place and any(leaf.grad is not None for leaf in self.leaves):
            tag: list[Tensor | None] = [] if self.tag is None else [None]
            self.storage.gradients.put_all([leaf.grad for leaf in self.leaves] + tag)
            self._drop_leaf_gradients()

    def start_reduction(self, watch: OrderWatch, hook: ReductionHook | None = None, *, all_reduce: bool = True) -> None:
        """
        Begin to average the collected gradients over the ranks. Parameters without a gradient count as zero.

        `hook` replaces the average. With `all_reduce=False` the sum over the shard group is kept here until the next
        reduction, which includes the replicas. `watch` notes what a reduction that is still under way brings.
        """
        if self._reduces_nothing and hook is None:
            return
        storage = self.storage
        if self._reduction is not None:
            self.finish_reduction(watch)
        self._defers_replicas = not all_reduce and storage.num_replicas > 1
        # The tag is averaged once, with the replicas.
        tag: list[Tensor | None] = [] if self.tag is None else [None if self._defers_replicas else self._tag_gradient]
        buffer = storage.gradients
        buffer.put_all([leaf.grad for leaf in self.leaves] + tag)
        self._drop_leaf_gradients()
        used = buffer.present[: len(self.members)]
        before = self._used if self.has_partial else [False] * len(used)
        self._used = [now or earlier for now, earlier in zip(used, before, strict=True)]
        for index, member in enumerate(self.members):
            if member.parameter.requires_grad and not used[index]:
                # Negative zeros sum to negative zero only if no rank has anything else: then it was used nowhere.
                buffer.view(index).fill_(-0.0)
        if hook is not None:
            self._reduce_by(hook)
            return
        partial, self._partial = self._partial, None
        self._reduction = storage.reduce(
            release=False, async_op=True, partial=partial, all_reduce=not self._defers_replicas
        )

    @torch.no_grad()
    def _reduce_by(self, hook: ReductionHook) -> None:
        """Let the user's hook reduce: it reads the whole gradient, and writes there or to this rank's shard, all 1D."""
        storage = self.storage
        buffer = storage.gradients
        buffer.complete()
        # One object: torch's own hooks give it other memory.
        gradient = buffer.payload
        if hook.fills_shard:
            shard = gradient.new_zeros(storage.layout.shard_numel)
            hook.function(hook.state, gradient, shard)
        else:
            hook.function(hook.state, gradient)
            shard = gradient.clone()
        if self.tag is not None:
            # A hook may round or replace whatever it likes, so the tag says nothing. Gathers still check theirs.
            parts = storage.layout.views(shard) if self.is_whole else storage.layout.shard_views(shard)
            parts[-1].fill_(self._averaged_tag)
        storage.discard_gradients()
        self._delivered = self._deliver(shard.to(storage.shard_device, storage.dtype))

    def advance(self) -> None:
        """Let a reduction with two collectives start the second."""
        if self._reduction is not None and not self._reduction.done:
            self._reduction.advance()

    @torch.no_grad()
    def finish_reduction(self, watch: OrderWatch) -> list[nn.Parameter]:
        """
        Wait for the reduction, and give the originals their gradients. Returns the parameters that got one.

        Raises ExecutionOrderError if gradients of other units were averaged in; `watch` checks on a GPU.
        """
        if self._delivered:
            delivered, self._delivered = self._delivered, []
            return delivered
        if self._reduces_nothing:
            return self._hand_over()
        reduction, self._reduction = self._reduction, None
        if reduction is None:
            return []
        if self._defers_replicas:
            self._partial = reduction.wait()
            return []
        shard = reduction.wait()
        if self.tag is not None and self.storage.pool.device.type != "cpu":
            parts = self.storage.layout.views(shard) if self.is_whole else self.storage.layout.shard_views(shard)
            if parts[-1].numel():
                watch.note(self.name, self._averaged_tag, parts[-1], what="averaged", tolerance=_TAG_TOLERANCE)
        return self._deliver(shard)

    def _deliver(self, shard: Tensor) -> list[nn.Parameter]:
        """Give the originals their parts of an averaged gradient. Returns the parameters that got one."""
        layout = self.storage.layout
        parts = layout.views(shard) if self.is_whole else layout.shard_views(shard)
        if self.tag is not None and self.storage.pool.device.type == "cpu" and parts[-1].numel():
            check_tag(parts[-1], self._averaged_tag, "averaged", name=self.name)
        got = []
        gradients = []
        for member, used, part in zip(self.members, self._used, parts, strict=False):
            if used or (member.parameter.requires_grad and not _is_negative_zero(part)):
                got.append(member.parameter)
                gradients.append(part)
        _add_gradients(got, gradients)
        return got

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
        self._writes += 1
        self.storage.wait_shard_reads()
        if part.data_ptr() != self.parts[index].data_ptr():
            self.parts[index].copy_(part)

    @torch.no_grad()
    def restore(self) -> None:
        """Make the originals whole again, with their own memory. The flat parameter is then unusable. Collective."""
        for member, value in zip(self.members, self.storage.layout.views(self.storage.gathered()), strict=False):
            member.parameter.data = value.clone()

    def reset(self) -> None:
        """Drop what an interrupted step has left behind."""
        self._drop_leaf_gradients()
        self._reduction = self._checked = self._part = self._partial = None
        self._delivered = []
        self.storage.reset()

    def _hand_over(self) -> list[nn.Parameter]:
        """Hand the leaves' gradients to the originals: without peers they are already the average."""
        got, gradients = [], []
        for member, part, leaf in zip(self.members, self.parts, self.leaves, strict=True):
            if leaf.grad is not None:
                got.append(member.parameter)
                gradients.append(leaf.grad.to(part.dtype).view(part.shape))
        self._drop_leaf_gradients()
        _add_gradients(got, gradients)
        return got

    def _drop_leaf_gradients(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None


def _leaf(original: nn.Parameter, view: Tensor) -> nn.Parameter:
    leaf = nn.Parameter(view, requires_grad=original.requires_grad)
    leaf.__dict__.update(original.__dict__)  # attributes that users have set
    return leaf


def _is_negative_zero(part: Tensor) -> bool:
    """Whether all elements are -0.0. Makes the host wait, so only call it for parameters this rank did not use."""
    return part.numel() > 0 and bool(((part == 0) & torch.signbit(part)).all())


def _add_gradients(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> None:
    """Set or add to the parameters' gradients."""
    existing, added = [], []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            existing.append(parameter.grad)
            added.append(gradient)
    if existing:
        torch._foreach_add_(existing, added)


# --- tags -------------------------------------------------------------------------------------------------------------

#: Tags are smaller, so that bfloat16 represents them exactly.
_NUM_TAGS = 251

#: Less than the distance between tags, and more than 16 bits lose in an average.
_TAG_TOLERANCE = 0.3


def tag_of(ordinal: int) -> int:
    """The tag of the unit with that number."""
    return ordinal % _NUM_TAGS + 1


def averaged_tag(tag: int, dtype: torch.dtype) -> int:
    """What is averaged in `dtype` for a tag: the sum over ranks must be exact in that dtype, too."""
    return tag if dtype.itemsize > 2 else tag % 16


def check_tag(found: Tensor, expected: int, what: str, *, name: str) -> None:
    """Raise ExecutionOrderError if another unit's tag was gathered or averaged. Makes the host wait."""
    value = found.item()
    if not abs(value - expected) <= _TAG_TOLERANCE:
        raise ExecutionOrderError(
            f"expected unit {expected} ({name}), {what} unit {value:g}",
            where=f"{name}, rank {torch.distributed.get_rank()}",
            hint="All ranks must run the same units in the same order.",
        )
