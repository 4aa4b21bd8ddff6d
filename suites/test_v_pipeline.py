"""V. Pipelines: each stage is sharded over its own ranks. Meshes are written stages x data-parallel ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fsdp_conformance.case import conformance_case
from fsdp_conformance.checks.result import comparison
from fsdp_conformance.config import Plan
from fsdp_conformance.fixtures import pipeline
from fsdp_conformance.testing import ConformanceTestCase
from fsdp_conformance.workload import Regime, Workload

#: More than stages, so that every stage is filled, in steady state, and drained.
MICRO_BATCHES = 4

#: For six or eight processes on two cores.
TIMEOUT_S = 180.0


def sizes(mesh: str) -> tuple[int, ...]:
    """Sizes of the dimensions of a mesh: (2, 2) for "2x2"."""
    return tuple(map(int, mesh.split("x")))


def num_ranks(values: dict[str, str]) -> int:
    """The world size of a case, from its mesh."""
    return math.prod(sizes(values["mesh"]))


def schedule(order: str, *, deferred: bool, **changes: Any) -> Regime:
    """Three steps of four micro-batches, reduced each or all at once."""
    reduced = (False,) * (MICRO_BATCHES - 1) + (True,) if deferred else ()
    return Regime(micro_batches=MICRO_BATCHES, pipeline=order, reduced=reduced, **changes)


class Pipelines(ConformanceTestCase):
    """Stages on different ranks train like the whole model on each rank."""

    @conformance_case(
        "R154",
        "R002",
        "R003",
        chapter="V",
        axes={
            "order": ("forwards-first", "1f1b"),
            "reduction": ("synchronised", "deferred"),
            "mesh": ("2x2", "3x2"),
        },
        only=lambda values: values["mesh"] == "2x2" or (values["order"], values["reduction"]) == ("1f1b", "deferred"),
        world_size=num_ranks,
        needs=lambda values: ["pp", "pipelined_microbatch", *["no_sync"] * (values["reduction"] == "deferred")],
        kills=lambda values: (
            ["averages-over-the-pipeline", "pipelining-loses-the-first"]
        ),
        timeout_s=TIMEOUT_S,
    )
    def test_parity(self, order: str, reduction: str, mesh: str) -> None:
        """
        A pipeline of stages, each sharded over its ranks, has the losses, gradients and parameters of the whole model.
        """
        stages, _ = sizes(mesh)
        workload = pipeline.pipeline(stages)
        regime = schedule(order, deferred=reduction == "deferred")
        run = self.train(workload, self._stage_plan(workload, stages), regime)
        self.check_parity(run, workload, regime, requirement="R154")

    def _stage_plan(self, workload: Workload, stages: int, **changes: Any) -> Plan:
        return self.plan(workload, stages=pipeline.stage_names(stages), **changes)
