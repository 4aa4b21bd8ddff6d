"""Wrong mesh collectives: which ranks they reach, whose data they use, and how they treat uneven shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fsdp_conformance.adapters.components import MeshCollectives
from fsdp_conformance.adapters.vendors.reference_components import EngineMesh, ReferenceComponents
from fsdp_conformance.engine.errors import TensorMetaMismatch
from fsdp_conformance.engine.mesh.collectives import mesh_all_gather
from fsdp_conformance.engine.mesh.tensor_meta import check_tensor_meta
from fsdp_conformance.mutants.mutant import known_wrong


class SeamMesh(EngineMesh, ReferenceComponents):
    """An adapter for the engine's mesh collectives, with seams to override."""

    def mesh_collectives(self) -> MeshCollectives:
        return self

    def source(self, source: int, mesh: DeviceMesh, axis: int) -> int:
        """The group rank of the source."""
        return source

    def axis(self, axis: int) -> int:
        """The mesh axis to use."""
        return axis

    def reduced(self, tensor: Tensor, mesh: DeviceMesh, axis: int, dim: int) -> Tensor:
        """This rank's shard of the sum."""
        return super().reduce_scatter(tensor, mesh, axis, dim)

    def broadcast(self, tensor: Tensor, mesh: DeviceMesh, axis: int, source: int = 0) -> object:
        return super().broadcast(tensor, mesh, self.axis(axis), self.source(source, mesh, axis))

    def scatter(
        self, output: Tensor, shards: Sequence[Tensor] | None, mesh: DeviceMesh, axis: int, source: int = 0, **more: Any
    ) -> object:
        return super().scatter(output, shards, mesh, self.axis(axis), self.source(source, mesh, axis), **more)

    def all_gather(self, shard: Tensor, mesh: DeviceMesh, axis: int, dim: int, length: int) -> Tensor:
        return super().all_gather(shard, mesh, self.axis(axis), dim, length)

    def reduce_scatter(self, tensor: Tensor, mesh: DeviceMesh, axis: int, dim: int) -> Tensor:
        return self.reduced(tensor, mesh, self.axis(axis), dim)

    def shard_dim_all_to_all(
        self, shard: Tensor, mesh: DeviceMesh, axis: int, gather_dim: int, shard_dim: int, length: int
    ) -> Tensor:
        return super().shard_dim_all_to_all(shard, mesh, self.axis(axis), gather_dim, shard_dim, length)

    def check_meta(self, tensor: Tensor, mesh: DeviceMesh, axis: int, **checks: bool) -> None:
        super().check_meta(tensor, mesh, self.axis(axis), **checks)


# --- which ranks -----------------------------------------------------------------------------------------------------


@known_wrong("R182", shows=("finding", "raised"), raises="MeshError")
class FirstAxisAlways(SeamMesh):
    """Every collective runs along the first mesh axis."""

    def axis(self, axis: int) -> int:
        return 0


@known_wrong("R182")
class SourceOfTheWorld(SeamMesh):
    """The source is read as a world rank; rows without that rank use their first."""

    def source(self, source: int, mesh: DeviceMesh, axis: int) -> int:
        ranks = dist.get_process_group_ranks(mesh.get_group(axis))
        return ranks.index(source) if source in ranks else 0


@known_wrong("R182", shows=("finding", "raised"), raises="MeshError")
class FirstSourceAlways(SeamMesh):
    """The source is always the first rank of the row."""

    def source(self, source: int, mesh: DeviceMesh, axis: int) -> int:
        return 0


# --- broadcast and scatter -------------------------------------------------------------------------------------------


@known_wrong("R182")
class BroadcastIntoACopy(SeamMesh):
    """The broadcast result is returned, but the tensor itself does not change."""

    def broadcast(self, tensor: Tensor, mesh: DeviceMesh, axis: int, source: int = 0) -> object:
        return super().broadcast(tensor.clone(), mesh, axis, source)


@known_wrong("R182")
class BroadcastByMemory(SeamMesh):
    """A tensor is broadcast in memory order, ignoring each rank's strides."""

    def broadcast(self, tensor: Tensor, mesh: DeviceMesh, axis: int, source: int = 0) -> object:
        return super().broadcast(tensor.as_strided((tensor.numel(),), (1,)), mesh, axis, source)


