"""K. Gradient clipping: the norm of all gradients, and scaling by it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.checks.norms import norm_by_hand, norm_digests, reductions_of_the_norm
from fsdp_conformance.fixtures import experts, norms, probes
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.plan import Plan, Sharding
from fsdp_conformance.workload.definition import Batch, BatchKey, Regime, Workload

#: By their names in case ids.
_NORM_TYPES = {"p1": 1.0, "p2": 2.0, "inf": math.inf}

#: Sharding degrees other than an engine's own, with their flags.
_DEGREES = {
    "grad-optim": (Sharding.GRAD_OPTIM, "zero2"),
    "none": (Sharding.NONE, "no_shard"),
    "hybrid": (Sharding.HYBRID, "hsdp"),
}


def _needs_norm(norm: str) -> list[str]:
    return ["clip_grad_norm", *(["clip_norm_type"] if norm != "p2" else [])]


class ClippingCase(ConformanceTestCase):
    """Shared parts of the cases of clipping."""

    def clipping(self, workload: Workload, norm_type: float = 2.0) -> Regime:
        """A regime whose maximum is above the norm of the first step, and below those of the following ones."""
        first = norms.graded_norm(workload, norm_type, step=0, world_size=self.world_size)
        return Regime(max_norm=1.5 * first, norm_type=norm_type)

    def train_clipped(
        self, workload: Workload, regime: Regime, plan: Plan | None = None, *, requirement: str, **options: Any
    ) -> TrainingHistory:
        """Train, and check the norm of every step and what clipping does to the parameters."""
        plan = replace(plan or self.plan(workload), max_norm=regime.max_norm)
        run = self.train(workload, plan, regime, **options)
        self.check_norm(run, workload, regime, requirement)
        kinds = ("loss", "gradient", "norm", "parameter")
        self.check_parity(run, workload, regime, requirements=dict.fromkeys(kinds, requirement))
        return run

    def check_norm(
        self,
        run: TrainingHistory,
        workload: Workload,
        regime: Regime,
        requirement: str,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """The norm of every step is the one computed by hand, if the implementation returns it."""
        if all(record.grad_norm is None for record in run.steps):
            self.report.notes.append("no norm is returned: it is judged by what clipping does to the parameters")
            return
        expected = [
            norms.graded_norm(workload, regime.norm_type, step=record.step, world_size=self.world_size)
            for record in run.steps
        ]
        exact = regime.norm_type != 2.0
        self.check(norm_by_hand(run, expected, requirement=requirement, exact=exact, dtype=dtype))


class TotalNorm(ClippingCase):
    """Gradients are scaled by one number, which comes from all of them."""

    @conformance_case(
        "R101",
        "R002",
        chapter="K",
        axes={"norm": tuple(_NORM_TYPES), "world_size": (2,)},
        needs=lambda values: _needs_norm(values["norm"]),
        kills=lambda values: [
            "clips-by-its-own-shard",
            "fsdp1-counts-ties-twice",
            *{
                "p1": ["norm-without-one-rank", "clips-twice", "reference-norm-of-one-unit"],
                "p2": ["adds-norms-of-ranks", "clips-twice", "reference-norm-of-one-unit"],
                "inf": ["adds-largest-elements"],
            }[values["norm"]],
            "counts-padding",
        ],
    )
    def test_total_norm(self, norm: str, world_size: int) -> None:
        """
        Over uneven and tied parameters, the norm is that of the full gradients, each element once, and parameters
        follow gradients that are scaled by it, or not scaled where it is below the maximum.
        """
        workload = norms.graded()
        self.train_clipped(workload, self.clipping(workload, _NORM_TYPES[norm]), requirement="R101")

    @conformance_case(
        "R101",
        "R002",
        chapter="K",
        axes={"degree": tuple(_DEGREES)},
        world_size=lambda values: 4 if values["degree"] == "hybrid" else 2,
        needs=lambda values: ["clip_grad_norm", _DEGREES[values["degree"]][1]],
        kills=lambda values: {
            "grad-optim": ["clips-by-its-own-shard", "adds-norms-of-ranks"],
            "none": ["ddp-counts-every-rank", "ddp-clips-on-one-rank"],
            "hybrid": ["counts-replicas", "clips-by-its-own-shard"],
        }[values["degree"]],
    )
    def test_sharding_degrees(self, degree: str) -> None:
        """Under each sharding degree, elements that several ranks hold count once, bit for bit on every rank."""
        workload = norms.graded()
        replicas = 2 if degree == "hybrid" else 1
        plan = self.plan(workload, sharding=_DEGREES[degree][0], replicas=replicas)
        run = self.train_clipped(workload, self.clipping(workload), plan, requirement="R101")
        self.check_same_on_every_rank(run, "R101")

    @conformance_case(
        "R101",
        "R002",
        chapter="K",
        axes={"world_size": (2,)},
        needs=("clip_grad_norm",),
        kills=("scales-up", "normalises-always", "ddp-normalises-always"),
    )
    def test_above_the_norm(self, world_size: int) -> None:
        """A maximum above the norm changes nothing, bit for bit."""
        workload = norms.graded()
        regime = Regime(max_norm=2.0**20)
        run = self.train(workload, self.plan(workload, max_norm=regime.max_norm), regime)
        self.check_norm(run, workload, regime, "R101")
        self.check_parity(run, workload, requirement="R101")

    @conformance_case(
        "R101",
        "R002",
        chapter="K",
        axes={"world_size": (3,)},
        needs=("clip_grad_norm",),
        kills=("adds-epsilon-on-every-rank", "scales-up"),
    )
    def test_small_gradients(self, world_size: int) -> None:
        """Gradients of a norm of 1e-4 are scaled as by torch's function, which adds 1e-6 to the norm once."""
        workload = norms.graded_small()
        self.train_clipped(workload, self.clipping(workload), requirement="R101")


