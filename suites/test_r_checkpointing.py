"""R. Activation checkpointing."""

from __future__ import annotations

from typing import Any

from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.checks import communication
from fsdp_conformance.fixtures import checkpointing
from fsdp_conformance.plan import Sharding
from fsdp_conformance.workload.definition import Regime

_FORMS = ("around", "inside", "segment")


def _needs(values: dict[str, Any]) -> list[str]:
    return ["ac_reentrant"] if values["kind"] == "reentrant" else []


def _kills(values: dict[str, Any]) -> list[str]:
    """A wrapper sees a recomputation if the whole unit runs again."""
    wrapped = ["fsdp1-doubles-recomputed"] if values["form"] != "inside" else []
    return ["recompute-reduces-twice", "recomputes-with-old-parameters", *wrapped]


class Checkpointing(ConformanceTestCase):
    """A part of the forward keeps no activations, and runs again in backward."""

    @conformance_case(
        "R134",
        "R002",
        "R003",
        chapter="R",
        axes={"form": _FORMS, "kind": ("plain", "reentrant"), "world_size": (2,)},
        needs=_needs,
        kills=_kills,
    )
    def test_changes_nothing(self, form: str, kind: str, world_size: int) -> None:
        """A checkpointed unit, a checkpoint in a unit, and one around several units train as without, bit for bit."""
        workload = checkpointing.checkpointed(form, reentrant=kind == "reentrant")
        # Six iterations where units themselves run again; what carries over from one to the next shows in three.
        regime = Regime(steps=6 if form == "around" else 3)
        run = self.train(workload, regime=regime)
        without = checkpointing.checkpointed("none")
        self.check_parity(run, without, regime, requirements=dict.fromkeys(("loss", "gradient", "parameter"), "R134"))

    @conformance_case(
        "R135",
        "R002",
        "R003",
        chapter="R",
        axes={"form": ("around", "segment"), "kind": ("plain", "reentrant"), "world_size": (2,)},
        only=lambda values: (values["form"], values["kind"]) != ("segment", "reentrant"),
        needs=_needs,
        kills=("recompute-reduces-twice", "stays-gathered-after-recompute"),
    )
    def test_leaves_no_trace(self, form: str, kind: str, world_size: int) -> None:
        """A recomputed unit is reduced once, and holds no full parameters when backward has returned."""
        workload = checkpointing.checkpointed(form, reentrant=kind == "reentrant")
        without = checkpointing.checkpointed("none")
        adapter = self.subject()
        plan = self.plan(workload)
        run = self.train(workload, plan, adapter=adapter)
        self.check(communication.reduced_once(run, without, plan, requirement="R135"))
        self.check_released(adapter, workload, "R135", run, plan)
        self.check_parity(run, without, requirements=dict.fromkeys(("gradient", "parameter"), "R135"))

    @conformance_case(
        "R135",
        "R002",
        "R003",
        chapter="R",
        axes={"kind": ("plain", "reentrant"), "world_size": (2,)},
        needs=_needs,
        # Under reentrant checkpoints FSDP2 is wrong by itself, so its mutants would show nothing.
        kills=lambda values: (
            ["reference-keeps-second-recompute", "fsdp1-doubles-recomputed"]
            + ["stays-gathered-after-recompute", "recomputes-with-old-parameters"] * (values["kind"] == "plain")
        ),
    )
    def test_called_twice(self, kind: str, world_size: int) -> None:
        """A unit that is called twice, each time in a checkpoint, adds both gradients once and is released."""
        workload = checkpointing.checkpointed_twice("around", reentrant=kind == "reentrant")
        without = checkpointing.checkpointed_twice("none")
        adapter = self.subject()
        plan = self.plan(workload)
        run = self.train(workload, plan, adapter=adapter)
        self.check_parity(run, without, requirements=dict.fromkeys(("loss", "gradient", "parameter"), "R135"))
        self.check_released(adapter, workload, "R135", run, plan)

    @conformance_case(
        "R135",
        chapter="R",
        axes={"form": ("around", "inside"), "world_size": (2,)},
        needs=("zero3", "coll_counts"),
        kills=("recompute-reduces-twice", "gathers-for-recompute"),
    )
    def test_collectives(self, form: str, world_size: int) -> None:
        """What is recomputed is not gathered again by itself: a step issues the same collectives as without."""
        workload = checkpointing.checkpointed(form)
        without = checkpointing.checkpointed("none")
        plan = self.plan(workload, sharding=Sharding.FULL)
        run = self.train(workload, plan)
        self.check(communication.collective_counts(run, without, plan, requirement="R135"))
