"""N. Unused parameters and rank-divergent graphs."""

from __future__ import annotations

from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.fixtures import probes, unused
from fsdp_conformance.workload.definition import Regime


class UnusedParameters(ConformanceTestCase):
    """Parameters that a step does not use, on every rank or on some."""

    @conformance_case("R117", "R002", chapter="N", axes={"world_size": (2,)}, kills=("garbage-for-unused",))
    def test_unused_everywhere(self, world_size: int) -> None:
        """A parameter that no rank uses has no gradient or zeros, and the others are at parity bit for bit."""
        workload = probes.exact_unused()
        regime = Regime(unused_parameters=True)
        run = self.train(workload, regime=regime)
        self.check_parity(
            run, workload, regime, requirements={"gradient": "R117", "parameter": "R117"}, none_or_zero=True
        )

    @conformance_case(
        "R117",
        chapter="N",
        axes={"world_size": (2,)},
        needs=("sharded_state",),
        kills=("keeps-unused-unsharded", "reshards-when-read"),
    )
    def test_unused_unit_is_resharded(self, world_size: int) -> None:
        """A unit that took no part in a step holds no full parameters after it."""
        workload = unused.unused_parameter()
        adapter = self.subject()
        regime = Regime(unused_parameters=True)
        run = self.train(workload, regime=regime, adapter=adapter)
        self.check_released(adapter, workload, "R117", run, regime=regime)

    @conformance_case(
        "R118",
        "R002",
        "R003",
        chapter="N",
        axes={"world_size": (2,)},
        kills=(
            "garbage-for-unused",
            "unused-output-trained",
            "reshards-when-read",
        ),
    )
    def test_unused_output(self, world_size: int) -> None:
        """A unit whose output does not reach the loss leaves the others at parity, and is resharded."""
        workload = unused.unused_output()
        regime = Regime(unused_parameters=True)
        adapter = self.subject()
        run = self.train(workload, regime=regime, adapter=adapter)
        self.check_parity(
            run, workload, regime, requirements={"gradient": "R118", "parameter": "R118"}, none_or_zero=True
        )
        self.check_released(adapter, workload, "R118", run, regime=regime)

    @conformance_case(
        "R119",
        "R002",
        "R003",
        chapter="N",
        axes={"world_size": (2,)},
        needs=("unused_divergent",),
        kills=(
            "reduces-only-used",
            "ddp-divides-by-users",
        ),
    )
    def test_branches_of_one_unit(self, world_size: int) -> None:
        """
        If ranks use different branches of one unit, ranks that skip a branch count as zero in the mean; or this is
        rejected.
        """
        workload = probes.exact_divergent()
        regime = Regime(unused_parameters=True)
        run = self.train(workload, regime=regime)
        self.check_parity(run, workload, regime, requirement="R119")

    @conformance_case(
        "R120",
        "R002",
        chapter="N",
        axes={"world_size": (2,)},
        needs=("unused_untouched",),
        kills=("zero-instead-of-none", "unused-output-trained", "garbage-for-unused"),
    )
    def test_unused_keeps_its_gradient(self, world_size: int) -> None:
        """The gradient of a parameter that no rank used stays None, so that weight decay does not change it."""
        workload = unused.unused_parameter()
        regime = Regime(optimizer="adam", unused_parameters=True)
        run = self.train(workload, regime=regime)
        self.check_parity(run, workload, regime, requirements={"gradient": "R120", "parameter": "R120"})

    @conformance_case(
        "R121",
        "R002",
        "R003",
        chapter="N",
        axes={"world_size": (2,)},
        needs=("unused_divergent",),
        kills=(
            "reduces-only-used",
            "ddp-divides-by-users",
        ),
        timeout_s=45,
        starts_early=True,
    )
    def test_units_chosen_by_rank(self, world_size: int) -> None:
        """
        If each rank runs a different unit, training ends with the right gradients, or with an error within the
        deadline.
        """
        workload = unused.divergent_units()
        regime = Regime(unused_parameters=True)
        run = self.train(workload, regime=regime)
        self.check_parity(run, workload, regime, requirement="R121")
