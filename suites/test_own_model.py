"""
The user's own model, batches and loss (--workload), trained in the ways that the other chapters judge on the suite's.

The cases have a separate profile, and certify nothing. Where the references agree bit for bit in every order of
adding, comparisons are bitwise; otherwise their measured noise bounds them. A case that asks for something that the
model lacks, such as a frozen parameter, is DISABLED, and says why.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.checks.checkpoint import same_continuation
from fsdp_conformance.checks.invariance import same_training
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.plan import InitMode, Offload, Plan, Sharding
from fsdp_conformance.references.exactness import demands_bitwise
from fsdp_conformance.references.fitness import ADAM_STEPS, first_optimizer, is_exact
from fsdp_conformance.references.reference_set import Kind, References
from fsdp_conformance.workload.definition import Regime, Workload
from fsdp_conformance.workload.loading import load_workload

#: What the kinds of comparisons of a case are judged for, if it is about all of them.
_ALL = ("initial", "loss", "gradient", "parameter", "buffer", "norm")

#: Steps before a checkpoint, and in all.
_SAVED, _STEPS = 2, 4

#: Micro-batches of a step by name, and whether each is reduced.
_REDUCED = {"each": (), "deferred": (False, False, True)}


class OwnModelCase(ConformanceTestCase):
    """The parts that the cases share: the workload, and how exactly its training can be compared."""

    @cached_property
    def workload(self) -> Workload:
        """The user's workload, loaded in this process."""
        with self.blaming("suite"):
            return replace(load_workload(self.order.settings.workload), exact=False)

    def regime(self, **fields: Any) -> Regime:
        """A regime with the optimizer of most cases."""
        return Regime(**{"optimizer": first_optimizer(self.workload), "unused_parameters": self._has_unused, **fields})

    @property
    def _has_unused(self) -> bool:
        return "unused" in self.workload.traits

    def train_own(self, requirement: str, plan: Plan | None = None, regime: Regime | None = None) -> TrainingHistory:
        """Train the workload, and compare all that the regime produces, for one requirement."""
        regime = regime or self.regime()
        run = self.train(self.workload, plan or self.plan(self.workload), regime)
        self.compare(run, regime, dict.fromkeys(_ALL, requirement))
        return run

    def compare(self, run: TrainingHistory, regime: Regime, requirements: dict[str, str]) -> None:
        """Compare with the references: bit for bit if they agree so, whatever the order of adding."""
        workload = self.workload
        if self.judges:
            run = _without_classes(run)
            references = self.references(workload, regime)
            histories = {name: _without_classes(history) for name, history in references.histories.items()}
            references = replace(references, histories=histories)
            self.case_references.use(workload, regime, references)
            exact = replace(workload, exact=True, exact_steps=max(workload.exact_steps, regime.steps))
            if self._agree_exactly(references, exact, regime):
                self.case_references.use(exact, regime, replace(references, workload=exact, exact=True))
                workload = exact
        self.check_parity(run, workload, regime, requirements=requirements)

    def _agree_exactly(self, references: References, exact: Workload, regime: Regime) -> bool:
        """True if the references are equal on every rank, and so is each order that engines may add in. Collective."""
        if not demands_bitwise(exact, regime, self.world_size):
            return False
        with self.blaming("suite"):
            equal = torch.tensor([_are_equal(references)], dtype=torch.int64)
            if self.world_size > 1:
                dist.all_reduce(equal, op=dist.ReduceOp.MIN)
            return bool(equal) and is_exact(exact, regime, self.world_size)


def _without_classes(run: TrainingHistory) -> TrainingHistory:
    """The history with outputs of evaluations in plain containers: a class of the user's does not reach a referee."""
    return replace(run, eval_outputs=[_plain(output) for output in run.eval_outputs])