@known_wrong("R182")
class ScattersItsOwnList(SeamMesh):
    """A rank that passes a list of the right length takes its own entry from it."""

    def scatter(
        self, output: Tensor, shards: Sequence[Tensor] | None, mesh: DeviceMesh, axis: int, source: int = 0, **more: Any
    ) -> object:
        super().scatter(output, shards, mesh, axis, source, **more)
        if shards is not None and len(shards) == mesh.size(axis):
            output.copy_(shards[mesh.get_local_rank(axis)])
        return output


@known_wrong("R182", shows=("raised",), raises="ValueError")
class ListsMustFit(SeamMesh):
    """The lists of all ranks are validated, not only the source's."""

    def scatter(
        self, output: Tensor, shards: Sequence[Tensor] | None, mesh: DeviceMesh, axis: int, source: int = 0, **more: Any
    ) -> object:
        problem = torch.tensor(float(shards is None or len(shards) != mesh.size(axis)), device=output.device)
        dist.all_reduce(problem, group=mesh.get_group(axis))
        if problem.item():
            raise ValueError("every rank must pass one tensor per rank")
        return super().scatter(output, shards, mesh, axis, source, **more)


@known_wrong("R182")
class ScatterIntoACopy(SeamMesh):
    """The scatter result is returned, but the output does not change."""

    def scatter(
        self, output: Tensor, shards: Sequence[Tensor] | None, mesh: DeviceMesh, axis: int, source: int = 0, **more: Any
    ) -> object:
        return super().scatter(output.clone(), shards, mesh, axis, source, **more)


@known_wrong("R182")
class ScatterByMemory(SeamMesh):
    """List entries are sent in memory order, ignoring their strides."""

    def scatter(
        self, output: Tensor, shards: Sequence[Tensor] | None, mesh: DeviceMesh, axis: int, source: int = 0, **more: Any
    ) -> object:
        return super().scatter(output, shards and [_by_memory(shard) for shard in shards], mesh, axis, source, **more)


