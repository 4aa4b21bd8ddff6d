"""
The reduction of a unit's gradients: from the leaves, over the ranks, to the originals.

    leaves' gradients -> buffer -> reduce-scatter, all-reduce -> this rank's parts -> `.grad` of the originals

`StorageGradients` has the buffer and the collectives. Here is what only a unit knows: which parameters were used, what
is left for the replicas, the tag, and users' hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_conformance.engine.chunks.gradients import Reduction, StorageGradients
from fsdp_conformance.engine.chunks.storage import ShardedStorage
from fsdp_conformance.engine.fully_sharded.order_watch import TAG_TOLERANCE, OrderWatch, averaged_tag
from fsdp_conformance.engine.fully_sharded.shown_parameters import ShownParameters


class ReductionHook(NamedTuple):
    """A user's replacement for the average: see `FullyShardedDataParallel.register_comm_hook`."""

    state: object
    function: Callable[..., object]
    fills_shard: bool = True
    """True if it gets a shard to fill; otherwise it reduces the gradient in place."""


class ReductionState(Enum):
    """Where the gradients of a flat parameter are between the leaves and the originals."""

    # Members are singletons. Enum hashes their names in Python, and states are looked up all the time.
    __hash__ = object.__hash__

    IDLE = "idle"
    """Nothing is under way. Gradients may wait on the leaves or in the buffer."""
    REDUCING = "reducing"
    """On their way over all ranks; the result is for the originals."""
    DEFERRING = "deferring"
    """On their way over the shard group only, inside `no_all_reduce`."""
    DEFERRED = "deferred"
    """Summed over the shard group; the next reduction that includes the replicas adds them."""
    DELIVERED = "delivered"
    """A user's hook has reduced them and the originals have them; hooks of the parameters have yet to run."""


#: To IDLE: the originals have their gradients, or an exception has lost them.
REDUCTION_TRANSITIONS = MappingProxyType(
    {
        ReductionState.IDLE: frozenset({ReductionState.REDUCING, ReductionState.DEFERRING, ReductionState.DELIVERED}),
        ReductionState.REDUCING: frozenset({ReductionState.IDLE}),
        ReductionState.DEFERRING: frozenset({ReductionState.DEFERRED, ReductionState.IDLE}),
        ReductionState.DEFERRED: frozenset(
            {ReductionState.REDUCING, ReductionState.DEFERRING, ReductionState.DELIVERED}
        ),
        ReductionState.DELIVERED: frozenset({ReductionState.IDLE}),
    }
)


