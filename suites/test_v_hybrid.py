"""
V. Several groups: hybrid sharding, units on their own group, tensor parallelism. Meshes are written replicas x shards.
"""

from __future__ import annotations

import math
from dataclasses import replace

from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.checks import communication, groups
from fsdp_conformance.checks.result import comparison
from fsdp_conformance.faults.delay import FreeDelay
from fsdp_conformance.fixtures import buffers, experts, probes, tensor_parallel
from fsdp_conformance.fixtures.recipes import with_values
from fsdp_conformance.plan import Plan, Sharding
from fsdp_conformance.workload.definition import Regime, Workload

#: Both groups of equal size, and each of them larger than the other.
MESHES = ("2x2", "2x4", "4x2")

#: Long compared with a step of a small model, short compared with a case.
_DELAY_MS = 15.0

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

    @conformance_case(
        "R153",
        "R002",
        "R003",
        chapter="V",
        axes={"where": ("host", "device"), "world_size": (2, 3)},
        only=lambda values: values["where"] == "host" or values["world_size"] == 2,
        needs=("subgroups",),
        environment=lambda values: ["accelerator"] if values["where"] == "device" else [],
        kills=("averages-experts", "world-instead-of-subgroup"),
    )
    def test_expert_freed_late(self, where: str, world_size: int) -> None:
        """A unit on a group of its own trains at parity if one rank is late to free its parameters."""
        workload = experts.mixture_of_experts()
        plan = self.plan(workload)
        fault = FreeDelay("module.2", ranks=(1,), milliseconds=_DELAY_MS)
        run = self.check_stream_safety(workload, plan, faults=[fault])
        self.check_parity(run, workload, requirement="R153")
        self.check(groups.groups_used(run, workload, plan, requirement="R153"))

    @conformance_case(
        "R154",
        "R002",
        "R003",
        chapter="V",
        axes={"degree": (2,), "world_size": (4,)},
        needs=("tp",),
        kills=(
            "averages-over-the-tensor-group",
            "data-parallel-over-the-tensor-group",
            "ignores-tensor-parallelism",
        ),
    )
    def test_tensor_parallel(self, degree: int, world_size: int) -> None:
        """Layers sharded over tensor-parallel groups, and over data-parallel ranks beneath, train at parity."""
        workload = tensor_parallel.tensor_parallel(degree)
        run = self.train(workload, self._tensor_plan(workload, degree))
        self.check_parity(run, workload, requirement="R154")
        # The second bias of each block is whole on every rank of a tensor-parallel group.
        whole = sum(p.nbytes for name, p in workload.build(0).named_parameters() if name.endswith("down.bias"))
        full, held = run.full_bytes["params"], run.held_bytes["params"]
        most = (full - whole + whole * degree) / world_size * (1 + self.padding)
        message = comparison("bytes of parameters held", expected=f"at most {most:.0f}", got=held)
        self.expect(held <= most, "R154", message, phase="init", check="sharded over both groups")

    @conformance_case(
        "R154",
        chapter="V",
        axes={"degree": (2,), "world_size": (4,)},
        needs=("tp", "clip_grad_norm"),
        kills=("counts-replicated-in-the-norm", "averages-over-the-tensor-group"),
    )
    def test_tensor_parallel_clipping(self, degree: int, world_size: int) -> None:
        """The total norm counts every element once, whichever groups its parameter is sharded over."""
        workload = tensor_parallel.smooth_tensor_parallel(degree)
        regime = Regime(max_norm=0.5)
        run = self.train(workload, self._tensor_plan(workload, degree), regime)
        self.check_parity(run, workload, regime, requirements=dict.fromkeys(("norm", "gradient", "parameter"), "R154"))

    def _tensor_plan(self, workload: Workload, degree: int) -> Plan:
        return self.plan(workload, tensor_parallel=degree, tensor_styles=tensor_parallel.STYLES)

    def hybrid_plan(self, workload: Workload, mesh: str, **changes: object) -> Plan:
        """Full sharding within the mesh's shard groups."""
        replicas, _ = axis_sizes(mesh)
        return self.plan(workload, sharding=Sharding.HYBRID, replicas=replicas, **changes)
