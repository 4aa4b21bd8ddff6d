"""K. Dynamic loss scaling: an overflow on one rank skips the step on all of them."""

from __future__ import annotations

from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.fixtures import norms
from fsdp_conformance.plan import Offload
from fsdp_conformance.workload.definition import Regime

#: Enough for gradients to be scaled visibly, and a power of two, so that scaling is exact.
INIT_SCALE = 256.0

_OVERFLOWS = {"inf": norms.overflow_inf, "nan": norms.overflow_nan}


class LossScaling(ConformanceTestCase):
    """Losses are scaled, gradients are unscaled, and steps that overflow are skipped."""

    @conformance_case(
        "R105",
        "R002",
        chapter="K",
        axes={"value": tuple(_OVERFLOWS), "world_size": (2,)},
        needs=("grad_scaler",),
        kills=(
            "fsdp1-scales-rank-by-rank",
            "reference-skips-rank-by-rank",
            "reference-backs-off-on-one-rank",
            "steps-through-overflows",
            "never-scales-back",
            "ddp-never-scales-up",
        ),
    )
    def test_overflow(self, value: str, world_size: int) -> None:
        """
        Over six steps, of which two overflow in one element of one rank's shard, every rank skips those and halves its
        scale, doubles it after two good ones, and is at parity with DDP and GradScaler, bit for bit.
        """
        workload = _OVERFLOWS[value]()
        regime = Regime(steps=6, init_scale=INIT_SCALE, growth_interval=2)
        run = self.train(workload, regime=regime)
        self.check_parity(run, workload, regime, requirements={"loss": "R105", "parameter": "R105"})
        self.check_same_on_every_rank(run, "R105")

    @conformance_case(
        "R105",
        "R002",
        chapter="K",
        axes={"offload": ("cpu", "cpu_pinned"), "world_size": (2,)},
        needs=("grad_scaler", "cpu_offload_params"),
        environment=lambda values: ["accelerator"] + ["pinned_memory"] * (values["offload"] == "cpu_pinned"),
        kills=("reference-reads-flags-early",),
    )
    def test_overflow_with_offload(self, offload: str, world_size: int) -> None:
        """The same if gradients are in host memory: what says that they overflow gets there, and back, in time."""
        workload = norms.overflow_inf()
        regime = Regime(steps=6, init_scale=INIT_SCALE, growth_interval=2)
        run = self.train(workload, self.plan(workload, offload=Offload(offload)), regime)
        self.check_parity(run, workload, regime, requirements={"loss": "R105", "parameter": "R105"})
        self.check_same_on_every_rank(run, "R105")

    @conformance_case(
        "R105",
        "R101",
        chapter="K",
        axes={"world_size": (2,)},
        needs=("grad_scaler", "clip_grad_norm"),
        kills=("clips-scaled-gradients", "unscales-all-but-one", "fsdp1-unscales-twice"),
    )
    def test_with_clipping(self, world_size: int) -> None:
        """Gradients are unscaled once before they are clipped: norm and parameters are those of DDP and GradScaler."""
        workload = norms.graded()
        first = norms.graded_norm(workload, 2.0, step=0, world_size=world_size)
        regime = Regime(max_norm=1.5 * first, init_scale=INIT_SCALE, growth_interval=2)
        run = self.train(workload, self.plan(workload, max_norm=regime.max_norm), regime)
        kinds = ("loss", "norm", "parameter")
        self.check_parity(run, workload, regime, requirements=dict.fromkeys(kinds, "R105"))
