"""
The references of an example, computed once for all ranks: the model in one process, in float64 and in float32.

    exact            every order of adding ranks gives the same bits in float32 as in float64: comparisons are bitwise.
                     An example that ought to be exact and is not has run out of mantissa: NotExact, it is not judged
    smooth           the distances between the orders are the noise that bounds are derived from
    low precision    the values of the reference that rounds where the plan says: comparisons are bitwise

A failure is confirmed against the references of a case, which include torch's DistributedDataParallel.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import nn

from fsdp_conformance.errors import NotExact
from fsdp_conformance.explore.example import Example
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.references.exactness import demands_bitwise, values
from fsdp_conformance.references.reference_set import EXPECTED, References
from fsdp_conformance.references.rounding import Rounding
from fsdp_conformance.references.single_process import Order, single_process_histories
from fsdp_conformance.workload.definition import Regime, Workload
from fsdp_conformance.workload.units import local_names


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """The references for the ranks of one example, in rank order."""

    workload: Workload
    """The example's workload; models and batches are made once and copied."""
    references: tuple[References, ...] = ()
    rounded: tuple[TrainingHistory, ...] = ()
    """In low precision, in place of `references`."""


def prepare(example: Example) -> Prepared:
    """Train the references. Not collective. Raises NotExact if bitwise judgement is due but impossible."""
    workload = remembering(example.workload())
    size, regime = example.world_size, example.regime
    if example.plan.param_dtype is not None:
        run = Rounding(workload, regime, example.plan, ranks=range(size), world_size=size)
        return Prepared(workload=workload, rounded=tuple(run.train()))
    orders = orders_for(size, regime)
    twins = single_process_histories(workload, regime, world_size=size, dtype=torch.float64)
    runs = {
        order: single_process_histories(workload, regime, world_size=size, dtype=torch.float32, order=order)
        for order in orders
    }
    exact = demands_bitwise(workload, regime, size)
    if exact:
        for order, histories in runs.items():
            _demand_equal(workload, order, histories, twins)
    model = workload.build(0)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return Prepared(
        workload=workload,
        references=tuple(
            References(
                workload=workload,
                regime=regime,
                rank=rank,
                world_size=size,
                histories={EXPECTED: twins[rank], **{order.value: runs[order][rank] for order in orders}},
                exact=exact,
                dtypes={name: tensor.dtype for name, tensor in tensors.items()},
                local=local_names(workload, dict(model.named_parameters())),
            )
            for rank in range(size)
        ),
    )


def orders_for(world_size: int, regime: Regime) -> tuple[Order, ...]:
    """The orders of adding and dividing that can differ: at one rank none does, and halving never rounds."""
    orders = [Order.SUM]
    if world_size > 2:
        orders.append(Order.REVERSED)
    if world_size & (world_size - 1):
        orders += [Order.PREDIVIDED, Order.RECIPROCAL, Order.SPLIT]
    if regime.micro_batches > 1 and any(regime.is_reduced(micro) for micro in range(regime.micro_batches - 1)):
        orders.append(Order.ACCUMULATED)
    return tuple(orders)


def remembering(workload: Workload) -> Workload:
    """The workload with functions that remember: batches are never written to by a drawn model, models are copied."""

    @cache
    def built(rank: int) -> nn.Module:
        return workload.build(rank)

    # Drawn models are the same on every rank.
    return replace(workload, build=lambda rank: copy.deepcopy(built(0)), batch=cache(workload.batch))


def _demand_equal(
    workload: Workload, order: Order, histories: list[TrainingHistory], twins: list[TrainingHistory]
) -> None:
    for history, twin in zip(histories, twins, strict=True):
        for (label, got), (_, expected) in zip(values(history), values(twin), strict=True):
            if not torch.equal(got.double(), expected.double()):
                raise NotExact(
                    f"{label} in float32 differs from float64: the mantissa is used up "
                    f"[{workload.name}, rank {history.rank}, order {order}]"
                )