def _plain(value: Any) -> Any:
    """The value with dicts, lists and tuples in place of their subclasses, and dicts in place of dataclasses."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value


def _are_equal(references: References) -> bool:
    """True if losses, gradients and parameters of the last step have the same bits in every reference."""
    last = references.expected.steps[-1]
    for sample in references.samples:
        other = sample.steps[-1]
        pairs = [
            *zip(other.losses, last.losses, strict=True),
            *((value, last.params[name]) for name, value in other.params.items()),
        ]
        if not all(torch.equal(got.double(), expected.double()) for got, expected in pairs):
            return False
    return True


class OwnTraining(OwnModelCase):
    """Losses, gradients and parameters, in each way of training."""

    @conformance_case(
        "R001",
        "R002",
        "R003",
        "R007",
        chapter="A",
        slug="own-model",
        axes={"world_size": (1, 2, 3, 4)},
        environment=("own_workload",),
        kills=lambda values: (
            ["extra-decay", "rounded-parameters"]
            if values["world_size"] == 1
            else ["sum-instead-of-mean", "no-reduction", "rounded-parameters", "reference-sums-gradients"]
        ),
    )
    def test_own_model(self, world_size: int) -> None:
        """Losses, gradients, parameters and buffers of the user's model equal those of unsharded training."""
        regime = self.regime()
        run = self.train(self.workload, regime=regime)
        self.compare(run, regime, {})
        self.check_same_on_every_rank(run, "R007")

    @conformance_case(
        "R004",
        "R002",
        "R003",
        chapter="A",
        slug="own-adam",
        world_size=2,
        environment=("own_workload", "own_adam"),
        kills=("sum-instead-of-mean", "reference-sums-gradients"),
    )
    def test_own_adam(self) -> None:
        """The same under Adam, which hides a wrong scale of gradients in the losses."""
        regime = self.regime(optimizer="adam", steps=ADAM_STEPS)
        run = self.train(self.workload, regime=regime)
        self.compare(run, regime, {"loss": "R004"})

    @conformance_case(
        "R005",
        "R002",
        "R003",
        chapter="A",
        slug="own-sharding",
        axes={"sharding": ("full", "grad_optim", "optim", "none", "hybrid")},
        world_size=lambda values: 4 if values["sharding"] == "hybrid" else 2,
        needs=lambda values: {
            "full": ["zero3"],
            "grad_optim": ["zero2"],
            "optim": ["zero1"],
            "none": ["no_shard"],
            "hybrid": ["hsdp"],
        }[values["sharding"]],
        environment=("own_workload",),
        kills=lambda values: {
            "optim": ("zero1-sums-gradients", "zero1-forgets-a-rank"),
            "none": ("sum-instead-of-mean", "no-reduction"),
            "hybrid": ("reduces-over-shard-group-only", "sum-instead-of-mean"),
        }.get(values["sharding"], ("sum-instead-of-mean", "reference-sums-gradients")),
    )
    def test_own_sharding(self, sharding: str) -> None:
        """The same whichever of parameters, gradients and optimizer state are sharded."""
        kind = Sharding(sharding)
        self.train_own("R005", self.plan(self.workload, sharding=kind, replicas=2 if kind is Sharding.HYBRID else 1))

    @conformance_case(
        "R005",
        chapter="A",
        slug="own-degree-changes-nothing",
        axes={"sharding": ("grad_optim", "none")},
        world_size=2,
        needs=lambda values: ["zero3", {"grad_optim": "zero2", "none": "no_shard"}[values["sharding"]]],
        environment=("own_workload", "own_exact"),
        kills=("scales-outside-full-sharding", "damages-gathered-parameters", "reference-gathers-noise"),
    )
    def test_own_degree_changes_nothing(self, sharding: str) -> None:
        """If the model is exact, the sharding degree changes no bit of losses, gradients and parameters."""
        regime = self.regime()
        run = self.train(self.workload, self.plan(self.workload, sharding=Sharding(sharding)), regime)
        full = self.train(self.workload, self.plan(self.workload, sharding=Sharding.FULL), regime)
        self.check(same_training(run, full, what="full sharding", requirement="R005"))

    @conformance_case(
        "R010",
        chapter="A",
        slug="own-evaluation",
        world_size=2,
        environment=("own_workload",),
        kills=("eval-disturbs-training", "sum-instead-of-mean"),
    )
    def test_own_evaluation(self) -> None:
        """A forward in eval mode before each step leaves training as it was."""
        regime = self.regime(eval_before=(0, 1, 2))
        self.train_own("R010", regime=regime)

    @conformance_case(
        "R035",
        "R002",
        "R003",
        chapter="D",
        slug="own-units-are-released",
        world_size=2,
        environment=("own_workload", "own_units"),
        kills=("reshards-when-read", "sum-instead-of-mean"),
    )
    def test_own_units_are_released(self) -> None:
        """No unit holds full parameters when backward has returned, nor between steps."""
        adapter, regime = self.subject(), self.regime()
        run = self.train(self.workload, regime=regime, adapter=adapter)
        self.compare(run, regime, {})
        self.check_released(adapter, self.workload, "R035", run, regime=regime)

    @conformance_case(
        "R106",
        "R002",
        "R003",
        chapter="L",
        slug="own-tied-weights",
        world_size=2,
        environment=("own_workload", "own_tied"),
        kills=("tied-gradient-doubled", "sum-instead-of-mean"),
    )
    def test_own_tied_weights(self) -> None:
        """A parameter under two names gets the sum of its gradients, and stays one parameter."""
        self.train_own("R106")

    @conformance_case(
        "R111",
        "R002",
        "R003",
        chapter="M",
        slug="own-frozen-parameters",
        world_size=2,
        environment=("own_workload", "own_frozen"),
        kills=("frozen-gets-gradient", "sum-instead-of-mean"),
    )
    def test_own_frozen_parameters(self) -> None:
        """Frozen parameters keep their values and flags, and the others are at parity."""
        self.check_flags(self.train_own("R111"), self.workload, "R111")


