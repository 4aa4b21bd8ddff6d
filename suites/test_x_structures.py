"""X. Inputs and outputs."""

from __future__ import annotations

from fsdp_conformance.case import conformance_case
from fsdp_conformance.fixtures import structures
from fsdp_conformance.testing import ConformanceTestCase
from fsdp_conformance.workload import Regime


class Structures(ConformanceTestCase):
    """A unit's inputs and outputs keep their structure and carry gradients."""

    @conformance_case(
        "R157", "R002", "R003", chapter="X", axes={"world_size": (2, 3)}, kills=("output-structure-changed",)
    )
    def test_structures(self, world_size: int) -> None:
        """
        Keyword arguments, tuples, dicts, named tuples, dataclasses and packed sequences pass through unchanged and
        carry gradients.
        """
        workload = structures.structured()
        regime = Regime(keep_outputs=True)
        run = self.train(workload, regime=regime)
        self.check_parity(run, workload, regime, requirements={"gradient": "R157", "output": "R157"})

    @conformance_case(
        "R157",
        chapter="X",
        world_size=2,
        environment=("accelerator",),
        needs=("move_inputs",),
        kills=("moves-flat-inputs-only", "no-reduction", "reference-sums-gradients"),
    )
    def test_inputs_are_moved(self) -> None:
        """The root moves inputs on the CPU, including nested ones, to the compute device."""
        workload = structures.structured()
        run = self.train(workload, inputs_on_cpu=True)
        self.check_parity(run, workload, requirements={"gradient": "R157"})
