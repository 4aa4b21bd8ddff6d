"""An example asks an engine for what its model needs, and says which blocks a step uses."""

from __future__ import annotations

import pytest

from fsdp_conformance.explore.example import Example, asks, shard_group_size, used_blocks, uses_all
from fsdp_conformance.fixtures.drawn import DrawnBlock, DrawnModel
from fsdp_conformance.plan import Plan, Sharding
from fsdp_conformance.workload.definition import Regime


def _planned(model: DrawnModel, **rest: object) -> Example:
    return Example(model=model, plan=Plan(units=model.units()), **rest)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "flag"),
    [
        (DrawnModel(blocks=(DrawnBlock(extras=((),)),)), "scalar_params"),
        (DrawnModel(blocks=(DrawnBlock(extras=((2, 3),), transposed=True),)), "noncontiguous_params"),
        (DrawnModel(blocks=(DrawnBlock(extras=((3,),), double="extras"),)), "mixed_dtypes"),
        (DrawnModel(blocks=(DrawnBlock(double="all"),)), "unit_dtypes"),
        (DrawnModel(blocks=(DrawnBlock(by_rank=True),)), "unused_divergent"),
        (DrawnModel(blocks=(DrawnBlock(packed=True),)), "frozen_mixed"),
        (DrawnModel(frozen=("blocks.0.up.bias",)), "frozen_mixed"),
        (
            DrawnModel(blocks=(DrawnBlock(), DrawnBlock()), ties=(("blocks.1.up.weight", "blocks.0.up.weight"),)),
            "shared_across_units",
        ),
        (
            DrawnModel(
                blocks=(DrawnBlock(is_unit=False), DrawnBlock(is_unit=False)),
                ties=(("blocks.1.up.weight", "blocks.0.up.weight"),),
            ),
            "shared_params",
        ),
    ],
)
def test_what_a_model_asks_for(model: DrawnModel, flag: str) -> None:
    """The flag is asked for, and nothing else."""
    assert asks(_planned(model)) == {flag}


def test_a_frozen_unit_is_not_mixed() -> None:
    """A unit whose parameters are all frozen asks for nothing, unless one that is not becomes frozen later."""
    model = DrawnModel(frozen=("blocks.0",))
    frozen = tuple(name for name in model.shapes() if name.startswith("blocks.0"))

    assert asks(_planned(model)) == frozenset()
    assert asks(_planned(model, regime=Regime(frozen_at=((1, frozen),)))) == {"frozen_dynamic"}
    assert asks(_planned(model, regime=Regime(frozen_at=((1, frozen[:1]),)))) == {"frozen_dynamic", "frozen_mixed"}


def test_one_rank_has_no_peers_that_use_other_layers() -> None:
    """A model that differs by rank asks for nothing at one rank."""
    assert asks(_planned(DrawnModel(blocks=(DrawnBlock(by_rank=True),)), world_size=1)) == frozenset()


def test_which_blocks_a_step_uses() -> None:
    """Orders repeat with steps and micro-batches."""
    model = DrawnModel(blocks=(DrawnBlock(), DrawnBlock()), calls=((0,), (1, 0)))

    assert used_blocks(_planned(model), 0) == {0}
    assert used_blocks(_planned(model), 1) == {0, 1}
    assert not uses_all(_planned(model))
    assert uses_all(_planned(model, regime=Regime(micro_batches=2)))


@pytest.mark.parametrize(
    ("plan", "size"),
    [
        (Plan(), 4),
        (Plan(sharding=Sharding.NONE), 1),
        (Plan(sharding=Sharding.HYBRID, replicas=2), 2),
        (Plan(sharding=Sharding.HYBRID, replicas=4), 1),
    ],
)
def test_over_how_many_ranks_parameters_are_sharded(plan: Plan, size: int) -> None:
    """Replicas divide the ranks."""
    assert shard_group_size(Example(world_size=4, plan=plan)) == size
