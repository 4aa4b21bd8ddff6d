"""V. Pipelines: each stage is sharded over its own ranks. Meshes are written stages x data-parallel ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.checks.checkpoint import same_continuation, same_state_dict
from fsdp_conformance.checks.result import comparison
from fsdp_conformance.fixtures import pipeline
from fsdp_conformance.fixtures.recipes import with_values
from fsdp_conformance.plan import Plan
from fsdp_conformance.workload.definition import Regime, Workload

#: More than stages, so that a pipeline is filled, runs steadily, and is drained.
MICRO_BATCHES = 4

#: The step with which a resumed training begins.
RESUMED = 2

#: For six or eight processes on two cores.
TIMEOUT_S = 180.0


def axis_sizes(mesh: str) -> tuple[int, ...]:
    """Sizes of the dimensions of a mesh: (2, 2) for "2x2"."""
    return tuple(map(int, mesh.split("x")))


def num_ranks(values: dict[str, str]) -> int:
    """The world size of a case, from its mesh."""
    return math.prod(axis_sizes(values["mesh"]))


def schedule(order: str, *, deferred: bool = False, **changes: Any) -> Regime:
    """Three steps of four micro-batches, each of them reduced, or all at once."""
    reduced = (False,) * (MICRO_BATCHES - 1) + (True,) if deferred else ()
    return Regime(micro_batches=MICRO_BATCHES, pipeline=order, reduced=reduced, **changes)


class Pipelines(ConformanceTestCase):
    """A model whose stages are on different ranks trains like one that every rank has as a whole."""

    @conformance_case(
        "R154",
        "R002",
        "R003",
        chapter="V",
        axes={"order": ("forwards-first", "1f1b"), "reduction": ("synchronised", "deferred"), "mesh": ("2x2", "3x2")},
        only=lambda values: values["mesh"] == "2x2" or (values["order"], values["reduction"]) == ("1f1b", "deferred"),
        world_size=num_ranks,
        needs=lambda values: ["pp", "pipelined_microbatch", *["no_sync"] * (values["reduction"] == "deferred")],
        kills=(
            "averages-over-the-pipeline",
            "reduces-the-first-micro-batch-only",
            "stage-on-each-rank-alone",
            "pipelining-loses-the-first",
        ),
        timeout_s=TIMEOUT_S,
    )
    def test_pipeline(self, order: str, reduction: str, mesh: str) -> None:
        """
        Stages that are sharded over their own ranks, with activations and gradients sent between them, train at parity.
        """
        num_stages, _ = axis_sizes(mesh)
        workload = pipeline.pipeline(num_stages)
        plan = self._stage_plan(workload, num_stages)
        regime = schedule(order, deferred=reduction == "deferred")
        run = self.train(workload, plan, regime)
        self.check_parity(run, workload, regime, requirement="R154")
        self.check_same_on_every_rank(run, "R154")
        # All stages are of one size, and so are their groups.
        most = run.full_bytes["params"] / self.world_size * (1 + self.padding) + _uneven_rows(workload)
        held = run.held_bytes["params"]
        message = comparison("bytes of parameters held", expected=f"at most {most:.0f}", got=held)
        self.expect(held <= most, "R154", message, phase="init", check="sharded over the ranks of the stage")

    @conformance_case(
        "R154",
        chapter="V",
        axes={"norm": ("2", "inf"), "mesh": ("2x2",)},
        world_size=num_ranks,
        needs=lambda values: [
            *("pp", "pipelined_microbatch", "clip_grad_norm"), *["clip_norm_type"] * (values["norm"] == "inf")
        ],
        kills=lambda values: [
            "norm-of-the-own-stage", *["norm-of-all-ranks-of-the-pipeline"] * (values["norm"] == "2")
        ],
    )  # fmt: skip
    def test_pipeline_clipping(self, norm: str, mesh: str) -> None:
        """The total norm is that of the gradients of all stages, each counted once, on every rank."""
        num_stages, _ = axis_sizes(mesh)
        workload = pipeline.smooth_pipeline(num_stages)
        regime = schedule("1f1b", max_norm=0.5, norm_type=float(norm))
        run = self.train(workload, self._stage_plan(workload, num_stages), regime)
        self.check_parity(run, workload, regime, requirements=dict.fromkeys(("norm", "gradient", "parameter"), "R154"))

    @conformance_case(
        "R154",
        chapter="V",
        axes={"mesh": ("2x2",)},
        world_size=num_ranks,
        needs=("pp", "pipelined_microbatch", "full_state_dict", "optim_state_dict"),
        kills=("names-by-place-in-the-stage", "state-dict-of-the-first-stage", "optimizer-state-of-a-neighbour"),
    )
    def test_pipeline_state_dicts(self, mesh: str) -> None:
        """
        The state dicts of all stages together are that of the unwrapped model after each step, and a pipeline with
        other values that loads them, with those of its optimizers, continues as this one does.
        """
        num_stages, _ = axis_sizes(mesh)
        workload = pipeline.pipeline(num_stages)
        plan, regime = self._stage_plan(workload, num_stages), schedule("1f1b")
        saved: dict[str, Any] = {}

        def judge(subject: Adapter, step: int) -> None:
            state = self._assembled(subject.full_state_dict(), num_stages)
            self._judge_state(state, workload, regime, step, f"after step {step}")
            if step == RESUMED - 1:
                saved["optimizer"] = subject.optim_state_dict()
                saved["model"] = state

        adapter = self.subject()
        run = self.train(workload, plan, regime, adapter=adapter, after_step=judge)
        with self.blaming("implementation"):
            first = adapter.full_state_dict(rank0_only=True)
        state = self._assembled(first, num_stages, place=0)
        self._judge_state(state, workload, regime, regime.steps - 1, "on the first rank of each stage")

        if self.report.findings:
            # It may have nothing to load.
            return

        def load(subject: Adapter) -> None:
            own = plan.stages[self.rank // (self.world_size // num_stages)]
            part = {name: value.to(self.device) for name, value in saved["model"].items() if name.startswith(f"{own}.")}
            subject.load_full_state_dict(part)
            subject.load_optim_state_dict(saved["optimizer"])

        others = with_values(workload, lambda value: value + 1)
        resumed = self.train(others, plan, regime, on_setup=load, first_step=RESUMED)
        self.check(same_continuation(resumed, run, requirement="R154", rank=self.rank))

    @conformance_case(
        "R154",
        chapter="V",
        axes={"mesh": ("2x2",)},
        world_size=num_ranks,
        needs=("pp", "pipelined_microbatch", "checkpoint"),
        kills=("loads-the-optimizer-of-the-first-stage", "saving-drops-momentum"),
    )
    def test_pipeline_checkpoints(self, mesh: str) -> None:
        """A pipeline with other values that loads a checkpoint of all stages continues as the one that saved it."""
        num_stages, _ = axis_sizes(mesh)
        workload = pipeline.pipeline(num_stages)
        plan, regime = self._stage_plan(workload, num_stages), schedule("1f1b")
        directory = self.shared_directory()

        def save(subject: Adapter, step: int) -> None:
            if step == RESUMED - 1:
                subject.save_checkpoint(directory)

        run = self.train(workload, plan, regime, after_step=save)
        self.check_parity(run, workload, regime, requirement="R154")
        others = with_values(workload, lambda value: value + 1)
        resumed = self.train(
            others, plan, regime, on_setup=lambda subject: subject.load_checkpoint(directory), first_step=RESUMED
        )
        self.check(same_continuation(resumed, run, requirement="R154", rank=self.rank))

    @conformance_case(
        "R154",
        "R002",
        "R003",
        chapter="V",
        axes={"mesh": ("2x2x2",)},
        world_size=num_ranks,
        needs=("pp", "tp", "pipelined_microbatch"),
        kills=("averages-over-the-pipeline", "averages-over-the-tensor-group"),
        timeout_s=TIMEOUT_S,
    )
    def test_pipeline_and_tensor_parallel(self, mesh: str) -> None:
        """On a mesh of stages, data-parallel and tensor-parallel ranks, stages of divided layers train at parity."""
        num_stages, _, degree = axis_sizes(mesh)
        workload = pipeline.pipeline(num_stages, tensor_degree=degree)
        styles = pipeline.tensor_styles(num_stages)
        plan = self._stage_plan(workload, num_stages, tensor_parallel=degree, tensor_styles=styles)
        regime = Regime(steps=2, micro_batches=num_stages, pipeline="1f1b")
        run = self.train(workload, plan, regime)
        self.check_parity(run, workload, regime, requirement="R154")

    def _stage_plan(self, workload: Workload, num_stages: int, **changes: Any) -> Plan:
        return self.plan(workload, stages=pipeline.stage_names(num_stages), **changes)

    def _assembled(self, own: Mapping[str, Any], num_stages: int, *, place: int | None = None) -> dict[str, Any]:
        """The state dicts of the ranks at this rank's place in each stage, or at another one, as one. Collective."""
        stage_size = self.world_size // num_stages
        states: list[dict[str, Any]] = [{} for _ in range(self.world_size)]
        values = {name: value.detach().cpu() if isinstance(value, Tensor) else value for name, value in own.items()}
        dist.all_gather_object(states, values)
        whole: dict[str, Any] = {}
        for state in states[self.rank % stage_size if place is None else place :: stage_size]:
            whole |= {f"{name}, again" if name in whole else name: value for name, value in state.items()}
        return whole

    def _judge_state(
        self, state: Mapping[str, Any], workload: Workload, regime: Regime, step: int, moment: str
    ) -> None:
        params = self.references(workload, regime).expected.steps[step].params
        values = {name: value.float() for name, value in params.items()}
        self.check(same_state_dict(state, values, requirement="R154", rank=self.rank, moment=moment, step=step))


def _uneven_rows(workload: Workload) -> int:
    """Bytes by which a rank may exceed its even share: a row of each parameter of a stage."""
    stage = next(workload.build(0).children())
    return sum(parameter[:1].nbytes for parameter in stage.parameters())
