"""M. Frozen and ignored parameters."""

from __future__ import annotations

from dataclasses import replace

from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.fixtures import adapters, frozen, models, probes, workload_by_name
from fsdp_conformance.workload.definition import Regime
from fsdp_conformance.workload.events import Action, Event, Moment


class FrozenParameters(ConformanceTestCase):
    """Parameters that do not train, because they are frozen, ignored, or have their gradient dropped."""

    @conformance_case(
        "R111",
        "R002",
        "R003",
        chapter="M",
        axes={"world_size": (2,)},
        kills=("frozen-gets-gradient", "leaves-frozen-gathered", "hides-frozen-gathered", "reshards-when-read"),
    )
    def test_frozen_unit(self, world_size: int) -> None:
        """
        A fully frozen unit keeps its values and flags, has no gradient and is resharded; the others are at parity.
        """
        workload = probes.exact_frozen()
        adapter = self.subject()
        run = self.train(workload, adapter=adapter)
        self.check_parity(run, workload, requirements={"gradient": "R111", "parameter": "R111"})
        self.check_flags(run, workload, "R111")
        self.check_released(adapter, workload, "R111", run)

    @conformance_case(
        "R111",
        "R001",
        "R002",
        "R003",
        chapter="M",
        axes={"frozen": ("vision", "language"), "world_size": (2,)},
        kills=("frozen-gets-gradient", "sum-instead-of-mean", "no-reduction", "reference-sums-gradients"),
    )
    def test_frozen_tower(self, frozen: str, world_size: int) -> None:
        """
        Of a vision tower and a language model with nested units, one is frozen: before or behind what trains, it keeps
        its values and flags, and the rest is at parity.
        """
        workload = workload_by_name(f"{frozen}-frozen")
        run = self.train(workload)
        self.check_parity(run, workload, requirements={"gradient": "R111", "parameter": "R111"})
        self.check_flags(run, workload, "R111")

    @conformance_case(
        "R112",
        "R001",
        "R002",
        "R003",
        chapter="M",
        axes={"world_size": (2,)},
        needs=("frozen_mixed",),
        kills=("frozen-gets-gradient", "frozen-neighbours-not-reduced"),
    )
    def test_low_rank_adapters(self, world_size: int) -> None:
        """Low-rank adapters train at parity in one unit with the frozen weights that they adapt."""
        workload = adapters.lora()
        run = self.train(workload)
        self.check_parity(run, workload, requirements={"gradient": "R112", "parameter": "R112"})
        self.check_flags(run, workload, "R112")

    @conformance_case(
        "R112",
        "R001",
        "R002",
        "R003",
        chapter="M",
        axes={"world_size": (2,)},
        needs=("frozen_mixed",),
        kills=("frozen-neighbours-not-reduced", "sum-instead-of-mean", "reference-sums-gradients"),
    )
    def test_packed_weights(self, world_size: int) -> None:
        """
        Low-rank adapters train at parity in one unit with frozen weights that are packed integers and keep every bit,
        or a layout that cannot hold both dtypes refuses them.
        """
        workload = adapters.lora_packed()
        with self.refusal("R112", "integers beside floating-point parameters in a unit", names=("dtype",)) as outcome:
            run = self.train(workload)
            outcome.excused = True
        if outcome.error is None:
            self.check_parity(run, workload, requirements={"gradient": "R112", "parameter": "R112"})
            self.check_flags(run, workload, "R112")

    @conformance_case(
        "R112",
        "R002",
        "R003",
        chapter="M",
        axes={"world_size": (2,)},
        needs=("frozen_mixed",),
        kills=(
            "frozen-gets-gradient",
            "frozen-neighbours-not-reduced",
        ),
    )
    def test_mixed_inside_a_unit(self, world_size: int) -> None:
        """Frozen and trainable parameters in one unit are at parity, or are rejected."""
        workload = frozen.non_uniform()
        run = self.train(workload)
        self.check_parity(run, workload, requirements={"gradient": "R112", "parameter": "R112"})
        self.check_flags(run, workload, "R112")

    @conformance_case(
        "R113",
        "R002",
        "R003",
        chapter="M",
        axes={"world_size": (2,)},
        needs=("frozen_dynamic",),
        kills=(
            "frozen-gets-gradient",
            "never-thaws",
        ),
    )
    def test_frozen_and_thawed(self, world_size: int) -> None:
        """A unit that is frozen after one step and unfrozen after the next is at parity in every step."""
        workload = models.nested()
        names = self.unit_parameters(workload, workload.units[-1])
        regime = Regime(steps=4, frozen_at=((1, names), (3, ())), unused_parameters=True)
        run = self.train(workload, regime=regime)
        self.check_parity(run, workload, regime, requirements={"gradient": "R113", "parameter": "R113"})

    @conformance_case(
        "R113",
        "R002",
        "R003",
        chapter="M",
        axes={"world_size": (2,)},
        needs=("frozen_dynamic",),
        kills=("frozen-still-moves", "thawed-loses-first-gradient", "never-thaws"),
    )
    def test_frozen_with_momentum(self, world_size: int) -> None:
        """
        A parameter that is frozen between steps keeps its value and its momentum, which count again from the step after
        which it is unfrozen.
        """
        workload = probes.exact_nested()
        names = (*self.unit_parameters(workload, workload.units[-1]), "head.weight")
        for moment in (Moment.STEP, Moment.END):
            events = (
                Event(action=Action.FREEZE, moment=moment, step=1, names=names),
                Event(action=Action.FREEZE, moment=moment, step=3),
            )
            regime = Regime(steps=6, events=events, unused_parameters=True)
            run = self.train(workload, regime=regime)
            self.check_parity(run, workload, regime, requirement="R113")

    @conformance_case(
        "R114",
        "R002",
        chapter="M",
        axes={"world_size": (2,)},
        kills=("steps-dropped-gradients", "no-reduction", "reference-sums-gradients"),
    )
    def test_dropped_gradient(self, world_size: int) -> None:
        """A parameter whose gradient is set to None before the optimizer step does not change."""
        workload = probes.exact_nested()
        names = self.unit_parameters(workload, workload.units[0])
        regime = Regime(gradient_to_none=names)
        run = self.train(workload, regime=regime)
        self.check_parity(run, workload, regime, requirements={"parameter": "R114"})

    @conformance_case(
        "R115",
        "R002",
        "R003",
        chapter="M",
        axes={"world_size": (2,)},
        kills=(
            "frozen-gets-gradient",
            "leaf-units-stay-gathered",
            "reshards-when-read",
        ),
    )
    def test_input_without_gradient(self, world_size: int) -> None:
        """
        Units after a frozen first unit, whose input needs no gradient, are at parity and resharded after backward.
        """
        workload = frozen.frozen_units()
        adapter = self.subject()
        run = self.train(workload, adapter=adapter)
        self.check_parity(run, workload, requirements={"gradient": "R115"})
        self.check_released(adapter, workload, "R115", run)

    @conformance_case(
        "R116",
        "R002",
        "R003",
        chapter="M",
        axes={"world_size": (2,)},
        needs=("ignored_modules",),
        kills=("shards-ignored",),
    )
    def test_ignored_module(self, world_size: int) -> None:
        """An ignored module is neither sharded nor communicated: it trains with this rank's gradient alone."""
        workload = models.wide_mlp()
        name = workload.units[0]
        local = self.unit_parameters(workload, name)
        ignoring = replace(workload, units=workload.units[1:], ignored=(name,), local_params=local)
        run = self.train(ignoring, self.plan(ignoring, ignored=(name,)))
        self.check_parity(run, ignoring, requirements={"gradient": "R116", "parameter": "R116"})
