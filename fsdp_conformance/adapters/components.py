"""
The components of an engine as the suite uses them: what an adapter's optional methods return.

    reducer                   a module whose gradients are averaged in backward, bucket by bucket
    reduce_scatter_bucketer   reduce-scatters, with small ones coalesced
    chunk_pool                flat storage that is sharded over a group, and the blocks into which it is gathered
    mesh_collectives          collectives of the ranks along one axis of a DeviceMesh
    redistribution_cost       the cost of bringing a tensor from one layout on a mesh to another
    run_ranks                 ranks that are simulated in one process

These are protocols: return the engine's own class if it fits, or a thin wrapper if it does not. Where a method must
raise, any exception will do; the report shows its text. Shapes are those of tensors on the rank's device, and sizes
count elements unless the name says bytes.
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
    """An assignment of tensors to buckets."""

    buckets: list[list[int]]
    """Indices of the tensors in each bucket."""
    limits: list[int]
    """The limit in bytes under which each bucket was filled; 0 for a bucket of one sparse tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReducerOptions:
    """Options of a reducer. Equal on every rank."""

    bucket_cap_bytes: int | None = None
    """Bytes at which every bucket closes; None: the reducer's own limits, with a small first one."""
    find_unused: bool = False
    """Parameters may be unused in a forward, on some ranks or on all."""
    gradient_as_bucket_view: bool = False
    """Gradients are views into buckets."""


class GradientReducer(Protocol):
    """A wrapped module like torch's DistributedDataParallel: backward leaves averages in `.grad`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward; the backward of its output reduces gradients. Collective."""

    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        """
        Let `hook(state, bucket)` reduce gradients from the next forward on; `bucket.buffer()` is 1D and undivided.

        The tensor in its future replaces the average. Raises for a second hook, and for one of the wrong kind.
        """

    def join(self, divide_by_initial_world_size: bool = True) -> Any:
        """A context in which ranks may have different numbers of forwards. Collective."""


class Bucketer(Protocol):
    """
    Sums inputs over ranks; each rank keeps its part.

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
        Takes one input per rank of the group, all of equal shape; `callback` receives this rank's sum in that shape.

        Raises for a list of any other length. The return value is not used. Collective.
        """

    def flush(self) -> None:
        """Issue everything pending, bucket by bucket. Collective."""

    def wait(self) -> None:
        """Return when everything issued has been reduced and its callbacks have run."""

    def setup(self) -> None:
        """Make the bucketer usable again after `teardown`."""

    def teardown(self) -> None:
        """Free the buffers. Raises while inputs are pending."""


class ShardStatistics(NamedTuple):
    """Statistics of the most recently reduced gradients."""

    squared_norm: float
    overflow: bool
    """True if an element is infinite or NaN."""


class ChunkStorage(Protocol):
    """
    One chunk: consecutive tensors padded with zeros, split into one equal shard per rank of the group.

    It is open until `close`, and sharded from then on, except between `access` and `release` or `reduce`.
    """

    def append(self, tensor: Tensor) -> object:
        """Add a tensor. Raises for another dtype or if there is no room, and leaves the chunk unchanged then."""

    def close(self) -> None:
        """Keep only this rank's shard."""

    @property
    def shard(self) -> Tensor:
        """This rank's shard: 1D, padding included."""

    @property
    def valid_numel(self) -> int:
        """How many elements of this rank's shard belong to tensors: all, some, or none."""

    @property
    def is_unsharded(self) -> bool:
        """True if the chunk is gathered."""

    @property
    def values(self) -> list[Tensor]:
        """The tensors in their shapes, while the chunk is gathered."""

    def access(self) -> object:
        """Gather into a block of the pool; no effect if gathered. Raises if no block is free. Collective."""

    def release(self) -> None:
        """Return the block. Raises while a tensor is in "compute"."""

    def state(self, index: int) -> str:
        """The state of a tensor, by its index: a member of TENSOR_STATES; "hold" at first."""

    def move(self, index: int, state: str) -> None:
        """Change the state of a tensor. Raises for an illegal transition, and leaves the state unchanged then."""

    def put_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Store this rank's gradients of all tensors, in their shapes."""

    def reduce(self) -> Tensor:
        """
        This rank's shard of the mean of the gradients over the group: 1D, padding included.

        Returns the block, and sets every tensor to "hold". Raises unless each is "ready_for_reduce". Collective.
        """

    def statistics(self) -> ShardStatistics:
        """Statistics of the valid elements of this rank's shard. Raises before the first reduction."""

    def pair(self, partner: Any) -> None:
        """Make another chunk of the pool hold the master values. Raises if its layout differs. Idempotent."""

    def update_from_partner(self) -> None:
        """Copy the partner's current shard, cast, so that the next gather returns its values."""


