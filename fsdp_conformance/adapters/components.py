"""
The components of an engine, as the suite drives them: what optional methods of an adapter hand out.

    reducer                   a module whose gradients are averaged in backward, bucket by bucket
    reduce_scatter_bucketer   reduce-scatters, small ones coalesced
    chunk_pool                flat storage that is sharded over a group, and the blocks that it is gathered into
    mesh_collectives          what ranks along one axis of a DeviceMesh tell each other
    redistribution_cost       what bringing a tensor from one layout on a mesh to another takes
    run_ranks                 ranks that are simulated in one process

Protocols only: an engine's own class is handed out where it fits, and a few lines around it where it does not. Where a
method is to raise, any exception will do; its text is shown in the report. Shapes are those of tensors on the rank's
device, sizes count elements unless they say bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

#: The states of a tensor in a chunk.
TENSOR_STATES = ("free", "hold", "compute", "hold_after_bwd", "ready_for_reduce")


class Assignment(NamedTuple):
    """Tensors put into buckets."""

    buckets: list[list[int]]
    """Indices of the tensors in each bucket."""
    limits: list[int]
    """The limit in bytes that each bucket was filled under; 0 for a bucket of one sparse tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReducerOptions:
    """How a reducer is asked to reduce. Equal on every rank."""

    bucket_cap_bytes: int | None = None
    """Bytes at which every bucket is closed; None: the reducer's own limits, a small first one."""
    find_unused: bool = False
    """Parameters may take no part in a forward, on some ranks or on all."""
    gradient_as_bucket_view: bool = False
    """Gradients are views into buckets."""


class GradientReducer(Protocol):
    """A wrapped module in the shape of torch's DistributedDataParallel: backward leaves averages in `.grad`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward; the backward of what it returns is reduced. Collective."""

    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        """
        Let `hook(state, bucket)` reduce, from the next forward on; `bucket.buffer()` is 1D and undivided.

        Its future's tensor replaces the average. Raises for a second hook, and for one of the wrong kind.
        """

    def join(self, divide_by_initial_world_size: bool = True) -> Any:
        """A context in which ranks may have different numbers of forwards. Collective."""


class Bucketer(Protocol):
    """
    Sums of inputs over ranks, each rank keeping its part.

    Collectives are issued in `reduce_scatter` and `flush`; callbacks run in any of these methods, at the latest in
    `wait`.
    """

    def reduce_scatter(
        self,
        inputs: Sequence[Tensor],
        group: ProcessGroup | None = None,
        callback: Callable[[Tensor], object] | None = None,
    ) -> object:
        """
        One input for each rank of the group, all of one shape; `callback` gets this rank's sum, in that shape.

        Raises for a list of another length. What is returned is not used. Collective.
        """

    def flush(self) -> None:
        """Issue what is pending, bucket by bucket. Collective."""

    def wait(self) -> None:
        """Return when everything that was issued is reduced and its callbacks have run."""

    def setup(self) -> None:
        """Be ready again, after `teardown`."""

    def teardown(self) -> None:
        """Free the buffers. Raises if something is pending."""


class ShardStatistics(NamedTuple):
    """Of the gradients that were reduced last."""

    squared_norm: float
    overflow: bool
    """Whether an element is infinite or not a number."""


class ChunkStorage(Protocol):
    """
    One chunk: tensors one after the other, then zeros, in as many shards of one size as the group has ranks.

    It is open until `close`, and sharded from then on, except between `access` and `release` or `reduce`.
    """

    def append(self, tensor: Tensor) -> object:
        """Put one more tensor in. Raises for another dtype, or where there is no room; the chunk is then as before."""

    def close(self) -> None:
        """Keep this rank's shard alone."""

    @property
    def shard(self) -> Tensor:
        """This rank's shard: 1D, padding included."""

    @property
    def valid_numel(self) -> int:
        """How much of this rank's shard are elements of tensors: all, a part, or nothing."""

    @property
    def is_unsharded(self) -> bool:
        """Whether it is gathered."""

    @property
    def values(self) -> list[Tensor]:
        """The tensors in their shapes, while it is gathered."""

    def access(self) -> object:
        """Gather it into a block of the pool; again: no effect. Raises if no block is free. Collective."""

    def release(self) -> None:
        """Give the block back. Raises while a tensor is in "compute"."""

    def state(self, index: int) -> str:
        """The state of a tensor, by its place: a member of TENSOR_STATES; "hold" at first."""

    def move(self, index: int, state: str) -> None:
        """Change the state of a tensor. Raises where that is not legal; it then stays as it was."""

    def put_gradients(self, gradients: Sequence[Tensor]) -> None:
        """This rank's gradients of all tensors, in their shapes."""

    def reduce(self) -> Tensor:
        """
        The mean of the gradients over the group: this rank's shard of it, 1D, padding included.

        Gives the block back, and puts every tensor to "hold". Raises unless each is "ready_for_reduce". Collective.
        """

    def statistics(self) -> ShardStatistics:
        """Those of the valid elements of this rank's shard. Raises before the first reduction."""

    def pair(self, partner: Any) -> None:
        """Let another chunk of the pool have the master values. Raises for one of another layout. Again: no effect."""

    def update_from_partner(self) -> None:
        """From now on a gather brings the values that the partner's shard has now, cast."""


