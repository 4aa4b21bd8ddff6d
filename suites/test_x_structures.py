"""X. Inputs and outputs."""

from __future__ import annotations

from torch import Tensor

from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.errors import SuiteError
from fsdp_conformance.fixtures import probes, structures
from fsdp_conformance.workload.definition import BatchKey, Regime


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
        kills=("detaches-inputs", "reference-detaches-inputs"),
    )
    def test_gradients_of_inputs(self) -> None:
        """The gradient of the loss with respect to an input equals that of the model that is not sharded."""
        workload = probes.exact_nested()
        key = BatchKey(step=0, rank=self.rank, world_size=self.world_size)
        expected, got = workload.batch(key), self.placed(workload.batch(key))
        for batch in (expected, got):
            batch.args[0].requires_grad_()
        workload.loss(workload.build(self.rank)(*expected.args, **expected.kwargs), expected).backward()
        adapter = self.subject()

        def look() -> Tensor | None:
            adapter.backward(workload.loss(adapter.forward(*got.args, **got.kwargs), got))
            gradient: Tensor | None = got.args[0].grad
            return gradient

        with self.blaming("implementation"):
            adapter.setup(lambda: workload.build(self.rank), workload.optimizers["sgd"], self.plan(workload))
            shown = self.observe("gradient of the input", look)
        gradient = expected.args[0].grad
        if gradient is None or not gradient.any():
            raise SuiteError(f"the gradient of the input must not be zero [{self.case.id}, rank {self.rank}]")
        self.check_equal("R157", shown, gradient, check="gradient of the input", step=0, phase="backward")

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
