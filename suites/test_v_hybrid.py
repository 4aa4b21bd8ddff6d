"""V. Hybrid sharding: sharded within groups, replicated across groups. Meshes are written as replicas x shards."""

from __future__ import annotations

import math
from dataclasses import replace

from fsdp_conformance.case import conformance_case
from fsdp_conformance.checks import communication, groups
from fsdp_conformance.config import Plan, Sharding
from fsdp_conformance.fixtures import buffers, probes
from fsdp_conformance.fixtures.recipes import with_values
from fsdp_conformance.testing import ConformanceTestCase
from fsdp_conformance.workload import Regime, Workload

#: Both groups of equal size, and each of them larger than the other.
MESHES = ("2x2", "2x4", "4x2")

#: For eight processes on two cores.
TIMEOUT_S = 180.0


def axis_sizes(mesh: str) -> tuple[int, int]:
    """Number of replicas and ranks in a shard group: (2, 4) for "2x4"."""
    replicas, shards = map(int, mesh.split("x"))
    return replicas, shards


def num_ranks(values: dict[str, str]) -> int:
    """The world size of a case, from its mesh."""
    return math.prod(axis_sizes(values["mesh"]))


class HybridSharding(ConformanceTestCase):
    """Gradients are averaged over all ranks in two steps, each over its own group."""

    @conformance_case(
        "R151",
        "R002",
        "R003",
        chapter="V",
        axes={"mesh": MESHES},
        world_size=num_ranks,
        needs=("hsdp",),
        kills=(
            "reduces-over-shard-group-only",
            "all-reduces-over-shard-group",
            "divides-by-shard-group-only",
            "divides-by-replicas-only",
        ),
        timeout_s=TIMEOUT_S,
    )
    def test_parity(self, mesh: str) -> None:
        """With different data on every rank, losses, gradients and parameters equal the reference bit for bit."""
        workload = probes.exact_nested()
        run = self.train(workload, self.hybrid_plan(workload, mesh))
        self.check_parity(run, workload, requirement="R151")
        self.check_same_on_every_rank(run, "R151")

    @conformance_case(
        "R151",
        chapter="V",
        axes={"mesh": MESHES},
        world_size=num_ranks,
        needs=("hsdp", "coll_counts"),
        kills=(
            "extra-collective",
            "reduces-over-shard-group-only",
            "world-instead-of-subgroup",
            "all-reduces-over-shard-group",
            "all-reduces-the-full-gradient",
            "all-reduces-in-pieces",
        ),
        timeout_s=TIMEOUT_S,
    )
    def test_collectives(self, mesh: str) -> None:
        """
        Each unit is gathered and reduce-scattered in the shard group, its shard is all-reduced once in the replica
        group, and nothing else is sent.
        """
        workload = probes.exact_nested()
        plan = self.hybrid_plan(workload, mesh)
        run = self.train(workload, plan)
        self.check(communication.collective_counts(run, workload, plan, requirement="R151"))
        self.check(groups.groups_used(run, workload, plan, requirement="R151"))
        self.check(groups.unit_traffic(run, workload, plan, padding=self.padding, requirement="R151"))

    @conformance_case(
        "R151",
        "R093",
        chapter="V",
        axes={"mesh": ("2x2", "2x4")},
        world_size=num_ranks,
        needs=("hsdp", "coll_counts", "no_sync"),
        kills=("ignores-no-sync", "all-reduces-the-full-gradient", "last-microbatch-not-synchronised"),
        timeout_s=TIMEOUT_S,
    )
    def test_deferred_reduction(self, mesh: str) -> None:
        """Deferred micro-batches send nothing in either group; the last one reduces each unit's sum once in each."""
        workload = probes.exact_accumulation()
        regime = Regime(micro_batches=3, reduced=(False, False, True))
        plan = self.hybrid_plan(workload, mesh, micro_batches=3, defer_reduction=True)
        run = self.train(workload, plan, regime)
        self.check_parity(run, workload, regime, requirements={"gradient": "R093", "parameter": "R093"})
        self.check(groups.unit_traffic(run, workload, plan, padding=self.padding, requirement="R151"))

    @conformance_case(
        "R152",
        chapter="V",
        axes={"mesh": MESHES},
        world_size=num_ranks,
        needs=("hsdp", "sync_module_states"),
        kills=("ignores-sync", "synchronises-inside-shard-groups"),
        timeout_s=TIMEOUT_S,
    )
    def test_replicas_start_equal(self, mesh: str) -> None:
        """With sync at init, parameters and buffers on every rank of every replica equal those of the first rank."""
        workload = buffers.batch_norm()
        divergent = with_values(workload, lambda value: value + self.rank)
        run = self.train(divergent, self.hybrid_plan(workload, mesh, sync_module_states=True))
        first = replace(workload, build=lambda rank: workload.build(0))
        kinds = ("initial", "loss", "gradient", "parameter", "buffer")
        self.check_parity(run, first, requirements=dict.fromkeys(kinds, "R152"))
        self.check_same_on_every_rank(run, "R152")

    def hybrid_plan(self, workload: Workload, mesh: str, **changes: object) -> Plan:
        """Full sharding within the mesh's shard groups."""
        replicas, _ = axis_sizes(mesh)
        return self.plan(workload, sharding=Sharding.HYBRID, replicas=replicas, **changes)
