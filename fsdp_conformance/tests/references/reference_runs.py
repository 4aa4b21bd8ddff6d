"""
References that need no ranks, and histories damaged in one way, for tests of what is compared with them.

The float32 single-process run stands for the distributed references, and for a correct implementation.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.references.exactness import demands_bitwise
from fsdp_conformance.references.reference_set import References
from fsdp_conformance.references.single_process import Order, single_process_reference
from fsdp_conformance.workload.definition import Regime, Workload
from fsdp_conformance.workload.units import local_names

WORLD_SIZE = 4


def references_of(
    workload: Workload, regime: Regime | None = None, *, rank: int = 1, world_size: int = WORLD_SIZE
) -> References:
    """The float64 run as the expected one, two float32 runs in different orders as samples of its noise."""
    # Models this small are slower on several threads, and much slower where the cores are taken.
    torch.set_num_threads(1)
    regime = regime or Regime()
    model = workload.build(rank)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    runs = [
        single_process_reference(workload, regime, rank=rank, world_size=world_size, dtype=dtype, order=order)
        for dtype, order in (
            (torch.float64, Order.SUM),
            (torch.float32, Order.RECIPROCAL),
            (torch.float32, Order.REVERSED),
        )
    ]
    return References(
        workload=workload,
        regime=regime,
        rank=rank,
        world_size=world_size,
        histories={run.source: run for run in runs},
        exact=demands_bitwise(workload, regime, world_size),
        dtypes={name: tensor.dtype for name, tensor in tensors.items()},
        local=local_names(workload, dict(model.named_parameters())),
    )


def implementation_run(references: References) -> TrainingHistory:
    """A correct implementation's history: float32, ranks added in yet another order."""
    return single_process_reference(
        references.workload,
        references.regime,
        rank=references.rank,
        world_size=references.world_size,
        dtype=torch.float32,
        order=Order.SPLIT,
    )


def damaged(history: TrainingHistory) -> TrainingHistory:
    """A copy to be damaged."""
    return copy.deepcopy(history)


def gradient(history: TrainingHistory, step: int, name: str) -> Tensor:
    """A gradient that is there."""
    grads = history.steps[step].grads
    grad = None if grads is None else grads[name]
    if grad is None:
        raise AssertionError(f"no gradient of {name!r} in step {step}")
    return grad
