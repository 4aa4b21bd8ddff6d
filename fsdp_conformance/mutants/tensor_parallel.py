"""Wrong beside tensor parallelism: gradients, norms and meshes that mix up the two kinds of groups."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_conformance.mutants.base import SeamFSDP2
from fsdp_conformance.mutants.mutant import known_wrong
from fsdp_conformance.plan import Plan


@known_wrong("R154")
class AveragesOverTheTensorGroup(SeamFSDP2):
    """Gradients are averaged over the tensor-parallel group, too, whose ranks hold different parts."""

    def after_backward(self) -> None:
        if self.plan.tensor_parallel > 1:
            for grad in self.local_grads().values():
                dist.all_reduce(grad, group=self.mesh.get_group("tensor"))
                grad.div_(self.plan.tensor_parallel)


@known_wrong("R154")
class DataParallelOverTheTensorGroup(SeamFSDP2):
    """The two dimensions of the mesh are exchanged: gradients are averaged over ranks that get the same batches."""

    def make_mesh(self, plan: Plan) -> DeviceMesh:
        ranks = torch.arange(self.world_size).view(-1, plan.tensor_parallel).t().contiguous()
        return DeviceMesh(self.device.type, ranks, mesh_dim_names=("shard", "tensor"))


@known_wrong("R154")
class IgnoresTensorParallelism(SeamFSDP2):
    """Layers are not sharded over the tensor-parallel group; each of its ranks computes, and holds, all of them."""

    def prepare(self, model: nn.Module, plan: Plan) -> Plan:
        self._degree = plan.tensor_parallel
        return replace(plan, tensor_parallel=1, tensor_styles=())

    def _mesh(self, plan: Plan) -> DeviceMesh:
        shape = (self.world_size // self._degree, self._degree)
        mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("shard", "tensor"))
        return mesh["shard"]


@known_wrong("R154")
class CountsReplicatedInTheNorm(SeamFSDP2):
    """The total norm adds up what all ranks hold: parameters that a tensor-parallel group replicates count twice."""

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        grads = list(self.local_grads().values())
        total = torch.stack([grad.square().sum() for grad in grads]).sum()
        dist.all_reduce(total)
        norm = total.sqrt()
        for grad in grads:
            grad.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm
