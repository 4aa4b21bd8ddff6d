"""
The plain oracle: every rank's batches in one process, without collectives, in float64 or float32.

Each virtual rank has its own model, because buffers and experts differ between ranks; gradients are averaged by adding
tensors in a specified order. The orders are those that correct implementations use: on an exact probe all of them must
give the same bits.
"""

from __future__ import annotations

from enum import StrEnum
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from fsdp_conformance.history.training import Gradients, TrainingHistory
from fsdp_conformance.references.loop import Reference, Replica
from fsdp_conformance.workload.definition import Regime, Workload


class Order(StrEnum):
    """When to divide by the world size, and in which order to add ranks and micro-batches."""

    SUM = "sum"
    """Add rank 0 to rank W-1, then divide."""
    REVERSED = "reversed"
    """Add rank W-1 to rank 0, then divide."""
    PREDIVIDED = "predivided"
    """Divide each, then add."""
    RECIPROCAL = "reciprocal"
    """Multiply each by the rounded 1/W, then add: DDP's reducer."""
    SPLIT = "split"
    """Divide each by a power of two near sqrt(W), add, divide by the rest: FSDP1."""
    ACCUMULATED = "accumulated"
    """Add what was already reduced to each rank's gradient, then as RECIPROCAL: DDP without no_sync."""


class SingleProcess(Reference):
    """All ranks of a world as replicas in this process."""

    name = "single-process"
    sums_gradients = True

    def __init__(
        self,
        workload: Workload,
        regime: Regime,
        *,
        order: Order = Order.SUM,
        keep_contributions: bool = False,
        **rest: Any,
    ) -> None:
        super().__init__(workload, regime, **rest)
        self.order = order
        self.keep_contributions = keep_contributions
        self._reduced: dict[str, Tensor | None] = {}
        """Mean over ranks of the micro-batches of this step that are already reduced."""

    def reduce(self, micro: int, reduced: bool) -> None:
        if self.keep_contributions:
            self._keep_contributions()
        if not reduced:
            return
        if micro == 0 or not any(self.regime.is_reduced(earlier) for earlier in range(micro)):
            self._reduced = {}
        last = micro == self.regime.micro_batches - 1
        for name in self.replicas[0].params:
            if name in self.replicas[0].local:
                continue
            gradients = [replica.params[name].grad for replica in self.replicas]
            template = next((grad for grad in gradients if grad is not None), None)
            mean = self._reduced.get(name)
            if template is not None:
                grads = [torch.zeros_like(template) if grad is None else grad for grad in gradients]
                mean = self.mean(name, grads, mean)
            self._reduced[name] = mean
            for replica in self.replicas:
                replica.params[name].grad = mean.clone() if last and mean is not None else None

    def mean(self, name: str, grads: list[Tensor], before: Tensor | None) -> Tensor:
        """
        The mean over ranks of the gradients since the last reduction, plus what was reduced `before`. With
        `Regime.sums` it is their sum.
        """
        if self.order is Order.ACCUMULATED and before is not None:
            return mean_of([grad + before for grad in grads], Order.RECIPROCAL)
        mean = sum_of(grads, self.order) if self.regime.sums else mean_of(grads, self.order)
        return mean if before is None else before + mean

    def _keep_contributions(self) -> None:
        """The gradient of each rank's last backward alone: what it has now minus what it had before."""
        for replica in self.replicas:
            sums = replica.contributions[-1]
            total = {name: None if p.grad is None else p.grad.detach().clone() for name, p in replica.params.items()}
            sums.append(_difference(total, self._carried(replica)))

    def _carried(self, replica: Replica) -> Gradients:
        """The rank's gradients before its last backward: the micro-batches since the last reduction."""
        micro = len(replica.contributions[-1])
        first_unreduced = micro
        while first_unreduced > 0 and not self.regime.is_reduced(first_unreduced - 1):
            first_unreduced -= 1
        carried: Gradients = dict.fromkeys(replica.params)
        for index, earlier in enumerate(replica.contributions[-1]):
            for name, grad in earlier.items():
                # A reduction never clears the gradients of local parameters.
                if grad is not None and (index >= first_unreduced or name in replica.local):
                    total = carried[name]
                    carried[name] = grad if total is None else total + grad
        return carried


def sum_of(grads: list[Tensor], order: Order) -> Tensor:
    """The sum of one tensor per rank, added in the order that `order` says."""
    return reduce(torch.add, reversed(grads) if order is Order.REVERSED else grads)


def mean_of(grads: list[Tensor], order: Order) -> Tensor:
    """The mean of one tensor per rank, added and divided in the order that `order` says."""
    world_size = len(grads)
    if order is Order.REVERSED:
        return sum_of(grads, order) / world_size
    if order is Order.PREDIVIDED:
        return reduce(torch.add, [grad / world_size for grad in grads])
    if order in (Order.RECIPROCAL, Order.ACCUMULATED):
        reciprocal = torch.tensor(1.0 / world_size, dtype=grads[0].dtype, device=grads[0].device)
        return reduce(torch.add, [grad * reciprocal for grad in grads])
    if order is Order.SPLIT:
        before = split_factor(world_size)
        return reduce(torch.add, [grad / before for grad in grads]) / (world_size / before)
    return sum_of(grads, order) / world_size


def split_factor(world_size: int) -> float:
    """
    FSDP1's factor before the reduction: 2 for 2, 3, 5 and 7 ranks, 4 for 6 and 8.

    Source: DefaultState._get_gradient_predivide_factor (torch/distributed/algorithms/_comm_hooks/default_hooks.py).
    """
    factor = 1
    while world_size % factor == 0 and world_size / factor > factor:
        factor *= 2
    return float(factor)


def _difference(total: Gradients, carried: Gradients) -> Gradients:
    difference: Gradients = {}
    for name, grad in total.items():
        before = carried[name]
        difference[name] = grad if grad is None or before is None else grad - before
    return difference


def single_process_histories(
    workload: Workload,
    regime: Regime,
    *,
    world_size: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float64,
    order: Order = Order.SUM,
) -> list[TrainingHistory]:
    """The histories of all ranks. Not collective."""
    source = str(dtype).removeprefix("torch.")
    return SingleProcess(
        workload,
        regime,
        order=order,
        ranks=range(world_size),
        world_size=world_size,
        device=device,
        dtype=dtype,
        source=source if order is Order.SUM else f"{source} {order}",
    ).train()


def single_process_reference(
    workload: Workload, regime: Regime, *, rank: int, world_size: int, **options: Any
) -> TrainingHistory:
    """The history of one rank, from a run of all of them with the options of `single_process_histories`."""
    return single_process_histories(workload, regime, world_size=world_size, **options)[rank]


def contributions(workload: Workload, regime: Regime, *, world_size: int) -> list[list[list[Gradients]]]:
    """The gradients of each rank's loss alone, by rank, step and micro-batch, in float64. For `explain`."""
    run = SingleProcess(
        workload, regime, keep_contributions=True, ranks=range(world_size), world_size=world_size, dtype=torch.float64
    )
    run.train()
    return [replica.contributions for replica in run.replicas]
