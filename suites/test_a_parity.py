"""A. Numerical parity with DDP, on which every other chapter is based."""

from __future__ import annotations

import torch

from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.checks import communication, groups, growth, partition
from fsdp_conformance.checks.invariance import Losses, same_training
from fsdp_conformance.fixtures import models, probes, split, transformer, workload_by_name
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.plan import Plan, Sharding
from fsdp_conformance.references.single_process import single_process_reference
from fsdp_conformance.workload.definition import Regime, Workload
from fsdp_conformance.workload.events import Action

WORLD_SIZES = (2, 3, 4)

#: With fewer ranks, what an engine may keep for the next step is as large as a replica.
_SHOWS_REPLICAS = 4


class NumericalParity(ConformanceTestCase):
    """Losses, gradients and parameters equal those of replicated training, in every step, on every rank."""

    @conformance_case(
        "R001",
        "R002",
        "R003",
        "R007",
        chapter="A",
        axes={"world_size": WORLD_SIZES},
        kills=(
            "sum-instead-of-mean",
            "averaged-twice",
            "no-reduction",
            "last-padded-row-dropped",
            "reduction-skipped-from-step-2",
            "renamed-parameter",
            "rounded-parameters",
            "fsdp1-divides-after-only",
            "ddp-keeps-last-bucket",
            "inputs-of-first-rank",
            "reference-sums-gradients",
        ),
    )
    def test_exact_probe(self, world_size: int) -> None:
        """On an exact probe every loss, gradient and parameter equals the reference bit for bit."""
        workload = probes.exact_mlp()
        run = self.train(workload)
        self.check_parity(run, workload)
        self.check_same_on_every_rank(run, "R007")

    @conformance_case(
        "R001",
        "R002",
        "R003",
        "R007",
        chapter="A",
        axes={"workload": ("nested", "nested-always", "norm-mlp", "transformer"), "world_size": (2,)},
        kills=("sum-instead-of-mean", "no-reduction"),
    )
    def test_sgd(self, workload: str, world_size: int) -> None:
        """With SGD and momentum, losses, gradients and parameters equal DDP's within the noise of the references."""
        problem = workload_by_name(workload)
        run = self.train(problem)
        self.check_parity(run, problem)
        self.check_same_on_every_rank(run, "R007")

    @conformance_case(
        "R001",
        "R002",
        "R003",
        "R007",
        chapter="A",
        axes={"workload": ("llama", "routed-experts", "state-space"), "world_size": (3,)},
        kills=("sum-instead-of-mean", "no-reduction", "last-padded-row-dropped", "reference-sums-gradients"),
    )
    def test_architecture(self, workload: str, world_size: int) -> None:
        """
        Rotary embeddings with grouped-query attention, routed experts with a second loss, and a selective scan are at
        parity.
        """
        problem = workload_by_name(workload)
        run = self.train(problem)
        self.check_parity(run, problem)
        self.check_same_on_every_rank(run, "R007")

    @conformance_case(
        "R003",
        chapter="A",
        axes={"world_size": (2, 3, 5)},
        kills=("bias-not-reduced", "averaged-twice", "one-rank-dropped", "hides-summed-gradients"),
    )
    def test_every_rank_contributes_once(self, world_size: int) -> None:
        """
        With gradients of 2**rank times a position code, the mean contains every rank once and every element in place.
        """
        workload = probes.rank_coded()
        run = self.train(workload)
        self.check_parity(run, workload)

    @conformance_case(
        "R004",
        "R002",
        "R003",
        chapter="A",
        axes={"workload": ("norm-mlp", "transformer"), "world_size": (2,)},
        # Ten steps of a transformer on three ranks would show nothing that two and four ranks do not.
        kills=("one-layer-norm-not-averaged", "sum-instead-of-mean"),
    )
    def test_adam(self, workload: str, world_size: int) -> None:
        """
        Ten steps of Adam keep gradients and parameters at parity, although Adam hides a wrong scale in the losses.
        """
        problem = workload_by_name(workload)
        regime = Regime(optimizer="adam", steps=10)
        run = self.train(problem, regime=regime)
        self.check_parity(run, problem, regime, requirements={"loss": "R004"})

    @conformance_case(
        "R005",
        "R002",
        "R003",
        chapter="A",
        axes={"sharding": ("full", "grad_optim", "optim", "none"), "world_size": (2,)},
        needs=lambda values: {"full": ["zero3"], "grad_optim": ["zero2"], "optim": ["zero1"], "none": ["no_shard"]}[
            values["sharding"]
        ],
        kills=lambda values: {
            "full": ("sum-instead-of-mean", "one-degree-for-all", "views-of-full-storage"),
            "grad_optim": ("sum-instead-of-mean", "ignores-reshard", "views-of-full-storage"),
            "optim": ("shards-no-optimizer-state", "zero1-sums-gradients"),
            "none": ("sum-instead-of-mean", "one-degree-for-all"),
        }[values["sharding"]],
    )
    def test_sharding_degree(self, sharding: str, world_size: int) -> None:
        """Parity holds whichever of parameters, gradients and optimizer state are sharded, and these are sharded."""
        workload = probes.exact_nested()
        plan = self.plan(workload, sharding=Sharding(sharding))
        run = self.train(workload, plan)
        self.check_parity(run, workload)
        self.check_degree(run, workload, plan)

    @conformance_case(
        "R005",
        "R002",
        "R003",
        chapter="A",
        axes={"shard_group": (1, 2), "world_size": (2, 4)},
        needs=("hsdp",),
        only=lambda values: values["world_size"] > values["shard_group"],
        kills=("reduces-over-shard-group-only",),
    )
    def test_hybrid(self, shard_group: int, world_size: int) -> None:
        """Hybrid sharding averages over all ranks, whatever the size of the shard group, including one."""
        workload = probes.exact_nested()
        plan = self.plan(workload, sharding=Sharding.HYBRID, replicas=world_size // shard_group)
        run = self.train(workload, plan)
        self.check_parity(run, workload)
        self.check_same_on_every_rank(run, "R005")
        self.check_degree(run, workload, plan)

    def check_degree(self, run: TrainingHistory, workload: Workload, plan: Plan) -> None:
        """The requested degree was used, by what is held and gathered."""
        regathers = self.declares("reshard_after_forward")
        self.check(
            partition.degree_used(
                run, workload, plan, world_size=self.world_size, regathers=regathers, requirement="R005"
            )
        )

    @conformance_case(
        "R005",
        "R002",
        "R003",
        chapter="A",
        world_size=4,
        needs=("reshard_int",),
        kills=("sum-instead-of-mean", "ignores-reshard-group", "reduction-skipped-from-step-2"),
    )
    def test_reshard_to_smaller_group(self) -> None:
        """Parity holds when parameters are resharded to a group of two after forward, which backward gathers from."""
        workload = probes.exact_nested()
        plan = self.plan(workload, reshard_after_forward=2)
        run = self.train(workload, plan)
        self.check_parity(run, workload)
        self.check(groups.reshard_group_used(run, workload, plan, requirement="R005"))

    @conformance_case(
        "R006",
        chapter="A",
        world_size=2,
        kills=(
            "sum-instead-of-mean",
            "last-padded-row-dropped",
            "weighs-ranks-by-rows",
        ),
    )
    def test_closed_form(self) -> None:
        """One step of Linear(3, 3) on two ranks gives the weight computed by hand."""
        workload = probes.closed_form()
        run = self.train(workload, regime=Regime(steps=1))
        got = run.steps[0].params.get("weight")
        expected = probes.closed_form_weight(self.world_size)
        self.check_equal("R006", got, expected, fqn="weight", step=0, check="closed form")

    @conformance_case(
        "R007",
        chapter="A",
        axes={"world_size": (2,)},
        kills=(
            "shards-differ-between-ranks",
            "last-rank-gathers-other-values",
            "reference-last-rank-gathers-other-values",
        ),
    )
    def test_same_on_every_rank(self, world_size: int) -> None:
        """
        After every step the full parameters are bitwise equal on every rank, even for a model that is not exact.
        """
        run = self.train(transformer.transformer())
        self.check_same_on_every_rank(run, "R007")

    @conformance_case(
        "R008", "R002", "R003", chapter="A", axes={"world_size": tuple(range(1, 9))}, kills=("divides-by-power-of-two",)
    )
    def test_world_size(self, world_size: int) -> None:
        """Parity holds at every world size, including those that are not powers of two."""
        # No probe is exact at 7: 21 times the rounded reciprocal of 7 is not 3.
        workload = probes.exact_mlp() if world_size in probes.EXACT_WORLD_SIZES else models.nested()
        run = self.train(workload)
        self.check_parity(run, workload, requirements={"loss": "R008"})

    @conformance_case(
        "R008",
        "R002",
        chapter="A",
        axes={"world_size": (1, 2, 3, 4, 6)},
        kills=lambda values: (
            ("divides-by-power-of-two", "extra-decay", *(["sum-instead-of-mean"] if values["world_size"] > 1 else []))
        ),
    )
    def test_same_global_batch(self, world_size: int) -> None:
        """
        The same twelve samples in each step train the same parameters, bit for bit, on however many ranks they are.
        """
        workload = split.global_batch()
        run = self.train(workload)
        expected = single_process_reference(workload, Regime(), rank=0, world_size=1, dtype=torch.float32)
        what = "all samples on one rank"
        self.check(same_training(run, expected, what=what, requirement="R008", losses=Losses.OTHERS))

    @conformance_case(
        "R005",
        "R002",
        "R003",
        chapter="A",
        axes={"sharding": ("grad_optim", "none", "hybrid")},
        world_size=4,
        needs=lambda values: [
            "zero3",
            {"grad_optim": "zero2", "none": "no_shard", "hybrid": "hsdp"}[values["sharding"]],
        ],
        kills=lambda values: (
            ["scales-outside-full-sharding", "damages-gathered-parameters", "reference-gathers-noise"]
            + ["reduces-over-shard-group-only"] * (values["sharding"] == "hybrid")
        ),
    )
    def test_degree_changes_nothing(self, sharding: str) -> None:
        """The sharding degree and the shape of the mesh change no bit of losses, gradients and parameters."""
        workload = probes.exact_nested()
        other = Sharding(sharding)
        plan = self.plan(workload, sharding=other, replicas=2 if other is Sharding.HYBRID else 1)
        run = self.train(workload, plan)
        full = self.train(workload, self.plan(workload, sharding=Sharding.FULL))
        self.check(same_training(run, full, what="full sharding", requirement="R005"))

    @conformance_case(
        "R009", chapter="A", world_size=1, kills=("extra-decay", "divides-by-power-of-two", "random-noise")
    )
    def test_one_rank_is_plain_training(self) -> None:
        """At world size 1 training equals the unwrapped model's bit for bit."""
        workload = models.norm_mlp()
        run = self.train(workload)
        self.check_bitwise(run, self.plain_history(workload, Regime()), "R009")

    @conformance_case(
        "R009",
        chapter="A",
        world_size=1,
        needs=("ws1_fast",),
        kills=(
            "extra-collective",
            "communicates-in-every-call",
            "reference-communicates-in-every-call",
            "communicates-at-times",
            "reference-communicates-at-times",
            "ranks-disagree",
            "reference-ranks-disagree",
        ),
    )
    def test_one_rank_is_silent(self) -> None:
        """At world size 1 no collective is issued."""
        run = self.train(models.wide_mlp())
        self.check(communication.no_collectives(run, requirement="R009"))

    @conformance_case(
        "R010", chapter="A", axes={"world_size": (2,)}, kills=("eval-disturbs-training", "sum-instead-of-mean")
    )
    def test_eval_between_steps(self, world_size: int) -> None:
        """A forward in eval mode before a step gives the reference's output and does not affect training."""
        workload = probes.exact_nested()
        regime = Regime(eval_before=(0, 1, 2), keep_outputs=True)
        run = self.train(workload, regime=regime)
        self.check_parity(run, workload, regime, requirements={"eval": "R010"})

    @conformance_case(
        "R010",
        chapter="A",
        axes={"world_size": (2,)},
        kills=(
            "eval-disturbs-training",
            "reference-stale-after-eval",
        ),
    )
    def test_eval_between_backward_and_step(self, world_size: int) -> None:
        """A forward under no_grad between backward and the optimizer step does not affect the next step."""
        workload = probes.exact_nested()
        regime = Regime(eval_between=(0, 1), keep_outputs=True)
        run = self.train(workload, regime=regime)
        self.check_parity(run, workload, regime, requirement="R010", requirements={"eval": "R010"})

    @conformance_case(
        "R010",
        "R002",
        "R003",
        chapter="A",
        axes={"world_size": (2,)},
        kills=("evaluation-clears-gradients", "gradients-lost-after-eval", "eval-disturbs-training"),
    )
    def test_eval_at_any_point(self, world_size: int) -> None:
        """
        A forward under no_grad at any point of a step gives the reference's output and leaves training as it was.

        Between backward and the optimizer step, it has a case of its own.
        """
        self.check_every_point(
            probes.exact_accumulation(),
            Regime(micro_batches=2),
            Action.EVALUATE,
            runs=3,
            requirement="R010",
            pending=False,
        )

    @conformance_case(
        "R010", "R002", "R003", chapter="A", world_size=2, kills=("mode-clears-gradients", "no-reduction")
    )
    def test_mode_toggled_on_one_rank(self) -> None:
        """Switching to eval mode and back, at any point and on one rank alone, does not affect training."""
        self.check_every_point(
            probes.exact_accumulation(), Regime(micro_batches=2), Action.TOGGLE, runs=1, requirement="R010", ranks=(0,)
        )

    @conformance_case(
        "R010",
        chapter="A",
        axes={"sharding": ("full", "grad_optim"), "world_size": (2,)},
        needs=lambda values: ["prefetch_forward", {"full": "zero3", "grad_optim": "zero2"}[values["sharding"]]],
        kills=("evaluates-with-older-prefetch",),
    )
    def test_eval_with_prefetch(self, sharding: str, world_size: int) -> None:
        """With forward prefetch, a forward in eval mode before a step is right too, and does not affect training."""
        workload = probes.exact_nested()
        regime = Regime(eval_before=(0, 1, 2), keep_outputs=True)
        plan = self.plan(workload, sharding=Sharding(sharding), forward_prefetch=True)
        run = self.train(workload, plan, regime)
        self.check_parity(run, workload, regime, requirement="R010", requirements={"eval": "R010"})

    @conformance_case(
        "R011",
        chapter="A",
        world_size=2,
        kills=(
            "random-noise",
            "reference-adds-noise",
        ),
    )
    def test_two_runs_are_equal(self) -> None:
        """Two runs with the same seed are bitwise equal."""
        workload = models.norm_mlp()
        first = self.train(workload)
        second = self.train(workload)
        self.check_bitwise(second, first, "R011")

    @conformance_case(
        "R188", "R033", chapter="A", axes={"world_size": WORLD_SIZES}, kills=("silent-ddp", "views-of-full-storage")
    )
    def test_it_shards(self, world_size: int) -> None:
        """The bytes that ranks hold are those of sharded training, not of replicated training."""
        workload = models.wide_mlp()
        plan = self.plan(workload)
        regime = Regime(optimizer="adam")
        before = self.observe("bytes of tensors before training", lambda: growth.Held.now(None).bytes)
        run = self.train(workload, plan, regime)
        in_process = self.observe("bytes of tensors", lambda: growth.Held.now(None).bytes) - before
        self.check_parity(run, workload, regime)
        total = self.total(run.held_bytes)
        self.check(partition.sharding_witness(run, plan, world_size=world_size, padding=self.padding, total=total))
        self.report.measurements["bytes of tensors in the process"] = in_process
        if world_size >= _SHOWS_REPLICAS and self.device_type == "cpu":
            self.check(partition.process_witness(in_process, run, plan, world_size=world_size))
