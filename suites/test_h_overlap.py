"""H. Overlap: units compute while others are gathered and their gradients reduced."""

from __future__ import annotations

from torch import nn

from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.checks.overlap import overlaps
from fsdp_conformance.driver.overlap import OverlapRecorder
from fsdp_conformance.fixtures import deep
from fsdp_conformance.workload.definition import Regime

_STEPS = 3


class Overlap(ConformanceTestCase):
    """Eight equal units: what each collective waits for, and what waits for it."""

    @conformance_case(
        "R080",
        "R002",
        "R003",
        chapter="H",
        axes={"world_size": (2,)},
        needs=("zero3",),
        environment=("stream_order",),
        kills=("waits-for-the-device", "reference-gathers-in-line", "reference-waits-for-reductions"),
    )
    def test_communication_beside_computation(self, world_size: int) -> None:
        """Once the engine knows the order of the units, most bytes go while other units can compute."""
        workload = deep.deep_8()
        regime = Regime(steps=_STEPS)
        recorder = OverlapRecorder(self.device)

        def note(moment: str, module: nn.Module) -> None:
            recorder.compute()

        with recorder:
            run = self.train(workload, regime=regime, on_setup=self.with_module(lambda each: deep.visit(each, note)))
        work = self.observe("work on the device", lambda: recorder.work)
        self.check(overlaps(work, rank=self.rank, step=_STEPS - 1, num_units=len(workload.units), requirement="R080"))
        self.check_parity(run, workload, regime)
