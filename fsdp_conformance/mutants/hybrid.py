"""Wrong hybrid sharding: the reduction over replicas and the replicas' initial values."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from fsdp_conformance.mutants.base import SeamFSDP2
from fsdp_conformance.mutants.mutant import known_wrong
from fsdp_conformance.plan import Plan, Sharding


class HookedHybrid(SeamFSDP2):
    """
    A correct hybrid sharding built on FSDP2's all-reduce hook: each unit's shard is all-reduced by hand.

    The hook gets a unit's shards as one flat, padded tensor of the same size on every rank.
    """

    def shard_group(self) -> ProcessGroup:
        """The ranks that this rank shards with."""
        return self._hybrid_mesh.get_group("shard")

    def replica_group(self) -> ProcessGroup:
        """The ranks that hold the same shard."""
        return self._hybrid_mesh.get_group("replicate")

    def reduce_over_replicas(self, shard: Tensor) -> None:
        """Average a unit's shard, already averaged over the shard group, in place."""
        dist.all_reduce(shard, group=self.replica_group())
        shard /= self.replica_group().size()

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        wrapped = super().wrap(model, plan)
        if plan.sharding is Sharding.HYBRID:
            for module in wrapped.modules():
                if isinstance(module, FSDPModule):
                    module.set_all_reduce_hook(self.reduce_over_replicas)
        return wrapped

    def _mesh(self, plan: Plan) -> DeviceMesh:
        mesh = super()._mesh(plan)
        if plan.sharding is not Sharding.HYBRID:
            return mesh
        self._hybrid_mesh = mesh
        return mesh["shard"]


@known_wrong("R151")
class AllReducesOverShardGroup(HookedHybrid):
    """Under hybrid sharding shards are all-reduced over the shard group, whose ranks hold different shards."""

    def reduce_over_replicas(self, shard: Tensor) -> None:
        dist.all_reduce(shard, group=self.shard_group())
        shard /= self.shard_group().size()


@known_wrong("R151")
class DividesByShardGroupOnly(HookedHybrid):
    """Under hybrid sharding gradients are divided by the size of the shard group, and summed over replicas."""

    def reduce_over_replicas(self, shard: Tensor) -> None:
        dist.all_reduce(shard, group=self.replica_group())


@known_wrong("R151")
class DividesByReplicasOnly(HookedHybrid):
    """Under hybrid sharding gradients are divided by the number of replicas, and summed over the shard group."""

    def reduce_over_replicas(self, shard: Tensor) -> None:
        super().reduce_over_replicas(shard)
        shard *= self.shard_group().size()


@known_wrong("R151")
class AllReducesTheFullGradient(HookedHybrid):
    """Under hybrid sharding the all-reduce over replicas carries the full gradient instead of the shard."""

    def reduce_over_replicas(self, shard: Tensor) -> None:
        full = shard.repeat(self.shard_group().size())
        super().reduce_over_replicas(full)
        shard.copy_(full[: shard.numel()])


@known_wrong("R151")
class AllReducesInPieces(HookedHybrid):
    """Under hybrid sharding a unit's shard is all-reduced in pieces."""

    def reduce_over_replicas(self, shard: Tensor) -> None:
        for piece in shard.chunk(2):
            super().reduce_over_replicas(piece)


@known_wrong("R152")
class SynchronisesInsideShardGroups(SeamFSDP2):
    """Sync at init broadcasts from the first rank of each shard group."""

    def synchronise(self, model: nn.Module) -> None:
        # All ranks' values, and from those the value of the shard group's first rank.
        first = self.rank - self.rank % (self.world_size // self.plan.replicas)
        for tensor in [*model.parameters(), *model.buffers()]:
            values = [torch.empty_like(tensor) for _ in range(self.world_size)]
            dist.all_gather(values, tensor.detach())
            tensor.detach().copy_(values[first])


@known_wrong("R153", "R069")
class AveragesExperts(SeamFSDP2):
    """The gradients of units that belong to one rank are averaged over all ranks."""

    def after_backward(self) -> None:
        prefixes = tuple(f"{unit}." for unit in self.plan.local_units)
        for name, grad in self.local_grads().items():
            if name.startswith(prefixes):
                dist.all_reduce(grad)
                grad.div_(self.world_size)
