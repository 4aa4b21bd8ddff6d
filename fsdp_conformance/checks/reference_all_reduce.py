"""
The reference that nobody can argue with: the full model on every rank, and an explicit all-reduce of its gradients.

Sums are taken in the gradients' dtype over the default process group, then divided by the world size. A gradient that
is None on every rank stays None; a rank that has none where others do contributes zeros.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_conformance.checks.loop import Reference, Replica
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.workload import Regime, Workload


class AllReduce(Reference):
    """One replica a process."""

    name = "all-reduce"

    def __init__(self, workload: Workload, regime: Regime, **rest: Any) -> None:
        super().__init__(workload, regime, **rest)
        self._means: dict[str, Tensor] = {}
        """Mean over ranks of the micro-batches of this step that were reduced already."""

    def reduce(self, micro: int, reduced: bool) -> None:
        if not reduced:
            return
        replica = self.replicas[0]
        if not any(self.regime.is_reduced(earlier) for earlier in range(micro)):
            self._means = {}
        for name, mean in self._all_reduce(self._shared(replica)).items():
            self._means[name] = self._means[name] + mean if name in self._means else mean
        if micro == self.regime.micro_batches - 1:
            for name, mean in self._means.items():
                replica.params[name].grad = mean

    @staticmethod
    def _shared(replica: Replica) -> dict[str, nn.Parameter]:
        return {name: param for name, param in replica.params.items() if name not in replica.local}

    def _all_reduce(self, params: dict[str, nn.Parameter]) -> dict[str, Tensor]:
        """The mean over ranks of the gradients, which are taken away; only of those that some rank has."""
        if not params:
            return {}
        uses = torch.tensor(
            [param.grad is not None for param in params.values()], dtype=torch.int32, device=self.device
        )
        dist.all_reduce(uses)
        used = [name for name, count in zip(params, uses.tolist(), strict=True) if count]
        if not used:
            return {}
        flat = torch.cat([_gradient_or_zeros(params[name]).flatten() for name in used])
        dist.all_reduce(flat)
        flat /= self.world_size
        parts = torch.split(flat, [params[name].numel() for name in used])
        means = {name: part.view_as(params[name]).clone() for name, part in zip(used, parts, strict=True)}
        for param in params.values():
            param.grad = None
        return means


def _gradient_or_zeros(param: nn.Parameter) -> Tensor:
    return torch.zeros_like(param, requires_grad=False) if param.grad is None else param.grad


def all_reduce_reference(
    workload: Workload, regime: Regime, *, rank: int, world_size: int, device: torch.device | str = "cpu"
) -> TrainingHistory:
    """This rank's history. Collective over the default process group."""
    return AllReduce(workload, regime, ranks=[rank], world_size=world_size, device=device).train()[0]