class OwnPlacement(OwnModelCase):
    """Where the model is built, where it computes, and where it lives."""

    @conformance_case(
        "R012",
        "R002",
        "R003",
        chapter="B",
        slug="own-moved-before-wrapping",
        world_size=2,
        needs=("init_before",),
        environment=("own_workload", "accelerator"),
        kills=("sum-instead-of-mean", "reinitialises-placed-model"),
    )
    def test_own_before(self) -> None:
        """A model that is on the device when wrapped trains at parity."""
        self.train_own("R012", self.plan(self.workload, init_mode=InitMode.BEFORE))

    @conformance_case(
        "R013",
        "R002",
        "R003",
        chapter="B",
        slug="own-moved-after-wrapping",
        world_size=2,
        needs=("init_after",),
        environment=("own_workload", "accelerator"),
        kills=("sum-instead-of-mean", "optimizes-what-was-moved"),
    )
    def test_own_after(self) -> None:
        """A model that is moved to the device after wrapping trains at parity."""
        self.train_own("R013", self.plan(self.workload, init_mode=InitMode.AFTER))

    @conformance_case(
        "R025",
        "R002",
        "R003",
        chapter="C",
        slug="own-built-on-meta",
        world_size=2,
        needs=("meta_init",),
        environment=("own_workload", "own_meta"),
        kills=("initialised-with-the-shard", "buffers-without-values", "inner-units-without-values"),
    )
    def test_own_built_on_meta(self) -> None:
        """A model that is built on meta starts with the values of the real one, and trains like it."""
        self.train_own("R025", self.plan(self.workload, meta_init=True))

    @conformance_case(
        "R137",
        "R138",
        "R002",
        "R003",
        chapter="S",
        slug="own-offload",
        axes={"offload": ("cpu", "cpu_pinned"), "accumulation": ("none", "each", "deferred")},
        world_size=2,
        needs=lambda values: ["cpu_offload_params", *["no_sync"] * (values["accumulation"] == "deferred")],
        environment=lambda values: [
            "own_workload",
            "accelerator",
            *["pinned_memory"] * (values["offload"] == "cpu_pinned"),
        ],
        kills=("offloaded-step-lost", "sum-instead-of-mean"),
    )
    def test_own_offload(self, offload: str, accumulation: str) -> None:
        """With its shards on the CPU the model is at parity, also with several micro-batches."""
        regime = self.accumulating(accumulation)
        plan = self.plan(
            self.workload,
            offload=Offload(offload),
            micro_batches=regime.micro_batches,
            defer_reduction=accumulation == "deferred",
        )
        self.train_own("R137", plan, regime)

    def accumulating(self, accumulation: str) -> Regime:
        """A regime with one micro-batch, or with three."""
        if accumulation == "none":
            return self.regime()
        return self.regime(micro_batches=3, reduced=_REDUCED[accumulation])