class GradientReduction:
    """
    The reduction of the gradients of one flat parameter.

    `tag`: the number of the unit, which follows the gradients in `storage`; None for a storage on one rank.
    """

    def __init__(self, storage: ShardedStorage, shown: ShownParameters, *, tag: int | None) -> None:
        self.tag = tag
        self.state = ReductionState.IDLE
        self._shown = shown
        self._handle: Reduction | None = None
        # Sums over the shard group that still have to be reduced over the replicas: 1D, in the reduce dtype.
        self._partial: Tensor | None = None
        # For each parameter, True if this rank has used it since the originals last got gradients.
        self._used: list[bool] = []
        # Parameters that have got a gradient, and that no call of `finish` has returned yet.
        self._delivered: list[nn.Parameter] = []
        # What sums are divided by; None: by the number of ranks.
        self._divisor: float | None = None
        self.use(storage)

    def use(self, storage: ShardedStorage) -> None:
        """Reduce into the shard of `storage` from now on."""
        self.storage = storage
        self.gradients = StorageGradients(storage)
        self._reduces_nothing = (
            self.gradients.reduces_in_place and storage.num_replicas == 1 and storage.compute_dtype is storage.dtype
        )
        share = 1.0
        if self._divisor is not None:
            self.gradients.divide_by(self._divisor)
            # Gradients that are handed over without a reduction are not divided.
            self._reduces_nothing = self._reduces_nothing and self._divisor == 1
            share = self._divisor / (storage.layout.world_size * storage.num_replicas)
        self._tag_gradient: Tensor | None = None
        if self.tag is not None:
            self._averaged_tag = averaged_tag(self.tag, storage.reduce_dtype)
            # Such that the sum over all ranks is the tag once it is divided.
            self._tag_gradient = torch.tensor(self._averaged_tag * share, device=storage.pool.device)

    def divide_by(self, factor: float) -> None:
        """Divide sums over all ranks by `factor` instead of their number, from the next reduction on."""
        self._divisor = factor
        self.use(self.storage)

    @property
    def is_trained(self) -> bool:
        """True if a parameter gets a gradient."""
        return any(member.parameter.requires_grad for member in self._shown.members)

    @property
    def leaf_gradients(self) -> list[Tensor | None]:
        """The gradients that autograd has accumulated on the leaves."""
        return [leaf.grad for leaf in self._shown.leaves]

    def drop_leaf_gradients(self) -> None:
        """Drop the gradients of the leaves."""
        for leaf in self._shown.leaves:
            leaf.grad = None

    @property
    def has_gradients(self) -> bool:
        """True if gradients have yet to be reduced."""
        return self.gradients.is_open or any(leaf.grad is not None for leaf in self._shown.leaves)

    @property
    def has_partial(self) -> bool:
        """True if sums over the shard group have yet to be reduced over the replicas."""
        return self.state is ReductionState.DEFERRED

    def accumulate(self) -> None:
        """
        Keep the leaves' gradients, in the dtype of the reduction, to be reduced later.

        In the dtype of the leaves they stay where they are, and autograd adds the next ones in place: a buffer would be
        one more copy of the unit while it is filled.
        """
        adds_in_place = self._reduces_nothing or self.storage.reduce_dtype is self.storage.compute_dtype
        if not adds_in_place and any(leaf.grad is not None for leaf in self._shown.leaves):
            self._collect(None)

    def _collect(self, tag: Tensor | None) -> None:
        """Move the leaves' gradients to the buffer, and `tag` after them if there is room for one."""
        self.gradients.buffer.put_all(self.leaf_gradients + ([] if self.tag is None else [tag]))
        # At once: from here to the reduction the buffer holds them, and the leaves would be a second copy.
        self.drop_leaf_gradients()

    # --- starting ----------------------------------------------------------------------------------------------------

    def announce(self, watch: OrderWatch) -> None:
        """Compare with peers that all are about to reduce this unit. Raises ExecutionOrderError; not on the CPU."""
        storage = self.storage
        if self.tag is not None and storage.pool.device.type != "cpu":
            watch.announce_all(
                (storage.group, storage.replica_group),
                "reduction",
                numel=storage.layout.shard_numel,
                unit=f"unit {self.tag} ({self._shown.name})",
            )

    def start(self, watch: OrderWatch, hook: ReductionHook | None = None, *, all_reduce: bool = True) -> None:
        """
        Begin to average the collected gradients over the ranks. Parameters without a gradient count as zero.

        `hook` replaces the average. With `all_reduce=False` the sum over the shard group is kept here until the next
        reduction, which includes the replicas. `watch` notes the tag of a reduction that is still under way.
        """
        if self._reduces_nothing and hook is None:
            return
        if self.state in (ReductionState.REDUCING, ReductionState.DEFERRING, ReductionState.DELIVERED):
            # The unit's backward has ended twice, as with two graphs: the originals add up both results.
            self._delivered = self.finish(watch)
        defers = not all_reduce and self.storage.num_replicas > 1
        # The tag is averaged once, with the replicas.
        self._collect(None if defers else self._tag_gradient)
        self._mark_unused()
        if hook is not None:
            self._reduce_by(hook)
            return
        partial, self._partial = self._partial, None
        self._go(ReductionState.DEFERRING if defers else ReductionState.REDUCING)
        with self._lost_on_error():
            buffer = self.gradients.take(partial)
            self._handle = self.gradients.start(buffer, partial=partial, all_reduce=not defers)

    def _mark_unused(self) -> None:
        """Note which parameters this rank has used, and mark the others in the buffer."""
        buffer, members = self.gradients.buffer, self._shown.members
        used = buffer.present[: len(members)]
        before = self._used if self.has_partial else [False] * len(used)
        self._used = [now or earlier for now, earlier in zip(used, before, strict=True)]
        for index, member in enumerate(members):
            if member.parameter.requires_grad and not used[index]:
                # Negative zeros sum to negative zero only if no rank has anything else: then it was used nowhere. So
                # ranks that use different parameters agree on which get a gradient, without another collective.
                buffer.view(index).fill_(-0.0)

    @torch.no_grad()
    def _reduce_by(self, hook: ReductionHook) -> None:
        """Let the user's hook reduce: it reads the whole gradient, and writes there or to this rank's shard, all 1D."""
        buffer = self.gradients.buffer
        buffer.complete()
        # Kept as one object: torch's own hooks give it other memory.
        gradient = buffer.payload
        if self._partial is not None:
            # Hooks are refused where a replica has only a shard: here it has everything, and so has the partial sum.
            gradient.add_(self._partial)
            self._partial = None
        if hook.fills_shard:
            shard = gradient.new_zeros(self.storage.layout.shard_numel)
            hook.function(hook.state, gradient, shard)
        else:
            hook.function(hook.state, gradient)
            # The optimizer reads the gradient after the buffer's memory has gone back to the pool.
            shard = gradient.clone()
        self.gradients.discard()
        # The tag is not checked: a hook may round or replace whatever it likes. Gathers still check theirs.
        self._delivered += self._deliver(shard.to(self.storage.shard_device, self.storage.dtype))
        self._go(ReductionState.DELIVERED)

    # --- finishing ---------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Let a reduction with two collectives start the second."""
        if self._handle is not None:
            self._handle.advance()

    @torch.no_grad()
    def finish(self, watch: OrderWatch) -> list[nn.Parameter]:
        """
        Wait for the reduction, and give the originals their gradients. Returns the parameters that got one.

        Raises ExecutionOrderError if gradients of other units were averaged in; `watch` checks on a GPU.
        """
        delivered, self._delivered = self._delivered, []
        return list(dict.fromkeys([*delivered, *self._finish(watch)]))

    def _finish(self, watch: OrderWatch) -> list[nn.Parameter]:
        if self.state is ReductionState.DELIVERED:
            self._go(ReductionState.IDLE)
            return []
        if self._reduces_nothing:
            return self._hand_over()
        handle, self._handle = self._handle, None
        if handle is None:
            # Started twice in one backward, and finished when it was started the second time.
            return []
        with self._lost_on_error():
            shard = handle.wait()
        if self.state is ReductionState.DEFERRING:
            self._partial = shard
            self._go(ReductionState.DEFERRED)
            return []
        self._go(ReductionState.IDLE)
        if self.tag is not None:
            tag = self.storage.layout.parts(shard)[-1]
            if tag.numel():
                watch.check(
                    self._shown.name,
                    self._averaged_tag,
                    tag,
                    what="averaged",
                    at_once=self.storage.pool.device.type == "cpu",
                    tolerance=TAG_TOLERANCE,
                )
        return self._deliver(shard)

    def _deliver(self, shard: Tensor) -> list[nn.Parameter]:
        """Give the originals their parts of an averaged gradient. Returns the parameters that got one."""
        parts = self.storage.layout.parts(shard)
        members = list(zip(self._shown.members, self._used, parts, strict=False))
        shows = [
            used or (member.parameter.requires_grad and bool(part.numel()) and not _is_negative_zero(part))
            for member, used, part in members
        ]
        # A part without elements shows nothing: it has a gradient if any other has one. None has after
        # torch.autograd.grad of inputs alone.
        has_any = any(shows)
        got, gradients = [], []
        for (member, _, part), shown in zip(members, shows, strict=True):
            if shown or (has_any and member.parameter.requires_grad and not part.numel()):
                got.append(member.parameter)
                gradients.append(part)
        _add_gradients(got, gradients)
        return got

    def _hand_over(self) -> list[nn.Parameter]:
        """Hand the leaves' gradients to the originals: without peers they are already the average."""
        got, gradients = [], []
        dtype = self.storage.dtype
        for member, gradient in zip(self._shown.members, self.leaf_gradients, strict=True):
            if gradient is not None:
                got.append(member.parameter)
                gradients.append(gradient.to(dtype).view(member.parameter.shape))
        self.drop_leaf_gradients()
        _add_gradients(got, gradients)
        return got

    def reset(self) -> None:
        """Drop the gradients of an interrupted step."""
        self.drop_leaf_gradients()
        self._handle = self._partial = None
        self._delivered = []
        self.state = ReductionState.IDLE
        self.gradients.reset()

    # --- state -------------------------------------------------------------------------------------------------------

    def _go(self, state: ReductionState) -> None:
        assert state in REDUCTION_TRANSITIONS[self.state], f"{self.state} to {state} is not in REDUCTION_TRANSITIONS"
        self.state = state

    @contextmanager
    def _lost_on_error(self) -> Iterator[None]:
        """A context that an exception leaves in IDLE: the reduction has consumed the buffer and the partial sum."""
        try:
            yield
        except BaseException:
            self._go(ReductionState.IDLE)
            raise


def _is_negative_zero(part: Tensor) -> bool:
    """True if all elements are -0.0. Makes the host wait, so only call it for parameters this rank did not use."""
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


def post_accumulate_hooks(parameters: Sequence[nn.Parameter]) -> None:
    """Call users' post-accumulate-gradient hooks, then step the optimizers that torch has attached to parameters."""
    for parameter in parameters:
        hooks: Mapping[int, Callable[[Tensor], None]] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        for hook in list(hooks.values()):
            hook(parameter)
        # `_apply_optimizer_in_backward`: its own hook is on the graph, which never reaches an original.
        optimizers: Sequence[Optimizer] = getattr(parameter, "_in_backward_optimizers", ())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
