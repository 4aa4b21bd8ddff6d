"""Workloads that cannot judge an engine, each for one reason, and one with several; as a user would write them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_conformance.fixtures import frozen, models, probes
from fsdp_conformance.fixtures.data import seeded_init
from fsdp_conformance.workload.definition import Batch, BatchKey, Workload


def right() -> Workload:
    """It has no problem, and is not exact."""
    return models.norm_mlp()


def exact() -> Workload:
    """It has no problem either, and every training gives the same bits."""
    return replace(probes.exact_nested(), exact=False)


def part_frozen() -> Workload:
    """It has no problem, and frozen units."""
    return frozen.frozen_units()


def _changed(**fields: Any) -> Workload:
    return replace(models.nested(), **fields)


def _right_batch(key: BatchKey) -> Batch:
    return models.nested().batch(key)


def equal_on_all_ranks() -> Workload:
    """Each rank trains on the same batch."""
    return _changed(batch=lambda key: _right_batch(replace(key, rank=0)))


def _built_from_random_numbers(rank: int) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8))


def another_model_each_time() -> Workload:
    """Initial values come from torch's random numbers, and no seed is set."""
    return _changed(build=_built_from_random_numbers, units=())


_ONCE = models.nested().build(0)


def the_same_object_each_time() -> Workload:
    """The model is built once."""
    return _changed(build=lambda rank: _ONCE)


def _with_dropout(rank: int) -> nn.Module:
    with seeded_init("unfit"):
        return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))


def dropout() -> Workload:
    """The elements that drop out are drawn from torch's random numbers."""
    return _changed(build=_with_dropout, units=())


def loss_per_sample() -> Workload:
    """The mean is missing."""
    return _changed(loss=lambda output, batch: (output - batch.target).square().mean(-1))


def loss_detached() -> Workload:
    """The loss is a number that no gradient leads to."""
    return _changed(loss=lambda output, batch: (output - batch.target).square().mean().detach())


def loss_is_a_number() -> Workload:
    """The loss was read."""
    return _changed(loss=lambda output, batch: (output - batch.target).square().mean().item())


class _Idle(nn.Module):
    """Uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.used(x)
        return output


def _with_an_idle_layer(rank: int) -> nn.Module:
    with seeded_init("unfit"):
        return _Idle()


def parameter_without_gradient() -> Workload:
    """A layer is built, and never called."""
    return _changed(build=_with_an_idle_layer, units=())


def batch_is_a_tuple() -> Workload:
    """As a data loader would give it."""
    return _changed(batch=lambda key: (_right_batch(key).args[0], _right_batch(key).target))


def batch_does_not_fit() -> Workload:
    """The model takes other sizes."""
    return _changed(batch=lambda key: Batch(args=(torch.zeros(4, 5),), target=torch.zeros(4, 8)))


def unit_does_not_exist() -> Workload:
    """A name is mistyped."""
    return _changed(units=("modul.1",))


class _OnlyFloat32(nn.Module):
    """Casts to float32, whatever the dtype of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x.float())
        return output


def _of_float32_alone(rank: int) -> nn.Module:
    with seeded_init("unfit"):
        return _OnlyFloat32()


def not_in_float64() -> Workload:
    """It cannot be trained in float64, which the references need."""
    return _changed(build=_of_float32_alone, units=())


def too_noisy() -> Workload:
    """In bfloat16 rounding is as large as a fault may be."""
    return _changed(
        build=lambda rank: models.nested().build(rank).to(torch.bfloat16),
        batch=_in_bfloat16,
        dtype="bfloat16",
    )


def _in_bfloat16(key: BatchKey) -> Batch:
    batch = _right_batch(key)
    return Batch(args=(batch.args[0].to(torch.bfloat16),), target=batch.target.to(torch.bfloat16))


def no_optimizer() -> Workload:
    """Nothing says how to train."""
    return _changed(optimizers={})


def optimizer_raises() -> Workload:
    """An argument has the wrong sign."""
    return _changed(optimizers={"sgd": partial(torch.optim.SGD, lr=-1.0)})


def several() -> Workload:
    """Several problems that have nothing to do with each other."""
    return _changed(
        batch=lambda key: _right_batch(replace(key, rank=0)),
        build=_built_from_random_numbers,
        units=("there.is.none",),
    )


def raises() -> Workload:
    """The function itself fails."""
    raise KeyError("config.yaml")


def returns_a_model() -> nn.Module:
    """A model alone is no workload."""
    return nn.Linear(2, 2)


#: A number where a function is expected.
NUMBER = 3
#: A workload where a function that returns one is expected.
WORKLOAD = models.nested()
