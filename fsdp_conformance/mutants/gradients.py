"""Wrong reductions: scale, missing ranks, wrong rows, wrong parameters."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from fsdp_conformance.mutants.base import SeamFSDP2
from fsdp_conformance.mutants.mutant import known_wrong
from fsdp_conformance.plan import Plan, Sharding


@known_wrong("R003")
class SumInsteadOfMean(SeamFSDP2):
    """Gradients are summed over ranks instead of averaged."""

    def local_gradient(self, name: str, grad: Tensor) -> Tensor:
        return grad * self.world_size


@known_wrong("R003")
class AveragedTwice(SeamFSDP2):
    """Gradients are divided by the number of ranks twice."""

    def local_gradient(self, name: str, grad: Tensor) -> Tensor:
        return grad / self.world_size


@known_wrong("R008", "R003")
class DividesByPowerOfTwo(SeamFSDP2):
    """Gradients are divided by the next power of two above the number of ranks."""

    def local_gradient(self, name: str, grad: Tensor) -> Tensor:
        return grad * (self.world_size / (1 << self.world_size.bit_length()))


@known_wrong("R003")
class NoReduction(SeamFSDP2):
    """Each rank keeps its own gradient for the rows it stores."""

    def local_gradient(self, name: str, grad: Tensor) -> Tensor:
        return self.unreduced(grad)

    def unreduced(self, grad: Tensor) -> Tensor:
        """A gradient that reduces to this rank's own: zero in the rows of others, scaled up in its own rows."""
        alone = torch.zeros_like(grad)
        self.own_rows(alone).copy_(self.own_rows(grad) * self.world_size)
        return alone


@known_wrong("R003", name="reduction-skipped-from-step-2")
class ReductionSkipped(NoReduction):
    """Nothing is reduced from the third step on."""

    def local_gradient(self, name: str, grad: Tensor) -> Tensor:
        return self.unreduced(grad) if self.num_steps >= 2 else grad


@known_wrong("R003", "R133")
class BiasNotReduced(NoReduction):
    """One-dimensional parameters keep the rank's own gradient."""

    def local_gradient(self, name: str, grad: Tensor) -> Tensor:
        return self.unreduced(grad) if grad.dim() == 1 else grad


@known_wrong("R003")
class OneRankDropped(SeamFSDP2):
    """The last rank's gradients are left out of the reduction."""

    def local_gradient(self, name: str, grad: Tensor) -> Tensor:
        return torch.zeros_like(grad) if self.rank == self.world_size - 1 else grad


@known_wrong("R004")
class OneLayerNormNotAveraged(SeamFSDP2):
    """The gradient of one LayerNorm weight is summed instead of averaged."""

    def local_gradient(self, name: str, grad: Tensor) -> Tensor:
        norms = [
            fqn
            for fqn, module in self.names.modules.items()
            if isinstance(module, nn.LayerNorm) and module.elementwise_affine
        ]
        return grad * self.world_size if norms and name == f"{norms[0]}.weight" else grad


@known_wrong("R122")
class LastPaddedRowDropped(SeamFSDP2):
    """The last row of an unevenly sharded parameter gets no gradient."""

    def local_gradient(self, name: str, grad: Tensor) -> Tensor:
        if not grad.dim() or not grad.shape[0] % self.world_size:
            return grad
        shorter = grad.clone()
        shorter[-1] = 0
        return shorter


@known_wrong("R122")
class ShardsRotated(SeamFSDP2):
    """Each rank's shard of the gradient goes to the next rank."""

    def local_gradient(self, name: str, grad: Tensor) -> Tensor:
        if not grad.dim():
            return grad
        return grad.roll(self.rows_per_rank(grad), dims=self.shard_dim_of(grad))


@known_wrong("R126")
class OuterUnitReducesInner(SeamFSDP2):
    """The root averages the parameters of inner modules a second time."""

    def local_gradient(self, name: str, grad: Tensor) -> Tensor:
        return grad / self.world_size if "." in name else grad


@known_wrong("R123")
class UninitialisedPadding(SeamFSDP2):
    """Uninitialized padding, multiplied by zero, is added to the gradient."""

    def local_gradient(self, name: str, grad: Tensor) -> Tensor:
        padded = grad.new_empty(self.rows_per_rank(grad) * self.world_size)
        return grad + 0.0 * padded.sum()


@known_wrong("R005", "R003")
class ReducesOverShardGroupOnly(SeamFSDP2):
    """Under hybrid sharding gradients are never reduced over the replicas."""

    def _mesh(self, plan: Plan) -> DeviceMesh:
        mesh = super()._mesh(plan)
        return mesh["shard"] if plan.sharding is Sharding.HYBRID else mesh


@known_wrong("R062")
class AllReduceAndSlice(SeamFSDP2):
    """Gradients are all-reduced and sliced instead of reduce-scattered."""

    def prepare(self, model: nn.Module, plan: Plan) -> Plan:
        self._waiting: dict[str, Tensor] = {}
        return plan

    def no_sync(self) -> AbstractContextManager[Any]:
        # FSDP2's own reduction stays off; gradients are reduced by hand.
        return nullcontext()

    def local_gradient(self, name: str, grad: Tensor) -> Tensor:
        before = self._waiting.get(name)
        self._waiting[name] = grad.clone() if before is None else before + grad
        return grad

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        with super().no_sync():
            torch.autograd.backward(loss, retain_graph=retain_graph)
        if self._reduced:
            for name, parameter in self.sharded().items():
                if name in self._waiting:
                    self._reduce(parameter, self._waiting.pop(name))
            self._reduce_left_out()

    def _reduce(self, parameter: nn.Parameter, grad: Tensor) -> None:
        dist.all_reduce(grad)
        grad /= self.world_size
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            whole = DTensor.from_local(grad, mesh, [Replicate()] * mesh.ndim, run_check=False)
            part = whole.redistribute(placements=parameter.placements)
            parameter.grad = part if parameter.grad is None else parameter.grad + part
