"""Q. Buffers and batch norm."""

from __future__ import annotations

from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.fixtures import buffers, precision
from fsdp_conformance.references.reference_set import Kind


class Buffers(ConformanceTestCase):
    """Buffers are never sharded, and forward can write them."""

    @conformance_case(
        "R130",
        "R133",
        "R002",
        "R003",
        chapter="Q",
        axes={"world_size": (2,)},
        kills=("bias-not-reduced", "buffer-not-updated", "hides-lost-buffers", "no-reduction", "sum-instead-of-mean"),
    )
    def test_written_in_forward(self, world_size: int) -> None:
        """Float, integer and non-persistent buffers, and batch norm statistics, reflect the rank's own batches."""
        workload = buffers.batch_norm()
        run = self.train(workload)
        self.check_parity(run, workload, requirements={"buffer": "R130", "parameter": "R133", "gradient": "R133"})

    @conformance_case(
        "R132",
        chapter="Q",
        world_size=2,
        needs=("mixed_precision", "mp_buffers"),
        kills=("buffers-not-cast", "reference-sums-gradients"),
    )
    def test_in_low_precision(self) -> None:
        """Floating-point buffers have the policy's dtype in computations; integer buffers are unchanged."""
        workload = precision.scaled()
        plan = self.plan(workload, param_dtype="bfloat16", buffer_dtype="bfloat16")
        run = self.train(workload, plan)
        self.check_rounding(run, workload, plan, requirement="R132", kinds=(Kind.LOSS, Kind.GRADIENT, Kind.BUFFER))
