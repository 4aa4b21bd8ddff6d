"""torch's FSDP1, each with one defect."""

from __future__ import annotations

from torch.distributed.fsdp import FullyShardedDataParallel

from fsdp_conformance.mutants.engines import SeamFSDP1
from fsdp_conformance.mutants.mutant import known_wrong


@known_wrong("R003", name="fsdp1-divides-after-only")
class FSDP1DividesAfterOnly(SeamFSDP1):
    """Gradients are divided after the reduction, but not before it."""

    def alter(self, unit: FullyShardedDataParallel) -> None:
        unit._gradient_predivide_factor = 1
