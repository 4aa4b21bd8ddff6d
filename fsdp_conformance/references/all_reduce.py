"""
The simplest reference with collectives: the full model on every rank, and an explicit all-reduce of its gradients.

Gradients are summed in their dtype over the default process group, then divided by the world size. A gradient that is
None on every rank stays None; if only some ranks have it, the others contribute zeros.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.references.loop import Reference
from fsdp_conformance.workload.definition import Regime, Workload


class AllReduce(Reference):
    """One replica per process."""

    name = "all-reduce"

    def __init__(self, workload: Workload, regime: Regime, **rest: Any) -> None:
        super().__init__(workload, regime, **rest)
        self._means: dict[str, Tensor] = {}
        """Mean over ranks of the micro-batches of this step that are already reduced."""

    def reduce(self, micro: int, reduced: bool) -> None:
        if not reduced:
            return
        replica = self.replicas[0]
        if not any(self.regime.is_reduced(earlier) for earlier in range(micro)):
            self._means = {}
        shared = {name: param for name, param in replica.params.items() if name not in replica.local}
        for name, mean in self._all_reduce(shared).items():
            self._means[name] = self._means[name] + mean if name in self._means else mean
        if micro == self.regime.micro_batches - 1:
            for name, mean in self._means.items():
                replica.params[name].grad = mean

    def gather_norms(self, norms: list[Tensor]) -> list[Tensor]:
        return gathered(norms)

    def _all_reduce(self, params: dict[str, nn.Parameter]) -> dict[str, Tensor]:
        """The mean over ranks of the gradients that any rank has; sets the gradients to None."""
        if not params:
            return {}
        uses = torch.tensor(
            [param.grad is not None for param in params.values()], dtype=torch.int32, device=self.device
        )
        dist.all_reduce(uses)
        used = [name for name, count in zip(params, uses.tolist(), strict=True) if count]
        if not used:
            return {}
        means: dict[str, Tensor] = {}
        # Apart for each dtype: `torch.cat` would promote them all to the widest one.
        for dtype in dict.fromkeys(params[name].dtype for name in used):
            names = [name for name in used if params[name].dtype is dtype]
            flat = torch.cat([_gradient_or_zeros(params[name]).flatten() for name in names])
            dist.all_reduce(flat)
            flat /= self.world_size
            parts = torch.split(flat, [params[name].numel() for name in names])
            means.update((name, part.view_as(params[name]).clone()) for name, part in zip(names, parts, strict=True))
        for param in params.values():
            param.grad = None
        return means


def gathered(values: list[Tensor]) -> list[Tensor]:
    """The scalars of all ranks, each of which has one. Collective."""
    (own,) = values
    received = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(received, own)
    return received


def _gradient_or_zeros(param: nn.Parameter) -> Tensor:
    return torch.zeros_like(param, requires_grad=False) if param.grad is None else param.grad


def all_reduce_reference(
    workload: Workload, regime: Regime, *, rank: int, world_size: int, device: torch.device | str = "cpu"
) -> TrainingHistory:
    """This rank's history. Collective over the default process group."""
    return AllReduce(workload, regime, ranks=[rank], world_size=world_size, device=device).train()[0]
