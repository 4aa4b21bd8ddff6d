"""
The flat parameter: the parameters of one unit and dtype on one chunk, and what stands for them in the modules.

    original parameter   the object that the module had and the optimizer has; 1D, this rank's part of the chunk's shard
                         (in a group of one rank: the whole, in its shape)
    leaf                 what a forward uses: a parameter of the original shape, a view of the unsharded chunk. Autograd
                         keeps it; its memory comes and goes with the chunk's block, always behind the same storage
    place                a module's registry and a key: where the one or the other is registered

A chunk over more than one rank ends with a tag, the number of its unit, behind the last parameter. It is gathered and
averaged with the rest, so a rank whose peers run another unit finds it out with the first collective, at no message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fsdp_conformance.engine.chunks.chunk import Chunk
from fsdp_conformance.engine.chunks.gathering import Gathering, start_all_gather
from fsdp_conformance.engine.chunks.moving import gather_parts, lasting_views, sharing_chunk
from fsdp_conformance.engine.chunks.reduction import Reduction
from fsdp_conformance.engine.chunks.state import ChunkState, TensorState
from fsdp_conformance.engine.errors import ParameterMoved, ParameterReplaced
from fsdp_conformance.engine.fully_sharded.member import Member
from fsdp_conformance.engine.fully_sharded.order_watch import OrderWatch
from fsdp_conformance.engine.fully_sharded.tag import averaged_tag, check_tag

#: States that a tensor passes through on its way to the reduction.
_TO_REDUCTION = (TensorState.COMPUTE, TensorState.HOLD_AFTER_BWD, TensorState.READY_FOR_REDUCE)


class ReductionHook(NamedTuple):
    """What reduces in place of an average: `function(state, gradient, shard)`."""

    state: object
    function: Callable[[Any, Tensor, Tensor], object]


MoveChunk = Callable[["FlatParameter", torch.device, torch.dtype], Chunk]
"""From a flat parameter, the device and the dtype that its parameters have now, to a chunk with its tag."""


class FlatParameter:
    """
    Parameters of one dtype on a chunk; see the module's docstring.

    Making one copies `members` into `chunk`, which must be sharded and hold them in order, followed by the tag where
    there is one. `tag` is None for a chunk of one rank. `move_chunk` is asked for another chunk of the same layout when
    users have moved or cast the parameters; it raises ParameterMoved if they may not. `part_group`: a smaller group
    that the chunk is resharded to after forward.
    """

    def __init__(
        self,
        chunk: Chunk,
        members: Sequence[Member],
        *,
        tag: int | None,
        name: str,
        move_chunk: MoveChunk,
        part_group: ProcessGroup | None = None,
    ) -> None:
        self._move_chunk = move_chunk
        self.part_group = part_group
        self.members = list(members)
        self.name = name
        self.tag = tag
        self._places = [(place, index) for index, member in enumerate(members) for place in member.places]
        self.leaves: list[nn.Parameter] = []
        self._checked: Gathering | None = None
        # Of what `write` has written, and of each parameter.
        self._versions: list[int] = []
        self._forward_versions: list[int] = []
        self._writes = 0
        # What this rank keeps after forward where it reshards to a smaller group: 1D, numel // group size.
        self._part: Tensor | None = None
        self._reduction: Reduction | None = None
        # Sums over the shard group that wait for the replicas: 1D, like the shard, in the dtype of the reduction.
        self._partial: Tensor | None = None
        self._defers_replicas = False
        self._used: list[bool] = []
        self.is_full_precision = False
        """Whether it computes and reduces in the parameters' own dtype, whatever its chunk was configured for."""
        # Over the same shard, in the other precision.
        self._other: Chunk | None = None
        self.take_chunk(chunk)
        self._follow_flags()

    def take_chunk(self, chunk: Chunk) -> None:
        """Let `chunk` be the storage from now on. Its shard has the values."""
        self.chunk = chunk
        shard = chunk.shard
        self.is_whole = chunk.layout.world_size == 1
        """Whether this rank has every element of every parameter."""
        parts = chunk.layout.views(shard) if self.is_whole else chunk.layout.shard_views(shard)
        self.parts = parts[: len(self.members)]
        """This rank's part of each parameter, as a view of the shard."""
        self._addresses = [part.data_ptr() if part.numel() else None for part in self.parts]
        for member, part in zip(self.members, self.parts, strict=True):
            member.parameter.data = part
        views = lasting_views(chunk)
        for index, member in enumerate(self.members):
            if index < len(self.leaves):
                self.leaves[index].data = views[index]
            else:
                self.leaves.append(_leaf(member.parameter, views[index]))
        self._reduces_nothing = (
            self.is_whole and chunk.num_replicas == 1 and chunk.reduces_in_place and chunk.compute_dtype is chunk.dtype
        )
        self._tag_gradient: Tensor | None = None
        if self.tag is not None:
            self._averaged_tag = averaged_tag(self.tag, chunk.reduce_dtype)
            self._tag_gradient = torch.tensor(float(self._averaged_tag), device=chunk.pool.device)

    @property
    def configured_chunk(self) -> Chunk:
        """The storage as it was configured."""
        return self._other if self.is_full_precision and self._other is not None else self.chunk

    @property
    def is_lowered(self) -> bool:
        """Whether it was configured to compute or to reduce in another dtype than the parameters' own."""
        chunk = self.configured_chunk
        return chunk.compute_dtype is not chunk.dtype or chunk.reduce_dtype is not chunk.dtype

    def use_full_precision(self, full: bool) -> None:
        """Compute and reduce in the parameters' own dtype from now on, or as configured. Nothing may be on its way."""
        # Uploads of the shard that are on their way end before those of the next gather, which is waited for.
        self.release()
        other = self._other
        if other is None:
            other = sharing_chunk(self.chunk, config=replace(self.chunk.config, compute_dtype=None, reduce_dtype=None))
        self._other = self.chunk
        self.take_chunk(other)
        self.is_full_precision = full

    # --- what the modules see ----------------------------------------------------------------------------------------

    def register(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let modules see `parameters`, one for each member."""
        for place, index in self._places:
            place.register(parameters[index])

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
        """Let `on_gradient` be called whenever a leaf has got its gradient."""
        for leaf in self.leaves:
            leaf.register_post_accumulate_grad_hook(lambda _: on_gradient())  # type: ignore[no-untyped-call]

    # --- values ------------------------------------------------------------------------------------------------------

    def follow_users(self) -> None:
        """
        Take over what users have changed since the last forward, while modules see the originals.

        Values that were put into `.data`, another device or dtype, `requires_grad`. Raises ParameterReplaced for
        another object or shape, ParameterMoved for a device or dtype that cannot be followed.
        """
        replaced = [
            self.members[index].name
            for place, index in self._places
            if place.registry.get(place.key) is not self.members[index].parameter
        ]
        if replaced:
            raise ParameterReplaced(
                f"{', '.join(replaced)} is another parameter than the one that was wrapped, but should be the same",
                where=self.name,
                hint="Wrap the module again.",
            )
        if self._is_detached():
            self._adopt()
        self._follow_flags()

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
        """Whether the data of a parameter were replaced: it is no view of the shard any more."""
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
        """Copy what users have put into `.data` to the shard, and let the originals be views of it again."""
        problems = [
            f"shape={tuple(member.parameter.shape)} of {member.name}, but should be {tuple(part.shape)}: "
            f"this rank's part of {tuple(member.shape)}"
            for member, part in zip(self.members, self.parts, strict=True)
            if member.parameter.shape != part.shape
        ]
        if problems:
            raise ParameterReplaced(problems, where=self.name, hint="Write in place, or in summon_full_params.")
        kinds = {(member.parameter.device, member.parameter.dtype) for member in self.members}
        if len(kinds) > 1:
            raise ParameterMoved(
                f"parameters are on {', '.join(sorted(f'{device} in {dtype}' for device, dtype in kinds))}, "
                "but should be on one device, in one dtype",
                where=self.name,
            )
        values = [member.parameter.data for member in self.members]
        (kind,) = kinds
        if kind != (self.chunk.shard.device, self.chunk.dtype):
            self.release()
            self.take_chunk(self._move_chunk(self, *kind))
            self._other, self.is_full_precision = None, False
        self.chunk.wait_shard_reads()
        with torch.no_grad():
            for member, part, value in zip(self.members, self.parts, values, strict=True):
                if part.data_ptr() != value.data_ptr():
                    part.copy_(value)
                member.parameter.data = part

    @property
    def is_stale(self) -> bool:
        """Whether a parameter was written since the gather: what is unsharded is not what it should be."""
        return self._versions != self._current_versions()

    def note_forward(self) -> None:
        """A forward begins: its backward needs the values that parameters have now."""
        self._forward_versions = self._current_versions()

    def check_unwritten(self) -> None:
        """Raise ParameterReplaced if a parameter was written since the forward: gathered again, it is another one."""
        current = self._current_versions()
        if self._forward_versions and self._forward_versions != current:
            written = [
                member.name
                for member, before, now in zip(self.members, self._forward_versions[1:], current[1:], strict=True)
                if before != now or self._forward_versions[0] != current[0]
            ]
            raise ParameterReplaced(
                f"{', '.join(written)} was written between forward and backward, but should be as it was",
                where=self.name,
            )

    def _current_versions(self) -> list[int]:
        return [self._writes, *(member.parameter._version for member in self.members)]

    def start_gather(self, after: Any) -> None:
        """Begin to unshard, unless it has begun."""
        if self.chunk.state is not ChunkState.SHARDED:
            return
        part, self._part = self._part, None
        if part is not None and self.part_group is not None and not self.is_stale:
            # The part was copied before its block was released, and the block comes to the gather's stream after that.
            gather_parts(self.chunk, part, self.part_group, after=after)
            return
        self._versions = self._current_versions()
        self.chunk.access(async_op=True, after=after)

    def finish_gather(self, watch: OrderWatch) -> None:
        """Wait for it. Raises ExecutionOrderError if another unit's arrived, or lets `watch` look, where that waits."""
        gathering = self.chunk.access(async_op=True)
        gathering.wait()
        if gathering is not self._checked:
            self._checked = gathering
            if self.tag is not None and self.chunk.pool.device.type == "cpu":
                check_tag(self.chunk.views[-1], self.tag, "gathered", name=self.name)
            elif self.tag is not None and not self.is_whole:
                watch.note(self.name, self.tag, self.chunk.views[-1])

    def shrink(self) -> None:
        """Free what is unsharded but for this rank's part of the smaller group, where there is one."""
        part = None
        if self.part_group is not None and self.chunk.state is ChunkState.UNSHARDED and not self.is_whole:
            part = self.chunk.payload.chunk(self.part_group.size())[self.part_group.rank()].clone()
        self.release()
        self._part = part

    def release(self) -> None:
        """Free what is unsharded, if anything is."""
        self._part = None
        if self.chunk.state in (ChunkState.GATHERING, ChunkState.UNSHARDED):
            self._checked = None
            self.chunk.release()

    @property
    def is_unsharded(self) -> bool:
        """Whether whole parameters are held, or on their way."""
        return self.chunk.state in (ChunkState.GATHERING, ChunkState.UNSHARDED)

    # --- gradients ---------------------------------------------------------------------------------------------------

    @property
    def has_gradients(self) -> bool:
        """Whether gradients wait for a reduction."""
        return self.chunk.has_gradients or any(leaf.grad is not None for leaf in self.leaves)

    @property
    def has_partial(self) -> bool:
        """Whether sums over the shard group wait to be reduced over the replicas."""
        return self._partial is not None

    def accumulate(self) -> None:
        """Collect the gradients of the leaves in the buffer, in the dtype of the reduction; they are reduced later."""
        if not self._reduces_nothing and any(leaf.grad is not None for leaf in self.leaves):
            tag: list[Tensor | None] = [] if self.tag is None else [None]
            self.chunk.gradients.put_all([leaf.grad for leaf in self.leaves] + tag)
            self._drop_leaf_gradients()

    def start_reduction(self, hook: ReductionHook | None = None, *, all_reduce: bool = True) -> None:
        """
        Begin to average what was collected over the ranks. Parameters without a gradient count as zero.

        `hook` reduces in place of it. With `all_reduce=False` replicas are left for the next reduction: what is reduced
        over the shard group waits here.
        """
        if self._reduces_nothing:
            return
        chunk = self.chunk
        if self._reduction is not None:
            self.finish_reduction()
        self._defers_replicas = not all_reduce and chunk.num_replicas > 1
        # The tag is averaged once, with the replicas.
        tag: list[Tensor | None] = [] if self.tag is None else [None if self._defers_replicas else self._tag_gradient]
        buffer = chunk.gradients
        buffer.put_all([leaf.grad for leaf in self.leaves] + tag)
        self._drop_leaf_gradients()
        used = buffer.present[: len(self.members)]
        before = self._used if self.has_partial else [False] * len(used)
        self._used = [now or earlier for now, earlier in zip(used, before, strict=True)]
        for index, member in enumerate(self.members):
            if member.parameter.requires_grad and not used[index]:
                # Negative zeros add up to one only if no rank has anything else: then it was used nowhere.
                buffer.view(index).fill_(-0.0)
        if hook is not None:
            self._reduce_by(hook)
            return
        for state in _TO_REDUCTION:
            chunk.move_all(state)
        partial, self._partial = self._partial, None
        self._reduction = chunk.reduce(
            release=False, async_op=True, partial=partial, all_reduce=not self._defers_replicas
        )

    @torch.no_grad()
    def _reduce_by(self, hook: ReductionHook) -> None:
        """Let the user's hook reduce: it gets the whole gradient and this rank's part of it to be written, both 1D."""
        chunk = self.chunk
        buffer = chunk.gradients
        buffer.complete()
        shard = buffer.payload.new_zeros(chunk.layout.shard_numel)
        hook.function(hook.state, buffer.payload, shard)
        chunk.discard_gradients()
        self._deliver(shard.to(chunk.shard_device, chunk.dtype))

    def advance(self) -> None:
        """Let a reduction that has two collectives start the second."""
        if self._reduction is not None and not self._reduction.done:
            self._reduction.advance()

    @torch.no_grad()
    def finish_reduction(self) -> list[nn.Parameter]:
        """
        Wait for the reduction, and let the originals have their gradients. Returns those that got one.

        Raises ExecutionOrderError if other units were averaged in.
        """
        if self._reduces_nothing:
            return self._hand_over()
        reduction, self._reduction = self._reduction, None
        if reduction is None:
            return []
        if self._defers_replicas:
            self._partial = reduction.wait()
            return []
        return self._deliver(reduction.wait())

    def _deliver(self, shard: Tensor) -> list[nn.Parameter]:
        """Let the originals have their parts of an averaged gradient. Returns those that got one."""
        layout = self.chunk.layout
        parts = layout.views(shard) if self.is_whole else layout.shard_views(shard)
        if self.tag is not None and self.chunk.pool.device.type == "cpu" and parts[-1].numel():
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
        begin, end, _ = self.chunk.layout.shard_slice(index)
        return whole.reshape(-1)[begin:end]

    @torch.no_grad()
    def write(self, index: int, whole: Tensor) -> None:
        """Give a parameter the values of `whole`, of its shape. What is unsharded is freed."""
        self.release()
        self._writes += 1
        self.chunk.wait_shard_reads()
        self.parts[index].copy_(self.part_of(index, whole.detach()))

    @torch.no_grad()
    def restore(self) -> None:
        """Let the originals be whole again, with memory of their own; this is not used afterwards. Collective."""
        for member, value in zip(self.members, self.chunk.layout.views(self.gathered()), strict=False):
            member.parameter.data = value.clone()

    def gathered(self, shard: Tensor | None = None) -> Tensor:
        """
        The whole chunk from every rank's shard, 1D, on the compute device. Collective.

        `shard`: another one than the parameters', of the same length; the gradients', for one.
        """
        chunk = self.chunk
        source = chunk.shard if shard is None else shard
        payload = torch.empty(chunk.numel, dtype=source.dtype, device=chunk.pool.device)
        work = start_all_gather(payload, source, chunk.layout, chunk.group)
        if work is not None:
            work.wait()
        return payload

    def reset(self) -> None:
        """Drop what an interrupted step has left."""
        self._drop_leaf_gradients()
        self._reduction = self._checked = self._part = self._partial = None
        self.chunk.reset()

    def _hand_over(self) -> list[nn.Parameter]:
        """Without peers the gradients of the leaves are those of the originals."""
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
    leaf.__dict__.update(original.__dict__)  # what users have noted on it
    return leaf


def _is_negative_zero(part: Tensor) -> bool:
    """Whether all elements are. Makes the host wait, so it is asked of what this rank did not use alone."""
    return part.numel() > 0 and bool(((part == 0) & torch.signbit(part)).all())


def _add_gradients(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> None:
    """Let parameters have gradients, beside those that they have."""
    existing, added = [], []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            existing.append(parameter.grad)
            added.append(gradient)
    if existing:
        torch._foreach_add_(existing, added)