class TensorLayout(NamedTuple):
    """Where the parts of a tensor are."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    """One for each axis of the mesh: Replicate, Shard or Partial."""


class PoolBlock(Protocol):
    """A block of a pool."""

    @property
    def payload(self) -> Tensor:
        """Its memory: 1D."""


class PoolUse(NamedTuple):
    """How many blocks of a pool are free, and how many are not."""

    free: int
    used: int


class ChunkPool(Protocol):
    """Blocks of one size and dtype, and the chunks that are gathered into them."""

    def chunk(
        self, numel: int, dtype: torch.dtype, group: ProcessGroup | None = None, *, fused: bool = False
    ) -> ChunkStorage:
        """
        An empty chunk. Raises for a size that the group does not divide. Collective.

        `fused`: it has a block of its own for good, in place of the pool's, and is never released (ZeRO-2).
        """

    def use(self) -> PoolUse:
        """The counters."""

    def lease(self) -> PoolBlock:
        """A free block. Raises if there is none."""

    def give_back(self, block: PoolBlock) -> None:
        """Take a block back. Raises for one that is not leased."""

    def schedule(self, uses: Sequence[ChunkStorage] | None) -> None:
        """How `compute` evicts: the farthest next use first, of `uses` to come; None: first in, first out."""

    def compute(self, chunk: ChunkStorage) -> None:
        """One use of all tensors of a chunk: it is gathered, for which another may be evicted. Collective."""

    def statistics(self) -> ShardStatistics:
        """Those of all chunks that were closed, over all ranks. Collective."""


class MeshCollectives(Protocol):
    """
    Collectives along one axis of a mesh: each row of ranks that differ in that axis alone is a group of its own.

    `axis` is its index; a source is a rank of the row, counted from 0. A tensor of `length` elements along `dim` is
    sharded as by `torch.chunk`: 5 over 4 ranks are 2, 2, 1 and an empty shard, which is as long as the others in other
    dims. All of these are collective along the row, but for the first three. Tensors on meta send nothing; what is
    returned for them is not used.
    """

    def shards(self, tensor: Tensor, num_shards: int, dim: int) -> Sequence[Tensor]:
        """A tensor's shards for so many ranks."""

    def pad(self, tensor: Tensor, dim: int, amount: int) -> Tensor:
        """A tensor with `amount` zeros behind it along `dim`; for 0 the same object."""

    def unpad(self, tensor: Tensor, dim: int, amount: int) -> Tensor:
        """A tensor without its last `amount` elements along `dim`; for 0 the same object."""

    def broadcast(self, tensor: Tensor, mesh: DeviceMesh, axis: int, source: int = 0) -> object:
        """Overwrite a tensor, in place, with the source's. What is returned is not used."""

    def scatter(
        self,
        output: Tensor,
        shards: Sequence[Tensor] | None,
        mesh: DeviceMesh,
        axis: int,
        source: int = 0,
        *,
        dim: int = 0,
        length: int | None = None,
    ) -> object:
        """
        Fill `output`, in place, with this rank's entry of the source's list; those of others are not looked at.

        `length`: the entries are the shards of so many elements along `dim`; None: they are of one shape. What is
        returned is not used.
        """

    def all_gather(self, shard: Tensor, mesh: DeviceMesh, axis: int, dim: int, length: int) -> Tensor:
        """The row's shards, joined to `length` elements along `dim`."""

    def reduce_scatter(self, tensor: Tensor, mesh: DeviceMesh, axis: int, dim: int) -> Tensor:
        """This rank's shard along `dim` of the sum over the row."""

    def shard_dim_all_to_all(
        self, shard: Tensor, mesh: DeviceMesh, axis: int, gather_dim: int, shard_dim: int, length: int
    ) -> Tensor:
        """
        This rank's shard along `shard_dim` of what is sharded along `gather_dim`, where it has `length` elements.

        Contiguous.
        """

    def check_meta(
        self, tensor: Tensor, mesh: DeviceMesh, axis: int, *, shape: bool = False, stride: bool = False
    ) -> None:
        """
        Raise on every rank of the row if its tensors differ in dtype or requires_grad, or in what else is asked for.
        """