class OwnSteps(OwnModelCase):
    """The parts of a step: micro-batches, clipping, low precision; and what is saved between steps."""

    @conformance_case(
        "R092",
        "R002",
        "R003",
        chapter="J",
        slug="own-accumulation",
        axes={"world_size": (2, 3)},
        environment=("own_workload",),
        kills=("overwrites-instead-of-adding", "optimizer-steps-every-microbatch"),
    )
    def test_own_accumulation(self, world_size: int) -> None:
        """Three micro-batches that are each reduced add up to one step."""
        regime = self.regime(micro_batches=3)
        self.train_own("R092", self.plan(self.workload, micro_batches=3), regime)

    @conformance_case(
        "R093",
        "R002",
        "R003",
        chapter="J",
        slug="own-deferred",
        axes={"world_size": (2, 3)},
        needs=("no_sync",),
        environment=("own_workload",),
        kills=("last-microbatch-not-synchronised", "reference-overwrites-collected"),
    )
    def test_own_deferred(self, world_size: int) -> None:
        """Two deferred micro-batches and a third one that is reduced add up to one step."""
        regime = self.regime(micro_batches=3, reduced=_REDUCED["deferred"])
        self.train_own("R093", self.plan(self.workload, micro_batches=3, defer_reduction=True), regime)

    @conformance_case(
        "R101",
        "R002",
        "R003",
        chapter="K",
        slug="own-clipping",
        axes={"accumulation": ("none", "deferred")},
        world_size=2,
        needs=lambda values: ["clip_grad_norm", *["no_sync"] * (values["accumulation"] == "deferred")],
        environment=("own_workload",),
        kills=("clips-by-its-own-shard", "sum-instead-of-mean"),
    )
    def test_own_clipping(self, accumulation: str) -> None:
        """Gradients are scaled by their total norm, whose half is the maximum in the first step."""
        deferred = accumulation == "deferred"
        fields = {"micro_batches": 3, "reduced": _REDUCED["deferred"]} if deferred else {}
        half = self.decide("half of the first norm", lambda: self._first_norm(self.regime(steps=1, **fields)) / 2)
        regime = self.regime(max_norm=half, **fields)
        plan = self.plan(self.workload, max_norm=half, micro_batches=regime.micro_batches, defer_reduction=deferred)
        self.train_own("R101", plan, regime)

    def _first_norm(self, regime: Regime) -> float:
        """The total norm of the gradients of the first step."""
        gradients = self.references(self.workload, regime).expected.steps[0].grads or {}
        norms = [torch.linalg.vector_norm(gradient) for gradient in gradients.values() if gradient is not None]
        return float(torch.linalg.vector_norm(torch.stack(norms)))

    @conformance_case(
        "R084",
        chapter="I",
        slug="own-low-precision",
        axes={"accumulation": ("none", "deferred")},
        world_size=2,
        needs=lambda values: ["mixed_precision", "mp_reduce", *["no_sync"] * (values["accumulation"] == "deferred")],
        environment=("own_workload", "own_float32"),
        kills=("ignores-param-dtype", "ignores-reduce-dtype"),
    )
    def test_own_low_precision(self, accumulation: str) -> None:
        """In bfloat16, with gradients reduced in float32, it equals a reference that rounds at the same points."""
        deferred = accumulation == "deferred"
        regime = self.regime(micro_batches=3, reduced=_REDUCED["deferred"]) if deferred else self.regime()
        plan = self.plan(
            self.workload,
            param_dtype="bfloat16",
            reduce_dtype="float32",
            micro_batches=regime.micro_batches,
            defer_reduction=deferred,
        )
        run = self.train(self.workload, plan, regime)
        self.check_rounding(
            run, self.workload, plan, regime, requirement="R084", kinds=(Kind.LOSS, Kind.GRADIENT, Kind.PARAMETER)
        )

    @conformance_case(
        "R149",
        "R002",
        "R003",
        chapter="U",
        slug="own-checkpoint",
        axes={"optimizer": ("first", "adam")},
        world_size=2,
        needs=("checkpoint",),
        environment=lambda values: ["own_workload", *["own_adam"] * (values["optimizer"] == "adam")],
        kills=("checkpoint-forgets-optimizer", "checkpoint-shifts-state"),
    )
    def test_own_checkpoint(self, optimizer: str) -> None:
        """A model with other values loads what was saved after two steps, and its next two are those of the model."""
        regime = self.regime(steps=_STEPS, **({"optimizer": "adam"} if optimizer == "adam" else {}))
        directory = self.shared_directory()

        def save(adapter: Adapter, step: int) -> None:
            if step == _SAVED - 1:
                adapter.save_checkpoint(directory)

        whole = self.train(self.workload, regime=regime, after_step=save)
        self.compare(whole, regime, {})
        resumed = self.train(
            _otherwise(self.workload),
            self.plan(self.workload),
            regime,
            on_setup=lambda adapter: adapter.load_checkpoint(directory),
            first_step=_SAVED,
        )
        self.check(same_continuation(resumed, whole, requirement="R149", rank=self.rank))


def _otherwise(workload: Workload) -> Workload:
    """The workload with other initial values of what a checkpoint has: buffers that are not persistent stay."""

    def build(rank: int) -> nn.Module:
        model = workload.build(rank)
        saved = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
        with torch.no_grad():
            for tensor in saved.values():
                if isinstance(tensor, Tensor) and tensor.dtype is not torch.bool:
                    tensor.add_(1)
        return model

    return replace(workload, build=build)
