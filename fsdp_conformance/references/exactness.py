"""
Proof that a probe is exact, required before it demands bitwise equality of an implementation.

The workload is trained in one process in float64 and in its own dtype, with ranks added in every order that a correct
implementation may choose. NotExact is raised unless all runs agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fsdp_conformance.errors import NotExact
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.references.single_process import Order, single_process_histories
from fsdp_conformance.workload.definition import Regime, Workload

#: World sizes whose rounded reciprocal gives (W * k) * fl(1/W) != k: 21 * fl(1/7) is not 3.
INEXACT_WORLD_SIZES = frozenset({7})


def demands_bitwise(workload: Workload, regime: Regime, world_size: int = 1) -> bool:
    """
    True if every correct implementation must equal the reference bit for bit.

    That takes SGD (an optimizer named "sgd", or "sgd-" and more): Adam's square roots and divisions round, as do
    clipping by a norm and more than `exact_steps` steps.
    """
    return (
        workload.exact
        and regime.optimizer.split("-")[0] == "sgd"
        and regime.max_norm is None
        and regime.steps <= workload.exact_steps
        and world_size not in INEXACT_WORLD_SIZES
    )


def assert_exact(workload: Workload, regime: Regime, world_size: int) -> int:
    """
    Return the number of values compared. Raises NotExact at the first one that differs from its float64 twin.

    Every order of reduction is tried, and micro-batches both ways: added before they are reduced, and after.
    """
    where = f"{workload.name}, world size {world_size}"
    if not demands_bitwise(workload, regime, world_size):
        raise NotExact(f"this combination of workload, regime and world size is not exact [{where}]")
    twins = single_process_histories(workload, regime, world_size=world_size, dtype=torch.float64)
    own_dtype, count = getattr(torch, workload.dtype), 0
    for order in Order:
        runs = single_process_histories(workload, regime, world_size=world_size, dtype=own_dtype, order=order)
        for run, twin in zip(runs, twins, strict=True):
            for (label, got), (_, expected) in zip(values(run), values(twin), strict=True):
                count += 1
                if not torch.equal(got.double(), expected.double()):
                    worst = (got.double() - expected.double()).abs().max().item()
                    raise NotExact(
                        f"{label} in {workload.dtype}: expected bitwise equality with float64, got a difference of "
                        f"{worst:.3g} [{where}, rank {run.rank}, order {order}]. Use fewer steps or fewer bits in the "
                        "data."
                    )
    return count


def values(history: TrainingHistory) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a history, each with a label: losses, gradients, parameters, buffers, gradients of inputs."""
    for index, grad in enumerate(history.input_grads):
        if grad is not None:
            yield f"gradient {index} of an input", grad
    for record in history.steps:
        for micro, loss in enumerate(record.losses):
            yield f"loss of step {record.step}, micro-batch {micro}", loss
        for name, grad in (record.grads or {}).items():
            if grad is not None:
                yield f"gradient of {name!r} in step {record.step}", grad
        for name, param in record.params.items():
            yield f"parameter {name!r} after step {record.step}", param
        for name, buffer in record.buffers.items():
            yield f"buffer {name!r} after step {record.step}", buffer
