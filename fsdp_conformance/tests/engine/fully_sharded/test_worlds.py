"""
The fully sharded module compared with torch's DDP, bit for bit, at world sizes 1, 2, 3, 4, 5 and 8, on simulated ranks.

On the CPU under every strategy and every kind of prefetch; on the simulated accelerator under every strategy, init
mode and place of the parameters between iterations.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fsdp_conformance.adapters.vendors.reference import Reference
from fsdp_conformance.driver.session import train
from fsdp_conformance.driver.task import World
from fsdp_conformance.fixtures import probes
from fsdp_conformance.harness.simulated_ranks import ranks as simulated_ranks
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.plan import SIMULATED, BackwardPrefetch, InitMode, Offload, Plan, Sharding
from fsdp_conformance.references.ddp import ddp_reference
from fsdp_conformance.simulator import checker
from fsdp_conformance.tests.simulator.simulator_process import compiled, in_process_of_its_own
from fsdp_conformance.workload.definition import Regime

WORLD_SIZES = (1, 2, 3, 4, 5, 8)

#: Only for ranks that hang: a world takes seconds on a free machine.
TIMEOUT_S = 600.0


def shardings(world_size: int) -> Iterator[dict[str, Any]]:
    """Every strategy that a world of that size has, as fields of a plan."""
    yield {"sharding": Sharding.FULL}
    yield {"sharding": Sharding.GRAD_OPTIM}
    yield {"sharding": Sharding.NONE}
    if world_size % 2 == 0:
        yield {"sharding": Sharding.HYBRID, "replicas": 2}
        yield {"sharding": Sharding.FULL, "reshard_after_forward": 2}


def differences(got: TrainingHistory, expected: TrainingHistory) -> list[str]:
    """Where losses, gradients or parameters of a step are not the same bits."""
    texts = []
    for mine, want in zip(got.steps, expected.steps, strict=True):
        values = {"loss": (mine.losses, want.losses)}
        values |= {f"parameter {name}": ([mine.params[name]], [value]) for name, value in want.params.items()}
        grads, expected_grads = mine.grads or {}, want.grads or {}
        pairs = {name: (grads.get(name), value) for name, value in expected_grads.items()}
        values |= {f"gradient {name}": ([a], [b]) for name, (a, b) in pairs.items() if a is not None and b is not None}
        texts += [
            f"gradient {name} of step {want.step}" for name, (a, b) in pairs.items() if (a is None) != (b is None)
        ]
        texts += [
            f"{name} of step {want.step}"
            for name, (some, others) in values.items()
            if not all(torch.equal(a, b) for a, b in zip(some, others, strict=True))
        ]
    return texts


def trained_beside_ddp(rank: int, world_size: int, plans: list[Plan]) -> dict[str, list[str]]:
    """By plan, what differs from DDP on this rank; what makes no difference is left out."""
    workload, regime = probes.exact_mlp(), Regime()
    expected = ddp_reference(workload, regime, rank=rank, world_size=world_size)
    assert expected.steps, "DDP has trained"
    by_plan = {}
    for plan in plans:
        adapter = Reference()
        run = train(adapter, workload, plan, regime, World(rank=rank, size=world_size))
        assert len(run.steps) == len(expected.steps), "as many steps as DDP"
        by_plan[repr(plan)] = differences(run, expected)
        adapter.close()
    return {plan: lines for plan, lines in by_plan.items() if lines}


def thirds() -> Iterator[Any]:
    """A world size and which third of the combinations: one of each world up to 4 ranks. All others are nightly."""
    for index, world_size in enumerate(WORLD_SIZES):
        for third in range(3):
            marks = () if third == index % 3 and world_size <= 4 else (pytest.mark.nightly,)
            yield pytest.param(world_size, third, marks=marks)


@pytest.mark.daily(1)
@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "third"), list(thirds()))
def test_every_strategy_and_prefetch(world_size: int, third: int) -> None:
    """Parameters are those of DDP on the CPU."""
    workload = probes.exact_mlp()
    plans = [
        Plan(units=workload.units, backward_prefetch=backward, forward_prefetch=forward, **sharding)
        for sharding in shardings(world_size)
        for backward, forward in itertools.product(
            (BackwardPrefetch.NONE, BackwardPrefetch.PRE, BackwardPrefetch.POST), (False, True)
        )
    ]

    chosen = plans[third::3]

    by_rank = simulated_ranks.run_ranks(
        world_size, lambda rank: trained_beside_ddp(rank, world_size, chosen), timeout_s=TIMEOUT_S
    )

    assert [{}] * world_size == by_rank


@pytest.mark.daily(1)
@compiled
@pytest.mark.slow
@pytest.mark.parametrize(
    "world_size",
    [pytest.param(size, marks=[] if size <= 2 else [pytest.mark.nightly]) for size in WORLD_SIZES],
)
@in_process_of_its_own
def test_every_strategy_init_mode_and_offload(world_size: int) -> None:
    """Each world runs a third of the combinations on the simulated accelerator, and three worlds run all of them."""
    workload = probes.exact_mlp()
    plans = [
        Plan(device=SIMULATED, units=workload.units, init_mode=init, offload=offload, **sharding)
        for sharding in shardings(world_size)
        for init, offload in itertools.product(InitMode, Offload)
        # A model that is moved after its parameters were offloaded is refused: another test's.
        if init is not InitMode.AFTER or offload is Offload.OFF
    ]
    chosen = plans[WORLD_SIZES.index(world_size) % 3 :: 3]

    by_rank = simulated_ranks.run_ranks(
        world_size, lambda rank: trained_beside_ddp(rank, world_size, chosen), timeout_s=TIMEOUT_S
    )

    assert [{}] * world_size == by_rank
    assert checker.accesses()
    assert not checker.num_hazards()