class EqualNorm(ClippingCase):
    """All ranks get the same norm, at a fixed price."""

    @conformance_case(
        "R102",
        "R101",
        chapter="K",
        axes={"degree": ("full", "hybrid")},
        world_size=lambda values: 4 if values["degree"] == "hybrid" else 3,
        needs=lambda values: [
            "clip_grad_norm",
            "coll_counts",
            *([] if values["degree"] == "full" else ["hsdp"]),
        ],
        kills=("reports-its-own-norm", "norm-tensor-by-tensor", "clips-by-its-own-shard"),
    )
    def test_same_on_every_rank(self, degree: str) -> None:
        """Every rank gets the same norm, and clipping sends one scalar for each dim of the mesh at most."""
        workload = norms.graded()
        plan = self.plan(workload)
        if degree == "hybrid":
            plan = self.plan(workload, sharding=Sharding.HYBRID, replicas=2)
        regime = self.clipping(workload)
        run = self.train_clipped(workload, regime, plan, requirement="R102")
        self.check_norm_on_every_rank(run)
        self.check(reductions_of_the_norm(run, dims=2 if degree == "hybrid" else 1, requirement="R102"))

    @conformance_case(
        "R102",
        "R101",
        chapter="K",
        axes={"world_size": (2,)},
        needs=("clip_grad_norm", "subgroups"),
        kills=("reference-norm-of-own-experts", "reference-forgets-experts"),
    )
    def test_experts(self, world_size: int) -> None:
        """
        With experts that one rank each holds, every expert counts in the norm of every rank and all clip alike, or
        clipping is rejected.
        """
        workload = experts.mixture_of_experts()
        regime = Regime(max_norm=0.05)
        with self.refusal("R102", "clipping with experts", names=("mesh", "group", "expert", "unit")) as outcome:
            run = self.train(workload, self.plan(workload, max_norm=regime.max_norm), regime)
            outcome.excused = True
        if not outcome.excused:
            return
        self.check_parity(run, workload, regime, requirements={"norm": "R102", "parameter": "R101"})
        self.check_norm_on_every_rank(run)

    def check_norm_on_every_rank(self, run: TrainingHistory) -> None:
        """The controller compares the norms of all ranks, if the implementation returns them."""
        digests = norm_digests(run)
        if digests:
            self.check_digests(digests, "norm", "R102", "the same norm on every rank")


