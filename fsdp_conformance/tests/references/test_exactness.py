"""Exact probes are exact, and an inexact one is rejected before it is used."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.optim import SGD

from fsdp_conformance.errors import NotExact
from fsdp_conformance.fixtures import models, probes, workload_by_name, workload_names
from fsdp_conformance.references.exactness import assert_exact, demands_bitwise
from fsdp_conformance.references.single_process import Order, mean_of, split_factor
from fsdp_conformance.workload.definition import Regime

pytestmark = pytest.mark.slow

_EXACT = tuple(name for name in workload_names() if workload_by_name(name).exact)


@pytest.mark.daily(6)
@pytest.mark.parametrize(
    "world_size", [3, pytest.param(5, marks=pytest.mark.nightly), pytest.param(8, marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("name", _EXACT)
def test_a_probe_is_exact(name: str, world_size: int) -> None:
    """Float32 equals float64 in every order of reduction, for as many steps as the workload vouches for."""
    workload = workload_by_name(name)

    assert assert_exact(workload, Regime(steps=workload.exact_steps), world_size) > 100


@pytest.mark.daily(4)
@pytest.mark.parametrize("name", ["exact-mlp", "exact-nested", "rank-coded"])
@pytest.mark.parametrize("world_size", [1, 2, 4, 6])
def test_a_probe_is_exact_at_even_world_sizes(name: str, world_size: int) -> None:
    """The remaining world sizes, on a probe of each family."""
    assert assert_exact(workload_by_name(name), Regime(), world_size) > 10


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_probe_in_float16_is_exact(world_size: int) -> None:
    """It is compared in its own dtype, which has too few bits for the factors of other world sizes."""
    assert assert_exact(probes.exact_half(), Regime(), world_size) > 10


def test_a_probe_in_float16_runs_out_of_bits() -> None:
    """Eight ranks add up to more than it holds."""
    with pytest.raises(NotExact, match="in float16: expected bitwise equality with float64"):
        assert_exact(probes.exact_half(), Regime(), 8)


@pytest.mark.daily(4)
@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("reduced", [(), (False, True), (False, False, True), (True, False, True), (True, True, True)])
def test_accumulation_is_exact(reduced: tuple[bool, ...], world_size: int) -> None:
    """Micro-batches may be added before they are reduced or after, in any pattern."""
    regime = Regime(micro_batches=max(len(reduced), 2), reduced=reduced)

    assert assert_exact(probes.exact_accumulation(), regime, world_size) > 100


def test_six_micro_batches_are_exact_for_one_step() -> None:
    """Deferred and synchronised ones interleaved, three reductions in all."""
    regime = Regime(steps=1, micro_batches=6, reduced=(False, True, False, True, False, True))

    assert assert_exact(probes.exact_accumulation(), regime, 3) > 10


@pytest.mark.daily(3)
@pytest.mark.parametrize(
    "regime",
    [
        Regime(eval_before=(0, 1)),
        Regime(eval_between=(0, 1)),
        Regime(idle_forwards=2),
        Regime(backwards_per_forward=2),
        Regime(gradient_to_none=("stages.0.linear.weight",)),
        Regime(steps=4, frozen_at=((1, ("stages.0.linear.weight",)), (3, ()))),
    ],
)
def test_regimes_stay_exact(regime: Regime) -> None:
    """Evaluation, idle forwards, two backwards and changing frozen parameters take no bits."""
    assert assert_exact(probes.exact_nested(), regime, 3) > 10


def test_an_inexact_workload_is_refused() -> None:
    """A learning rate of 0.1 is not dyadic: the first parameter differs after the first step."""
    workload = replace(probes.exact_mlp(), optimizers={"sgd": partial(SGD, lr=0.1, momentum=0.5)})

    with pytest.raises(
        NotExact, match=r"parameter '0.weight' after step 0 in float32: expected bitwise equality .*order sum"
    ):
        assert_exact(workload, Regime(), 2)


def test_too_many_steps_are_refused() -> None:
    """The plain probe runs out of mantissa after the steps that it vouches for."""
    workload = probes.exact_mlp()

    with pytest.raises(NotExact, match="is not exact"):
        assert_exact(workload, Regime(steps=8), 2)
    with pytest.raises(NotExact, match="in float32: expected bitwise equality with float64"):
        assert_exact(replace(workload, exact_steps=8), Regime(steps=8), 2)


def test_an_order_that_rounds_is_named() -> None:
    """Without a scale that divides by 3 each rank's third is rounded before it is added."""
    workload = replace(
        probes.exact_long(), batch=lambda key: probes.grid_batch(replace(key, world_size=1), inputs=5, outputs=3)
    )

    with pytest.raises(NotExact, match="bitwise equality with float64"):
        assert_exact(workload, Regime(), 3)


@pytest.mark.parametrize(
    ("regime", "world_size", "expected"),
    [
        (Regime(), 2, True),
        (Regime(optimizer="adam"), 2, False),
        (Regime(max_norm=1.0), 2, False),
        (Regime(steps=4), 2, False),
        (Regime(), 7, False),
    ],
)
def test_bitwise_is_demanded_only_where_it_is_due(regime: Regime, world_size: int, expected: bool) -> None:
    """Adam and clipping round, 1/7 is rounded too far, and a probe vouches for a number of steps."""
    assert demands_bitwise(probes.exact_mlp(), regime, world_size) is expected
    assert not demands_bitwise(models.nested(), regime, world_size)


def test_the_reciprocal_of_seven_is_not_exact() -> None:
    """21 * fl(1/7) is not 3 in float32, which is why no probe demands bitwise equality at world size 7."""
    sevenths = [torch.tensor(21.0)] * 7

    assert mean_of(sevenths, Order.SUM).item() == 21.0
    assert mean_of([sevenths[0]] + [torch.tensor(0.0)] * 6, Order.RECIPROCAL).item() != 3.0
    assert mean_of([torch.tensor(9.0), torch.tensor(0.0), torch.tensor(0.0)], Order.RECIPROCAL).item() == 3.0


@pytest.mark.parametrize(("world_size", "factor"), [(1, 1), (2, 2), (3, 2), (4, 2), (5, 2), (6, 4), (8, 4)])
def test_split_factor(world_size: int, factor: float) -> None:
    """FSDP1 divides by the first power of two that is not a divisor, or whose square reaches the world size."""
    assert split_factor(world_size) == factor
