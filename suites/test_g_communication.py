"""G. Communication schedule and volume, as seen at the process group."""

from __future__ import annotations

from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.checks import communication, groups, order
from fsdp_conformance.fixtures import experts, frozen, models, probes, workload_by_name
from fsdp_conformance.plan import Sharding
from fsdp_conformance.workload.definition import Regime


class CommunicationSchedule(ConformanceTestCase):
    """The communication: which collectives, how many, how large, over which groups, in which order."""

    @conformance_case(
        "R062",
        chapter="G",
        axes={"world_size": (2, 4)},
        needs=("zero3", "coll_counts"),
        kills=("extra-collective", "all-reduce-and-slice"),
    )
    def test_full_sharding(self, world_size: int) -> None:
        """
        A ZeRO-3 step gathers each unit once in forward and at most once in backward, reduce-scatters each unit once,
        and sends nothing else.
        """
        workload = probes.exact_nested()
        plan = self.plan(workload, sharding=Sharding.FULL)
        run = self.train(workload, plan)
        self.check(communication.collective_counts(run, workload, plan, requirement="R062"))

    @conformance_case(
        "R063",
        chapter="G",
        axes={"world_size": (2, 4)},
        needs=("zero2", "coll_counts"),
        kills=("extra-collective", "ignores-reshard"),
    )
    def test_gradient_sharding(self, world_size: int) -> None:
        """A ZeRO-2 step gathers each unit once in forward, never in backward, and reduce-scatters each once."""
        workload = probes.exact_nested()
        plan = self.plan(workload, sharding=Sharding.GRAD_OPTIM)
        run = self.train(workload, plan)
        self.check(communication.collective_counts(run, workload, plan, requirement="R063"))

    @conformance_case(
        "R064",
        chapter="G",
        axes={"world_size": (2, 4)},
        needs=("no_shard",),
        kills=(
            "extra-collective",
            "gathers-unsharded",
        ),
    )
    def test_no_sharding(self, world_size: int) -> None:
        """Without sharding nothing is gathered, and gradients are all-reduced."""
        workload = probes.exact_nested()
        plan = self.plan(workload, sharding=Sharding.NONE)
        run = self.train(workload, plan)
        self.check(communication.collective_counts(run, workload, plan, requirement="R064"))

    @conformance_case("R065", chapter="G", axes={"world_size": (2, 4)}, needs=("no_sync",), kills=("ignores-no-sync",))
    def test_deferred_reduction(self, world_size: int) -> None:
        """Deferred micro-batches reduce nothing: the step reduces each unit as often as without accumulation."""
        workload = probes.exact_accumulation()
        regime = Regime(micro_batches=3, reduced=(False, False, True))
        plan = self.plan(workload, micro_batches=3, defer_reduction=True)
        run = self.train(workload, plan, regime)
        self.check(communication.deferred_counts(run, workload, plan, requirement="R065"))

    @conformance_case(
        "R066",
        chapter="G",
        axes={"world_size": (2, 4)},
        kills=(
            "reduces-in-eval",
            "communicates-in-every-call",
            "runs-forward-twice",
        ),
    )
    def test_eval(self, world_size: int) -> None:
        """A forward in eval mode under no_grad reduces nothing and gathers each unit at most once."""
        workload = probes.exact_nested()
        regime = Regime(eval_before=(1, 2))
        run = self.train(workload, regime=regime)
        self.check(communication.eval_collectives(run, workload, requirement="R066"))

    @conformance_case(
        "R067",
        chapter="G",
        axes={"workload": ("uneven", "tiny", "frozen-units", "unused-parameter", "called-twice"), "world_size": (2, 3)},
        kills=(
            "rank-dependent-order",
            "ranks-disagree",
            "reference-ranks-disagree",
        ),
    )
    def test_same_sequence_on_every_rank(self, workload: str, world_size: int) -> None:
        """
        Every rank issues the same sequence of collectives, even with empty shards and frozen, unused or repeated units.
        """
        problem = workload_by_name(workload)
        run = self.train(problem)
        self.check_same_schedule(run, "R067")

    @conformance_case(
        "R068",
        chapter="G",
        axes={"world_size": (2, 4)},
        needs=("zero3", "coll_volume"),
        kills=("all-reduce-and-slice", "gathers-twice-the-bytes"),
    )
    def test_volume(self, world_size: int) -> None:
        """All-gathers receive and reduce-scatters send the parameters' bytes plus at most the declared padding."""
        workload = models.wide_mlp()
        plan = self.plan(workload, sharding=Sharding.FULL)
        run = self.train(workload, plan)
        self.check(
            communication.wire_volume(
                run, workload, plan, world_size=world_size, padding=self.padding, requirement="R068"
            )
        )

    @conformance_case(
        "R068",
        chapter="G",
        axes={"world_size": (2,), "reduce": ("default", "float32")},
        needs=lambda values: [
            *("zero3", "coll_volume", "mixed_precision"), *["mp_reduce"] * (values["reduce"] == "float32")
        ],
        kills=lambda values: ["gathers-in-full-precision"]
        + ["reduces-in-full-precision"] * (values["reduce"] == "default"),
    )  # fmt: skip
    def test_volume_in_bfloat16(self, world_size: int, reduce: str) -> None:
        """Parameters are gathered in bfloat16, and gradients are sent in the dtype of the reduction."""
        workload = models.wide_mlp()
        reduce_dtype = "float32" if reduce == "float32" else None
        plan = self.plan(workload, sharding=Sharding.FULL, param_dtype="bfloat16", reduce_dtype=reduce_dtype)
        run = self.train(workload, plan, observe=False)
        self.check(
            communication.wire_volume(
                run, workload, plan, world_size=world_size, padding=self.padding, requirement="R068"
            )
        )

    @conformance_case(
        "R068",
        chapter="G",
        axes={"world_size": (2, 4)},
        kills=("all-reduce-and-slice", "gathers-twice-the-bytes", "reduces-twice", "reference-reduces-twice"),
    )
    def test_total_volume(self, world_size: int) -> None:
        """A step sends no more than gathering all parameters twice and reducing all gradients once."""
        workload = models.wide_mlp()
        plan = self.plan(workload)
        run = self.train(workload, plan)
        self.check(
            communication.total_volume(
                run, workload, plan, world_size=world_size, padding=self.padding, requirement="R068"
            )
        )

    @conformance_case(
        "R069",
        chapter="G",
        world_size=3,
        kills=(
            "uses-a-group-of-its-own",
            "communicates-apart",
            "reference-communicates-apart",
        ),
    )
    def test_world_alone(self) -> None:
        """Where no group but the world is declared, nothing is sent over a part of it."""
        workload = probes.exact_nested()
        run = self.train(workload)
        self.check(groups.world_alone(run, requirement="R069"))

    @conformance_case("R069", chapter="G", world_size=4, needs=("hsdp",), kills=("world-instead-of-subgroup",))
    def test_hybrid_groups(self) -> None:
        """Under hybrid sharding, gathers and reduce-scatters stay in shard groups, all-reduces in replica groups."""
        workload = probes.exact_nested()
        plan = self.plan(workload, sharding=Sharding.HYBRID, replicas=2)
        run = self.train(workload, plan)
        self.check(groups.groups_used(run, workload, plan, requirement="R069"))

    @conformance_case(
        "R069",
        chapter="G",
        axes={"world_size": (2, 3)},
        needs=("subgroups",),
        kills=("world-instead-of-subgroup", "all-reduce-and-slice"),
    )
    def test_expert_groups(self, world_size: int) -> None:
        """A unit with its own group is never communicated over the world, and trains at parity."""
        workload = experts.mixture_of_experts()
        plan = self.plan(workload)
        run = self.train(workload, plan)
        self.check(groups.groups_used(run, workload, plan, requirement="R069"))
        self.check_parity(run, workload, requirements={"parameter": "R069", "gradient": "R069"})

    @conformance_case("R070", chapter="G", world_size=2, needs=("zero3", "coll_counts"), kills=("reversed-gathers",))
    def test_order(self) -> None:
        """All-gathers of a forward follow the order of execution, reduce-scatters of a backward its reverse."""
        workload = models.staircase()
        plan = self.plan(workload, sharding=Sharding.FULL)
        run = self.train(workload, plan)
        self.check(order.execution_order(run, workload, plan, requirement="R070"))

    @conformance_case(
        "R071",
        chapter="G",
        axes={"world_size": (2, 4)},
        kills=(
            "extra-collective-in-first-step",
            "communicates-at-times",
            "reference-communicates-at-times",
        ),
    )
    def test_first_iteration(self, world_size: int) -> None:
        """Every step issues the same collectives, including the first."""
        workload = probes.exact_nested()
        run = self.train(workload)
        self.check(order.steady_schedule(run, requirement="R071"))

    @conformance_case(
        "R072",
        chapter="G",
        axes={"world_size": (2, 4)},
        kills=(
            "frozen-reduced",
            "reduces-twice",
            "reference-reduces-twice",
        ),
    )
    def test_frozen_unit(self, world_size: int) -> None:
        """The gradients of a frozen unit are not reduced."""
        workload = frozen.frozen_units()
        plan = self.plan(workload)
        run = self.train(workload, plan)
        self.check(communication.frozen_reductions(run, workload, plan, requirement="R072"))