class TensorLayout(NamedTuple):
    """A tensor's placement on a mesh."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    """One per axis of the mesh: Replicate, Shard or Partial."""


class PoolBlock(Protocol):
    """A block of a pool."""

    @property
    def payload(self) -> Tensor:
        """Its memory: 1D."""


class PoolUse(NamedTuple):
    """How many blocks of a pool are free and in use."""

    free: int
    used: int


class ChunkPool(Protocol):
    """Blocks of equal size and dtype, and the chunks that are gathered into them."""

    def chunk(
        self, numel: int, dtype: torch.dtype, group: ProcessGroup | None = None, *, fused: bool = False
    ) -> ChunkStorage:
        """
        An empty chunk. Raises if the size is not a multiple of the group size. Collective.

        `fused`: the chunk permanently owns its block instead of taking the pool's, and is never released (ZeRO-2).
        """

    def use(self) -> PoolUse:
        """The counters."""

    def lease(self) -> PoolBlock:
        """A free block. Raises if there is none."""

    def give_back(self, block: PoolBlock) -> None:
        """Take back a leased block. Raises for any other."""

    def schedule(self, uses: Sequence[ChunkStorage] | None) -> None:
        """Set how `compute` evicts: the farthest next use of upcoming `uses` first; None: first in, first out."""

    def compute(self, chunk: ChunkStorage) -> None:
        """Use all tensors of a chunk once: gathers it, possibly evicting another chunk. Collective."""

    def statistics(self) -> ShardStatistics:
        """Statistics of all closed chunks over all ranks. Collective."""


class MeshCollectives(Protocol):
    """
    Collectives along one axis of a mesh: each row, that is the ranks that differ only along that axis, is a group.

    `axis` is the axis's index; a source is a rank's index in the row. A tensor of `length` elements along `dim` is
    sharded like `torch.chunk`: 5 over 4 ranks gives 2, 2, 1 and an empty shard, which keeps its other dims. All methods
    except the first three are collective along the row. Meta tensors send nothing, and results for them are not used.
    """

    def shards(self, tensor: Tensor, num_shards: int, dim: int) -> Sequence[Tensor]:
        """A tensor's shards for `num_shards` ranks."""

    def pad(self, tensor: Tensor, dim: int, amount: int) -> Tensor:
        """A tensor with `amount` zeros appended along `dim`; for 0 the same object."""

    def unpad(self, tensor: Tensor, dim: int, amount: int) -> Tensor:
        """A tensor without its last `amount` elements along `dim`; for 0 the same object."""

    def broadcast(self, tensor: Tensor, mesh: DeviceMesh, axis: int, source: int = 0) -> object:
        """Overwrite a tensor, in place, with the source's. The return value is not used."""

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
        Fill `output`, in place, with this rank's entry of the source's list; other ranks' lists are ignored.

        `length`: the entries are the shards of that many elements along `dim`; None: they have equal shapes. The
        return value is not used.
        """

    def all_gather(self, shard: Tensor, mesh: DeviceMesh, axis: int, dim: int, length: int) -> Tensor:
        """The row's shards, concatenated to `length` elements along `dim`."""

    def reduce_scatter(self, tensor: Tensor, mesh: DeviceMesh, axis: int, dim: int) -> Tensor:
        """This rank's shard along `dim` of the sum over the row."""

    def shard_dim_all_to_all(
        self, shard: Tensor, mesh: DeviceMesh, axis: int, gather_dim: int, shard_dim: int, length: int
    ) -> Tensor:
        """
        This rank's contiguous shard along `shard_dim` of a tensor sharded along `gather_dim`, with `length` elements.
        """

    def check_meta(
        self, tensor: Tensor, mesh: DeviceMesh, axis: int, *, shape: bool = False, stride: bool = False
    ) -> None:
        """
        Raise on every rank of the row if its tensors differ in dtype or requires_grad, or in a requested property.
        """
