"""H. Prefetch: gathers and computation run in the requested order; gathers that the user starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.checks.invariance import same_training
from fsdp_conformance.checks.order import gathered_units
from fsdp_conformance.fixtures import deep, models, shapes
from fsdp_conformance.harness.recording import process_group
from fsdp_conformance.plan import BackwardPrefetch, Plan, Sharding
from fsdp_conformance.workload.definition import Workload

#: By name: the flags that it needs, and the fields of the plan.
_PREFETCH: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "forward": (("prefetch_forward",), {"forward_prefetch": True}),
    "backward-none": (("prefetch_backward",), {"backward_prefetch": BackwardPrefetch.NONE}),
    "backward-post": (("prefetch_backward",), {"backward_prefetch": BackwardPrefetch.POST}),
    "explicit": (("prefetch_explicit",), {"explicit_prefetch": 2}),
}


class Prefetch(ConformanceTestCase):
    """Four units in sequence: when each computes, exactly the expected gathers have been issued, in order."""

    @conformance_case(
        "R076",
        chapter="H",
        axes={"world_size": (2,), "policy": ("none", "pre", "post")},
        needs=("prefetch_backward", "zero3"),
        kills=(
            "swaps-prefetch",
            "reference-gathers-everything-first",
            "reference-keeps-parameters-after-forward",
        ),
    )
    def test_order_of_events(self, world_size: int, policy: str) -> None:
        """With "pre", the next unit's gather is issued before this unit's gradients are computed, otherwise after."""
        plan = self.plan(deep.deep_steps(), sharding=Sharding.FULL, backward_prefetch=BackwardPrefetch(policy))
        ahead = 1 if policy == "pre" else 0
        self._expect_gathers("R076", plan, {"backward": lambda index: index + 1 + ahead})

    @conformance_case(
        "R077",
        chapter="H",
        axes={"world_size": (2,), "length": (1, 2)},
        needs=("prefetch_explicit", "zero3"),
        kills=lambda values: (
            ["prefetches-fewer", "runs-forward-twice", "reference-runs-forward-twice"]
            + ["reverses-prefetch-lists"] * (values["length"] > 1)
        ),
    )
    def test_lists_are_followed(self, world_size: int, length: int) -> None:
        """With a list of one or two units, these are gathered ahead of computation, in the order of the list."""
        plan = self.plan(deep.deep_steps(), sharding=Sharding.FULL, explicit_prefetch=length)
        ahead: Callable[[int], int] = lambda index: index + 1 + length  # noqa: E731 - two phases share it
        self._expect_gathers("R077", plan, {"forward": ahead, "backward": ahead})

    def _expect_gathers(self, requirement: str, plan: Plan, phases: dict[str, Callable[[int], int]]) -> None:
        """Train; `wanted` maps a phase to the number of gathers issued when its unit number `index` computes."""
        workload = deep.deep_steps()
        log = process_group.log()
        visits: list[tuple[int | None, str, int]] = []

        def note(moment: str, module: nn.Module) -> None:
            visits.append((log.label[1], moment, len(log.records) - begin))

        begin = len(log.records)
        run = self.train(workload, plan, on_setup=self.with_module(lambda module: deep.visit(module, note)))
        visits, records = self.observe("visits, and collectives", lambda: (visits, log.records[begin:]))
        self.check_parity(run, workload)
        for step in range(len(run.steps)):
            for phase, expected_at in phases.items():
                order = workload.units if phase == "forward" else workload.units[::-1]
                moments = [at for of, moment, at in visits if (of, moment) == (step, phase)]
                where: dict[str, Any] = {"step": step, "phase": phase}
                self.expect_equal(requirement, "visits", len(moments), len(order), check="visits", **where)
                for unit, index, moment in zip(order, range(len(order)), moments, strict=False):
                    issued = [each for each in records[:moment] if (each.step, each.phase) == (step, phase)]
                    got = gathered_units(issued, workload, plan, world_size=self.world_size)
                    what = f"gathers issued when {unit} computes"
                    expected = list(order[: expected_at(index)])
                    self.expect_equal(requirement, what, got, expected, check="order of gathers", **where)


class SameBits(ConformanceTestCase):
    """Prefetching changes when parameters are gathered, and nothing else."""

    @conformance_case(
        "R078",
        "R002",
        chapter="H",
        axes={"world_size": (2,), "prefetch": tuple(_PREFETCH)},
        needs=lambda values: _PREFETCH[values["prefetch"]][0],
        kills=(
            "loses-bits-with-prefetch",
            "reference-adds-noise",
            "reference-gathers-noise",
        ),
    )
    def test_prefetch_changes_nothing(self, world_size: int, prefetch: str) -> None:
        """On two ranks, a model with rounding errors is trained to the same bits with any prefetch."""
        workload = models.norm_mlp()
        run = self.train(workload, self.plan(workload, **_PREFETCH[prefetch][1]))
        usual = self.train(workload)
        self.check(same_training(run, usual, what="the default prefetch", requirement="R078"))


class AsyncUnshard(ConformanceTestCase):
    """A user starts a unit's gather, and waits for its handle later or never."""

    @conformance_case(
        "R079",
        "R002",
        "R003",
        chapter="H",
        axes={"world_size": (2, 3), "waited": ("waited", "never")},
        needs=("async_unshard",),
        kills=lambda values: ["async-unshard-does-nothing" if values["waited"] == "waited" else "no-reduction"],
    )  # fmt: skip
    def test_unshard_by_hand(self, world_size: int, waited: str) -> None:
        """
        Waiting before the first forward gives full parameters; without a wait, or for a unit without parameters,
        training is unaffected, and every unit is resharded at the end.
        """
        workload = shapes.parameterless_units()
        adapter = self.subject()

        def begin(adapter: Adapter) -> None:
            handles = [adapter.unshard_async(unit) for unit in (*workload.units, "")]
            if waited == "waited":
                for handle in handles:
                    handle.wait()
                self._expect_whole(adapter, workload)

        run = self.train(
            workload,
            adapter=adapter,
            on_setup=begin,
            on_loss=lambda adapter, step: adapter.unshard_async(workload.units[0]),
        )
        self.check_parity(run, workload, requirement="R079")
        self.check_resharded(adapter, workload, "R079", run)

    def _expect_whole(self, adapter: Adapter, workload: Workload) -> None:
        """User code sees every parameter with its initial values."""
        seen = adapter.parameters()
        for name, parameter in workload.build(self.rank).named_parameters():
            self.check_equal("R079", seen.get(name), parameter.detach(), check="after the wait", fqn=name)
