"""H. Prefetch: the order of gathers and of computation is the one that was asked for; gathers that the user starts."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.case import conformance_case
from fsdp_conformance.config import BackwardPrefetch, Plan, Sharding
from fsdp_conformance.fixtures import deep, shapes
from fsdp_conformance.harness.recording import process_group
from fsdp_conformance.history.collective import Op
from fsdp_conformance.testing import ConformanceTestCase
from fsdp_conformance.workload import Workload

#: The root's gather is smaller than a unit's by far.
_UNIT_BYTES = deep.WIDTH * deep.WIDTH * 4


class Prefetch(ConformanceTestCase):
    """Four equal units, one after the other: each computes when so many gathers have been issued, no more, no fewer."""

    @conformance_case(
        "R076",
        chapter="H",
        axes={"world_size": (2,), "policy": ("none", "pre", "post")},
        needs=("prefetch_backward", "zero3"),
        kills=("swaps-prefetch",),
    )
    def test_order_of_events(self, world_size: int, policy: str) -> None:
        """With "pre" the next unit's gather is issued before this unit's gradients are computed, else after."""
        plan = self.plan(deep.deep_4(), sharding=Sharding.FULL, backward_prefetch=BackwardPrefetch(policy))
        ahead = 1 if policy == "pre" else 0
        self._expect_gathers("R076", plan, {"backward": lambda index: index + 1 + ahead})

    @conformance_case(
        "R077",
        chapter="H",
        axes={"world_size": (2,), "length": (1, 2)},
        needs=("prefetch_explicit", "zero3"),
        kills=("prefetches-fewer",),
    )
    def test_lists_are_followed(self, world_size: int, length: int) -> None:
        """With a list of one or two units so many gathers are ahead of the computation, in forward and in backward."""
        plan = self.plan(deep.deep_4(), sharding=Sharding.FULL, explicit_prefetch=length)
        ahead: Callable[[int], int] = lambda index: index + 1 + length  # noqa: E731 - two phases share it
        self._expect_gathers("R077", plan, {"forward": ahead, "backward": ahead})

    def _expect_gathers(self, requirement: str, plan: Plan, wanted: dict[str, Callable[[int], int]]) -> None:
        """Train; `wanted` gives the gathers that are issued when the unit number `index` of a phase computes."""
        workload = deep.deep_4()
        depth = len(workload.units)
        log = process_group.log()
        begin = len(log.records)
        visits: list[tuple[int | None, str, int]] = []

        def note(moment: str, module: nn.Module) -> None:
            visits.append((log.label[1], moment, len(log.records)))

        run = self.train(workload, plan, on_setup=lambda adapter: deep.visit(adapter.module(), note))
        self.check_parity(run, workload)
        gathers = [
            (record.step, record.phase, index)
            for index, record in enumerate(log.records[begin:], start=begin)
            if record.op is Op.ALL_GATHER and record.nbytes >= _UNIT_BYTES
        ]
        for step in range(len(run.steps)):
            for phase, expected_at in wanted.items():
                moments = [at for of, moment, at in visits if (of, moment) == (step, phase)]
                where = {"step": step, "phase": phase}
                self.expect(
                    len(moments) == depth,
                    requirement,
                    f"visits={len(moments)}, but should be {depth}",
                    check="visits",
                    **where,
                )
                for index, moment in enumerate(moments):
                    issued = sum((of, part) == (step, phase) and at < moment for of, part, at in gathers)
                    expected = min(expected_at(index), depth)
                    self.expect(
                        issued == expected,
                        requirement,
                        f"gathers={issued} when unit {index + 1} of the {phase} computes, but should be {expected}",
                        check="order of gathers",
                        **where,
                    )


class AsyncUnshard(ConformanceTestCase):
    """A user starts the gather of a unit, and waits for its handle later or never."""

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
        Before the first forward the wait gives whole parameters; without a wait, or for a unit without parameters,
        training is as it was, and everything is resharded at the end.
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
        self.check_parity(run, workload, requirements=dict.fromkeys(("loss", "gradient", "parameter"), "R079"))
        self.check_resharded(adapter, workload, "R079")

    def _expect_whole(self, adapter: Adapter, workload: Workload) -> None:
        """User code sees every parameter as it was built."""
        seen = adapter.parameters()
        for name, wanted in workload.build(self.rank).named_parameters():
            got = seen.get(name)
            self.check_equal(
                "R079", None if got is None else got.detach(), wanted.detach(), check="after the wait", fqn=name
            )
