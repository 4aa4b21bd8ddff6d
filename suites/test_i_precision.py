"""I. Mixed precision: so far what low-precision copies of parameters take, not what they do to numbers."""

from __future__ import annotations

from fsdp_conformance.case import conformance_case
from fsdp_conformance.checks import memory
from fsdp_conformance.fixtures import deep
from fsdp_conformance.testing import ConformanceTestCase


class LowPrecision(ConformanceTestCase):
    """Parameters are kept in float32 and gathered in bfloat16."""

    @conformance_case(
        "R085",
        chapter="I",
        axes={"world_size": (2, 4)},
        needs=("mixed_precision",),
        environment=("accelerator",),
        kills=("keeps-low-precision-copies",),
    )
    def test_copies_live_while_gathered(self, world_size: int) -> None:
        """Between steps and after each backward as many bytes are held as without the low-precision copies."""
        workload = deep.deep_4()
        plain = self.train(workload, self.plan(workload), observe=False)
        lower = self.train(workload, self.plan(workload, param_dtype="bfloat16"), observe=False)
        self.check(memory.same_bytes(lower, plain, "R085", what="mixed precision"))
