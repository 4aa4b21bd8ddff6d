"""O. Uneven and padded shards."""

from __future__ import annotations

from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.errors import SuiteError
from fsdp_conformance.fixtures import probes, workload_by_name
from fsdp_conformance.workload.definition import Regime


class UnevenShards(ConformanceTestCase):
    """Sizes that are not multiples of the number of ranks."""

    @conformance_case(
        "R122", "R002", "R003", chapter="O", axes={"world_size": (2, 5)}, kills=("last-padded-row-dropped",)
    )
    def test_fewer_elements_than_ranks(self, world_size: int) -> None:
        """
        Parameters with one element, fewer rows than ranks, or a number of rows that does not divide are at parity bit
        for bit.
        """
        workload = probes.exact_tiny()
        run = self.train(workload)
        self.check_parity(run, workload, requirements={"gradient": "R122", "parameter": "R122"})

    @conformance_case(
        "R122",
        "R002",
        "R003",
        chapter="O",
        axes={"workload": ("uneven", "tiny", "convolution"), "world_size": (3,)},
        kills=("last-padded-row-dropped", "shards-rotated"),
    )
    def test_shapes(self, workload: str, world_size: int) -> None:
        """Uneven, tiny, one-dimensional and four-dimensional parameters are at parity."""
        problem = workload_by_name(workload)
        run = self.train(problem)
        self.check_parity(run, problem, requirements={"gradient": "R122", "parameter": "R122"})

    @conformance_case("R123", "R002", "R003", chapter="O", axes={"world_size": (2,)}, kills=("uninitialised-padding",))
    def test_poisoned_padding(self, world_size: int) -> None:
        """With NaN in all uninitialised memory, padding never reaches a value that a user can see."""
        workload = probes.exact_tiny()
        with self.poisoned_allocations():
            run = self.train(workload)
        self.check_parity(run, workload, requirements={"gradient": "R123", "parameter": "R123"})

    @conformance_case(
        "R123", chapter="O", axes={"world_size": (2,)}, needs=("clip_grad_norm",), kills=("padding-in-the-norm",)
    )
    def test_padding_in_the_norm(self, world_size: int) -> None:
        """With NaN in all uninitialised memory, the total norm of uneven gradients is that of the full gradients."""
        workload = workload_by_name("uneven")
        regime = Regime(max_norm=0.25)
        with self.poisoned_allocations():
            run = self.train(workload, self.plan(workload, max_norm=0.25), regime)
        expected = self.references(workload, regime).expected.steps[0].grad_norm
        if expected is None or float(expected) <= 0.25:
            raise SuiteError(f"the reference's norm must exceed 0.25, or nothing is clipped: got {expected}")
        self.check_parity(run, workload, regime, requirements={"norm": "R123", "parameter": "R123"})

    @conformance_case(
        "R124",
        "R002",
        chapter="O",
        axes={"world_size": (3,)},
        kills=("empty-shard-missing", "last-padded-row-dropped", "shards-rotated"),
    )
    def test_empty_shard(self, world_size: int) -> None:
        """Optimizers that iterate over lists of tensors accept a rank that owns no elements of a parameter."""
        workload = workload_by_name("tiny")
        regime = Regime(optimizer="adam")
        run = self.train(workload, regime=regime)
        self.check_parity(run, workload, regime, requirements={"gradient": "R124", "parameter": "R124"})

    @conformance_case(
        "R125",
        "R002",
        "R003",
        chapter="O",
        axes={"workload": ("wide-mlp", "uneven"), "world_size": (2,)},
        needs=("shard_dim",),
        # Most refuse uneven shards along that dimension.
        kills=lambda values: ["other-dimension-misplaced"] + ["shards-rotated"] * (values["workload"] == "wide-mlp"),
    )
    def test_other_dimension(self, workload: str, world_size: int) -> None:
        """
        Sharding along the second dimension is at parity if its size divides, and otherwise at parity or rejected.
        """
        problem = workload_by_name(workload)
        plan = self.plan(problem, shard_dim=1)
        if workload == "wide-mlp":
            run = self.train(problem, plan)
            self.check_parity(run, problem, requirements={"gradient": "R125", "parameter": "R125"})
        else:
            with self.refusal("R125", "uneven shards along dimension 1", names=("uneven", "dim", "divi")) as outcome:
                run = self.train(problem, plan)
                outcome.excused = True
            if outcome.excused:
                self.check_parity(run, problem, requirements={"gradient": "R125", "parameter": "R125"})