@known_wrong("R182")
class PadsInFront(SeamMesh):
    """Uneven shards are padded in front and cut at the back."""

    def scatter(
        self, output: Tensor, shards: Sequence[Tensor] | None, mesh: DeviceMesh, axis: int, source: int = 0, **more: Any
    ) -> object:
        super().scatter(output, shards, mesh, axis, source, **more)
        dim, length = more.get("dim", 0), more.get("length")
        if length is not None:
            padding = -(-length // mesh.size(axis)) - output.shape[dim]
            output.copy_(F.pad(output.movedim(dim, -1), (padding, 0)).narrow(-1, 0, output.shape[dim]).movedim(-1, dim))
        return output


# --- shards ----------------------------------------------------------------------------------------------------------


@known_wrong("R182")
class BalancedShards(SeamMesh):
    """5 rows over 4 ranks become 2, 1, 1 and 1."""

    def shards(self, tensor: Tensor, num_shards: int, dim: int) -> Sequence[Tensor]:
        return torch.tensor_split(tensor, num_shards, dim)


@known_wrong("R182")
class EmptyShardsMissing(SeamMesh):
    """Ranks without elements have no shard at all."""

    def shards(self, tensor: Tensor, num_shards: int, dim: int) -> Sequence[Tensor]:
        return tensor.chunk(num_shards, dim)


@known_wrong("R182")
class EmptyShardsFlat(SeamMesh):
    """An empty shard has one dim, whatever the others have."""

    def shards(self, tensor: Tensor, num_shards: int, dim: int) -> Sequence[Tensor]:
        shards = super().shards(tensor, num_shards, dim)
        return [shard if shard.numel() else shard.flatten() for shard in shards]


@known_wrong("R182")
class PaddingNotZero(SeamMesh):
    """Padding is uninitialized memory."""

    def pad(self, tensor: Tensor, dim: int, amount: int) -> Tensor:
        padded = torch.empty_like(super().pad(tensor, dim, amount))
        padded.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
        return padded if amount else tensor


@known_wrong("R182")
class PaddingCopies(SeamMesh):
    """A tensor that needs no padding is copied anyway."""

    def pad(self, tensor: Tensor, dim: int, amount: int) -> Tensor:
        return super().pad(tensor, dim, amount).clone()


@known_wrong("R182")
class UnpadsTheFront(SeamMesh):
    """Padding is removed at the wrong end."""

    def unpad(self, tensor: Tensor, dim: int, amount: int) -> Tensor:
        return tensor.narrow(dim, amount, tensor.shape[dim] - amount) if amount else tensor


# --- gather, reduce-scatter, all-to-all ------------------------------------------------------------------------------


@known_wrong("R183")
class KeepsPadding(SeamMesh):
    """The gathered tensor still contains the padding of uneven shards."""

    def all_gather(self, shard: Tensor, mesh: DeviceMesh, axis: int, dim: int, length: int) -> Tensor:
        most = -(-length // mesh.size(axis))
        return mesh_all_gather(self.pad(shard, dim, most - shard.shape[dim]), (mesh, axis), dim).wait()


@known_wrong("R183")
class GathersAlongFirstDim(SeamMesh):
    """Even shards are always joined along the first dim."""

    def all_gather(self, shard: Tensor, mesh: DeviceMesh, axis: int, dim: int, length: int) -> Tensor:
        whole = super().all_gather(shard, mesh, axis, dim, length)
        return torch.cat(whole.chunk(mesh.size(axis), dim), 0) if not length % mesh.size(axis) else whole


@known_wrong("R183")
class GathersInReverse(SeamMesh):
    """Shards are joined from the last rank to the first."""

    def all_gather(self, shard: Tensor, mesh: DeviceMesh, axis: int, dim: int, length: int) -> Tensor:
        whole = super().all_gather(shard, mesh, axis, dim, length)
        return torch.cat(whole.chunk(mesh.size(axis), dim)[::-1], dim)


@known_wrong("R183")
class SumsOverTheWorld(SeamMesh):
    """Sums run over all ranks instead of the row."""

    def reduced(self, tensor: Tensor, mesh: DeviceMesh, axis: int, dim: int) -> Tensor:
        total = tensor.contiguous().clone()
        dist.all_reduce(total)
        return self.shards(total, mesh.size(axis), dim)[mesh.get_local_rank(axis)].contiguous()


@known_wrong("R183")
class AveragesTheRow(SeamMesh):
    """Sums are divided by the size of the row."""

    def reduced(self, tensor: Tensor, mesh: DeviceMesh, axis: int, dim: int) -> Tensor:
        return super().reduced(tensor, mesh, axis, dim) / mesh.size(axis)


@known_wrong("R183")
class NextRanksSum(SeamMesh):
    """Each rank gets the next rank's shard."""

    def reduced(self, tensor: Tensor, mesh: DeviceMesh, axis: int, dim: int) -> Tensor:
        size, place = mesh.size(axis), mesh.get_local_rank(axis)
        total = tensor.contiguous().clone()
        dist.all_reduce(total, group=mesh.get_group(axis))
        return self.shards(total, size, dim)[(place + 1) % size].contiguous()


@known_wrong("R183")
class ReducesByMemory(SeamMesh):
    """Tensors are summed in memory order, ignoring their strides."""

    def reduced(self, tensor: Tensor, mesh: DeviceMesh, axis: int, dim: int) -> Tensor:
        return super().reduced(_by_memory(tensor), mesh, axis, dim)


@known_wrong("R183")
class SumKeepsPadding(SeamMesh):
    """A shard of a sum still has its padding."""

    def reduced(self, tensor: Tensor, mesh: DeviceMesh, axis: int, dim: int) -> Tensor:
        shard = super().reduced(tensor, mesh, axis, dim)
        return self.pad(shard, dim, -(-tensor.shape[dim] // mesh.size(axis)) - shard.shape[dim])


@known_wrong("R183")
class ExchangesInReverse(SeamMesh):
    """The last rank's part comes first."""

    def shard_dim_all_to_all(
        self, shard: Tensor, mesh: DeviceMesh, axis: int, gather_dim: int, shard_dim: int, length: int
    ) -> Tensor:
        result = super().shard_dim_all_to_all(shard, mesh, axis, gather_dim, shard_dim, length)
        return torch.cat(result.chunk(mesh.size(axis), gather_dim)[::-1], gather_dim)


@known_wrong("R183")
class ExchangeIsStrided(SeamMesh):
    """The result is a view of everything that was gathered."""

    def shard_dim_all_to_all(
        self, shard: Tensor, mesh: DeviceMesh, axis: int, gather_dim: int, shard_dim: int, length: int
    ) -> Tensor:
        whole = self.all_gather(shard, mesh, axis, gather_dim, length)
        return self.shards(whole, mesh.size(axis), shard_dim)[mesh.get_local_rank(axis)]


@known_wrong("R183")
class ExchangeRoundsDown(SeamMesh):
    """The remainder that does not divide by the number of ranks is lost."""

    def shard_dim_all_to_all(
        self, shard: Tensor, mesh: DeviceMesh, axis: int, gather_dim: int, shard_dim: int, length: int
    ) -> Tensor:
        whole = self.all_gather(shard, mesh, axis, gather_dim, length)
        size = whole.shape[shard_dim] // mesh.size(axis)
        return whole.narrow(shard_dim, mesh.get_local_rank(axis) * size, size).contiguous()


@known_wrong("R183")
class MetaCommunicates(SeamMesh):
    """A gather synchronizes ranks even for tensors on meta."""

    def all_gather(self, shard: Tensor, mesh: DeviceMesh, axis: int, dim: int, length: int) -> Tensor:
        dist.barrier(group=mesh.get_group(axis))
        return super().all_gather(shard, mesh, axis, dim, length)


# --- metadata --------------------------------------------------------------------------------------------------------


@known_wrong("R185")
class ChecksTheWorld(SeamMesh):
    """Metadata is compared over all ranks instead of the row."""

    def check_meta(self, tensor: Tensor, mesh: DeviceMesh, axis: int, **checks: bool) -> None:
        world = dist.group.WORLD
        if world is not None:
            check_tensor_meta(tensor, world, **checks)


@known_wrong("R185", shows=("refusal",))
class RaisesWhereDifferent(SeamMesh):
    """Only the ranks that differ from the first one raise."""

    def check_meta(self, tensor: Tensor, mesh: DeviceMesh, axis: int, **checks: bool) -> None:
        try:
            super().check_meta(tensor, mesh, axis, **checks)
        except TensorMetaMismatch as error:
            if any(problem.startswith(f"rank {dist.get_rank()}:") for problem in error.problems):
                raise


@known_wrong("R185", shows=("refusal",))
class DtypeIgnored(SeamMesh):
    """Dtypes are not compared."""

    def check_meta(self, tensor: Tensor, mesh: DeviceMesh, axis: int, **checks: bool) -> None:
        super().check_meta(tensor.float(), mesh, axis, **checks)


@known_wrong("R185", shows=("refusal",))
class RequiresGradIgnored(SeamMesh):
    """`requires_grad` is not compared."""

    def check_meta(self, tensor: Tensor, mesh: DeviceMesh, axis: int, **checks: bool) -> None:
        super().check_meta(tensor.detach(), mesh, axis, **checks)


@known_wrong("R185", shows=("refusal",))
class ShapeIgnored(SeamMesh):
    """Shapes are not compared, even on request."""

    def check_meta(self, tensor: Tensor, mesh: DeviceMesh, axis: int, **checks: bool) -> None:
        super().check_meta(tensor, mesh, axis, **{**checks, "shape": False})


@known_wrong("R185", shows=("refusal",))
class StrideIgnored(SeamMesh):
    """Strides are not compared, even on request."""

    def check_meta(self, tensor: Tensor, mesh: DeviceMesh, axis: int, **checks: bool) -> None:
        super().check_meta(tensor, mesh, axis, **{**checks, "stride": False})


@known_wrong("R185", shows=("raised",), raises="TensorMetaMismatch")
class ShapeAlwaysCompared(SeamMesh):
    """Shapes are compared even when that was turned off."""

    def check_meta(self, tensor: Tensor, mesh: DeviceMesh, axis: int, **checks: bool) -> None:
        super().check_meta(tensor, mesh, axis, **{**checks, "shape": True})


@known_wrong("R185", shows=("raised",), raises="TensorMetaMismatch")
class StrideAlwaysCompared(SeamMesh):
    """Strides are compared even when that was turned off."""

    def check_meta(self, tensor: Tensor, mesh: DeviceMesh, axis: int, **checks: bool) -> None:
        super().check_meta(tensor, mesh, axis, **{**checks, "stride": True})


def _by_memory(tensor: Tensor) -> Tensor:
    """The tensor's elements in memory order, starting at its storage offset."""
    return tensor.as_strided(tensor.shape, torch.empty(tensor.shape, device="meta").stride())