class CornersOfTheNorm(ClippingCase):
    """Tensors that are empty, missing, in low precision or not sharded."""

    @conformance_case(
        "R103",
        "R101",
        chapter="K",
        axes={"norm": ("p2", "inf"), "world_size": (4,)},
        needs=lambda values: _needs_norm(values["norm"]),
        kills=lambda values: [
            "clips-by-its-own-shard",
            "clips-twice" if values["norm"] == "p2" else "reference-averages-largest-elements",
        ],
    )
    def test_empty_shards(self, norm: str, world_size: int) -> None:
        """With parameters of one or two rows, of which some ranks hold nothing, the norm is right on all ranks."""
        workload = norms.graded_tiny()
        self.train_clipped(workload, self.clipping(workload, _NORM_TYPES[norm]), requirement="R103")

    @conformance_case(
        "R103",
        chapter="K",
        world_size=2,
        needs=("clip_grad_norm", "orig_params"),
        kills=(
            "norm-of-old-gradients",
            "norm-of-nothing-is-nan",
            "random-noise",
            "reference-adds-noise",
            "norms-are-never-zero",
            "reference-norms-are-never-zero",
        ),
        processes="Python catches warnings for all threads of a process at once",
    )
    def test_no_gradients(self) -> None:
        """Without a gradient on any rank, the norm is 0, no rank hangs, and no parameter changes."""
        workload = probes.exact_tied()
        names = tuple(name for name, _ in workload.build(0).named_parameters())
        regime = Regime(max_norm=0.5, gradient_to_none=names)
        with self.catching_warnings() as warned:
            run = self.train(workload, self.plan(workload, max_norm=regime.max_norm), regime)
            texts = warned()
        if not any("gradient" in text for text in texts):
            self.report.notes.append("no warning says that there were no gradients")
        self.check(norm_by_hand(run, [0.0] * len(run.steps), requirement="R103", exact=True))
        for record in run.steps:
            for name, value in run.initial_params.items():
                self.check_equal(
                    "R103", record.params.get(name), value, check="parameters without gradients", step=record.step,
                    phase="step", fqn=name,
                )  # fmt: skip

    @conformance_case(
        "R103",
        chapter="K",
        axes={"norm": ("p1", "p2"), "world_size": (2,)},
        needs=lambda values: _needs_norm(values["norm"]),
        kills=("norm-forgets-low-precision", "norm-without-one-rank"),
    )
    def test_low_precision(self, norm: str, world_size: int) -> None:
        """With a unit that is stored in bfloat16 beside others in float32, the gradients of both count."""
        workload = norms.graded_low()
        regime = self.clipping(workload, _NORM_TYPES[norm])
        run = self.train(workload, self.plan(workload, max_norm=regime.max_norm), regime)
        self.check_norm(run, workload, regime, "R103", dtype=torch.bfloat16)

    @conformance_case(
        "R103",
        "R101",
        chapter="K",
        axes={"kind": ("ignored", "small"), "world_size": (3,)},
        needs=lambda values: [
            "clip_grad_norm",
            "ignored_modules" if values["kind"] == "ignored" else "persist_small",
        ],
        kills=lambda values: [
            "norm-forgets-whole-parameters",
            "counts-whole-parameters-per-rank",
            *(["fsdp1-forgets-ignored"] if values["kind"] == "ignored" else []),
        ],
    )
    def test_unsharded(self, kind: str, world_size: int) -> None:
        """Parameters that are whole on every rank, because they are ignored or small, count once."""
        workload = norms.graded()
        plan = self.plan(workload, persist_numel=21)
        if kind == "ignored":
            workload = _with_ignored()
            plan = self.plan(workload)
        regime = self.clipping(norms.graded())
        run = self.train(workload, replace(plan, max_norm=regime.max_norm), regime)
        kinds = ("loss", "gradient", "norm", "parameter")
        self.check_parity(run, workload, regime, requirements=dict.fromkeys(kinds, "R103"))


class Misuse(ClippingCase):
    """Clipping a part of the model."""

    @conformance_case(
        "R104",
        chapter="K",
        world_size=2,
        needs=("clip_grad_norm", "clip_unit"),
        kills=("fsdp1-clips-units", "reference-clips-units"),
    )
    def test_inner_unit(self) -> None:
        """Clipping through a unit inside the root is rejected, and training continues at parity."""
        workload = probes.exact_nested()
        adapter = self.subject()

        def clip(step: int) -> None:
            with (
                self.blaming("implementation"),
                self.refusal("R104", f"clipping through {workload.units[0]}", names=("root", "outermost", "inside")),
            ):
                adapter.clip_unit(workload.units[0], 1.0)

        run = self.train(workload, adapter=adapter, on_gradients=lambda _, step: clip(step))
        self.check_parity(run, workload, requirement="R104")


class _WithIgnored(nn.Module):
    """A graded sum, and a part whose gradient is the same on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.graded = norms.build_graded(0)
        self.ignored = norms.GradedPart((17, 3))
        with torch.no_grad():
            self.ignored.weight.fill_(0.5)

    def forward(self, x: Tensor, spikes: Tensor, common: Tensor) -> Tensor:
        return torch.stack([self.graded(x, spikes), self.ignored(common, spikes)])


def _build_with_ignored(rank: int) -> nn.Module:
    return _WithIgnored()


def _common_batch(key: BatchKey) -> Batch:
    """`graded_batch` for the first output, and a coefficient of the second one that all ranks share."""
    batch = norms.graded_batch(key)
    common = torch.tensor(float(key.step + 1), dtype=torch.float32)
    return Batch(args=(*batch.args, common), target=torch.stack([batch.target, torch.ones(())]))


def _with_ignored() -> Workload:
    """`graded` with a module that the engine must leave alone; every rank gives it the same gradient by itself."""
    graded = norms.graded()
    return replace(
        graded,
        name="graded-with-ignored",
        build=_build_with_ignored,
        batch=_common_batch,
        units=tuple(f"graded.{unit}" for unit in graded.units),
        ignored=("ignored",),
    )
