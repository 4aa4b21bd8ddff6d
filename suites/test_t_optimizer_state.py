"""T. Optimizer state dicts: under original names, whatever the order and the units."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch.optim import Optimizer

from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.checks.checkpoint import ULPS_PER_STEP, same_optimizer_state, same_parameters
from fsdp_conformance.diagnosis.optimizer_steps import Moment, built_state
from fsdp_conformance.fixtures import probes, recipes, resumable
from fsdp_conformance.references.plain_training import PlainState, plain_training
from fsdp_conformance.workload.definition import Regime, Workload

#: Steps before the state is taken, and in all.
FIRST, ALL = 3, 6


def _workload(optimizer: str) -> Workload:
    """Position-coded gradients; with groups and frozen units, or with parameters that the optimizer does not have."""
    return resumable.grouped() if optimizer in ("groups", "some") else probes.rank_coded()


def _reversed_on(rank: int, params: Any, *, build: Callable[[Any], Optimizer]) -> Optimizer:
    """The optimizer, whose parameters come in reverse order on odd ranks."""
    listed = list(params)
    return build(listed[::-1] if rank % 2 else listed)


def _remove_a_state(optimizer: Optimizer) -> None:
    del optimizer.state[next(iter(optimizer.state))]


def _kept(params: Any, *, build: Callable[[Any], Optimizer], made: list[Optimizer]) -> Optimizer:
    """The optimizer, which the caller can look at."""
    made.append(build(params))
    return made[-1]


class OptimizerStateDicts(ConformanceTestCase):
    """Whole values under the names of the unwrapped model."""

    @conformance_case(
        "R144",
        chapter="T",
        axes={"optimizer": ("sgd", "adam", "groups", "some"), "world_size": (2, 3)},
        only=lambda values: (values["optimizer"] in ("sgd", "some")) == (values["world_size"] == 2),
        needs=("optim_state_dict",),
        kills=lambda values: [
            "optimizer-state-swaps-shards",
            {
                "sgd": "optimizer-state-without-momentum",
                "adam": "optimizer-state-without-step",
                "groups": "optimizer-state-of-one-group",
                "some": "optimizer-state-of-all-parameters",
            }[values["optimizer"]],
        ],
    )
    def test_as_the_local_optimizer(self, optimizer: str, world_size: int) -> None:
        """
        After each step, values, groups and parameters without state are those of the optimizer over the unwrapped
        model.
        """
        workload = _workload(optimizer)
        expected = self._plain(workload, optimizer)

        def judge(adapter: Adapter, step: int) -> None:
            state, expected_state = adapter.optim_state_dict(), expected[step + 1].optimizer
            ulps = 0.0 if optimizer == "sgd" else float(ULPS_PER_STEP * (step + 1))
            known = self._moment(workload, optimizer, expected, step + 1)
            where: dict[str, Any] = {"requirement": "R144", "rank": self.rank, "step": step, "ulps": ulps}
            self.check(same_optimizer_state(state, expected_state, moment=f"after step {step}", known=known, **where))

        self.train(workload, regime=Regime(optimizer=optimizer, steps=FIRST), after_step=judge)

    @conformance_case(
        "R144",
        chapter="T",
        world_size=2,
        needs=("optim_state_dict",),
        kills=("optimizer-state-made-up", "optimizer-state-without-groups", "optimizer-state-initialises"),
    )
    def test_before_the_first_step(self) -> None:
        """Before the first step it has the groups, and no state of any parameter."""
        workload = resumable.grouped()
        expected = self._plain(workload, "groups")

        def judge(adapter: Adapter) -> None:
            state, expected_state = adapter.optim_state_dict(), expected[0].optimizer
            moment = "before the first step"
            self.check(same_optimizer_state(state, expected_state, requirement="R144", rank=self.rank, moment=moment))

        self.train(workload, regime=Regime(optimizer="groups", steps=1), on_setup=judge)

    @conformance_case(
        "R144",
        chapter="T",
        axes={"optimizer": ("sgd", "adam", "groups")},
        world_size=3,
        needs=("optim_state_dict", "full_state_dict"),
        kills=lambda values: [
            "optimizer-state-of-a-neighbour",
            {
                "sgd": "optimizer-load-forgets-momentum",
                "adam": "optimizer-load-forgets-momentum",
                "groups": "optimizer-load-keeps-settings",
            }[values["optimizer"]],
        ],
    )
    def test_loads_in_another_wrapping(self, optimizer: str) -> None:
        """
        An engine with other units, values and settings loads the state of the unwrapped model and optimizer after
        three steps, and continues as they do.
        """
        workload = probes.exact_long() if optimizer == "sgd" else _workload(optimizer)
        expected = self._plain(workload, optimizer, ALL)

        def load(adapter: Adapter) -> None:
            adapter.load_full_state_dict({key: value.clone() for key, value in expected[FIRST].model.items()})
            adapter.load_optim_state_dict(expected[FIRST].optimizer)

        other = resumable.grouped_with_other_settings() if optimizer == "groups" else workload
        other = replace(recipes.with_values(other, lambda value: value + 1), units=workload.units[1:2])
        run = self.train(
            other, self.plan(other), Regime(optimizer=optimizer, steps=ALL), on_setup=load, first_step=FIRST
        )
        built = built_state(other, optimizer)
        for record in run.steps:
            ulps = 0.0 if optimizer == "sgd" else float(ULPS_PER_STEP * (record.step + 1))
            where: dict[str, Any] = {"requirement": "R144", "rank": self.rank, "step": record.step, "ulps": ulps}
            known = replace(self._moment(workload, optimizer, expected, record.step), built=built)
            self.check(same_parameters(record.params, expected[record.step + 1].model, known=known, **where))

    @conformance_case(
        "R145",
        chapter="T",
        world_size=3,
        needs=("optim_state_dict",),
        kills=("optimizer-state-by-position", "optimizer-state-swaps-shards"),
    )
    def test_order_differs_between_ranks(self) -> None:
        """If odd ranks give the optimizer its parameters in reverse order, its state is that of every parameter."""
        workload = probes.rank_coded()
        expected = self._plain(workload, "adam")
        reverse = partial(_reversed_on, self.rank, build=workload.optimizers["adam"])
        builders: dict[str, Callable[[Any], Optimizer]] = {"adam": reverse}

        def judge(adapter: Adapter, step: int) -> None:
            state, expected_state = adapter.optim_state_dict(), expected[step + 1].optimizer
            ulps = float(ULPS_PER_STEP * (step + 1))
            known = self._moment(workload, "adam", expected, step + 1)
            where: dict[str, Any] = {"requirement": "R145", "rank": self.rank, "step": step, "ulps": ulps}
            moment = "with another order on odd ranks"
            self.check(same_optimizer_state(state, expected_state, moment=moment, known=known, **where))

        regime = Regime(optimizer="adam", steps=FIRST)
        self.train(replace(workload, optimizers=builders), regime=regime, after_step=judge)

    @conformance_case(
        "R145",
        chapter="T",
        world_size=2,
        needs=("optim_state_dict",),
        timeout_s=30.0,
        starts_early=True,
        kills=(
            "optimizer-state-unchecked",
            "optimizer-state-checked-on-one-rank",
            "gives-no-reasons",
            "reference-breaks-down-at-every-error",
        ),
    )
    def test_state_that_one_rank_lacks(self) -> None:
        """State that is missing on rank 1 raises on every rank."""
        workload = probes.rank_coded()
        made: list[Optimizer] = []
        builders: dict[str, Callable[[Any], Optimizer]] = {
            "adam": partial(_kept, build=workload.optimizers["adam"], made=made)
        }
        adapter = self.subject()
        self.train(replace(workload, optimizers=builders), regime=Regime(optimizer="adam", steps=1), adapter=adapter)
        if self.rank == 1:
            # The suite makes more of them, to count bytes, but only after the engine.
            self.observe("a state is removed", lambda: _remove_a_state(made[0]))
        with (
            self.refusal("R145", "optimizer state that rank 1 lacks", names=("state",)),
            self.blaming("implementation"),
        ):
            adapter.optim_state_dict()

    def _moment(self, workload: Workload, optimizer: str, states: list[PlainState], index: int) -> Moment:
        return Moment(workload=workload, optimizer=optimizer, states=states, index=index, world_size=self.world_size)

    def _plain(self, workload: Workload, optimizer: str, steps: int = FIRST) -> list[PlainState]:
        """The unwrapped training before its first step and after each one."""
        with self.blaming("suite"):
            return plain_training(workload, (self.world_size,) * steps, optimizer=optimizer)
