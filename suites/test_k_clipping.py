"""K. Gradient clipping: the norm of all gradients, and scaling by it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.case import conformance_case
from fsdp_conformance.checks.norms import norm_by_hand, norm_digests, reductions_of_the_norm
from fsdp_conformance.config import Plan, Sharding
from fsdp_conformance.fixtures import experts, norms, probes
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.testing import ConformanceTestCase
from fsdp_conformance.workload import Batch, BatchKey, Regime, Workload

#: By their names in case ids.
_NORM_TYPES = {"p1": 1.0, "p2": 2.0, "inf": math.inf}

_DEGREES = {"grad-optim": Sharding.GRAD_OPTIM, "none": Sharding.NONE, "hybrid": Sharding.HYBRID}
_DEGREE_FLAGS = {"grad-optim": "zero2", "none": "no_shard", "hybrid": "hsdp"}


def _needs_norm(values: dict[str, Any]) -> list[str]:
    return ["clip_grad_norm", *(["clip_norm_type"] if values["norm"] != "p2" else [])]


class Clipping(ConformanceTestCase):
    """Gradients are scaled by one number, which comes from all of them."""

    @conformance_case(
        "R101",
        "R002",
        chapter="K",
        axes={"norm": tuple(_NORM_TYPES), "world_size": (2, 3)},
        needs=_needs_norm,
        kills=("sum-instead-of-mean",),
    )
    def test_total_norm(self, norm: str, world_size: int) -> None:
        """
        Over uneven, tied and single-element parameters, the norm is that of the full gradients, each element once, and
        parameters follow gradients that are scaled by it, or not scaled if it is below the maximum.
        """
        workload = norms.graded()
        regime = self.clipping(workload, _NORM_TYPES[norm])
        run = self.train(workload, self.plan(workload, max_norm=regime.max_norm), regime)
        self.check_norm(run, workload, regime, "R101")
        self.check_parity(run, workload, regime, requirements={"parameter": "R101"})

    def clipping(self, workload: Workload, norm_type: float, **changes: Any) -> Regime:
        """A regime whose maximum is above the norm of the first step, and below those of the following ones."""
        first = norms.graded_norm(workload, norm_type, step=0, world_size=self.world_size)
        return Regime(max_norm=1.5 * first, norm_type=norm_type, **changes)

    def check_norm(self, run: TrainingHistory, workload: Workload, regime: Regime, requirement: str) -> None:
        """The norm of every step is the one computed by hand, if the implementation returns it."""
        if all(record.grad_norm is None for record in run.steps):
            self.report.notes.append("no norm is returned: it is judged by what clipping does to the parameters")
            return
        steps = range(len(run.steps))
        expected = [
            norms.graded_norm(workload, regime.norm_type, step=step, world_size=self.world_size) for step in steps
        ]
        self.check(norm_by_hand(run, expected, requirement=requirement, exact=regime.norm_type != 2.0))
