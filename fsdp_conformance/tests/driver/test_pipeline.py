"""Stages on two ranks: any number of micro-batches, stages without parameters, and what no pipeline can be."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.adapters.torch_like import parallel_shape
from fsdp_conformance.adapters.vendors.reference import Reference
from fsdp_conformance.adapters.vendors.torch_fsdp2 import TorchFSDP2
from fsdp_conformance.checks.parity import parity
from fsdp_conformance.driver import pipeline_stage, session
from fsdp_conformance.driver.pipeline import Pipeline
from fsdp_conformance.driver.pipeline_stage import too_old
from fsdp_conformance.driver.task import Conditions, Observer, World
from fsdp_conformance.engine.errors import StructureMismatch
from fsdp_conformance.engine.fully_sharded.checkpoint import load_checkpoint
from fsdp_conformance.errors import ConfigError, EnvironmentUnavailable, SuiteError, Unsupported
from fsdp_conformance.fixtures import pipeline, probes
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.plan import Plan
from fsdp_conformance.references.reference_set import train_references
from fsdp_conformance.tests.adapters.adapter_ranks import RankTestCase
from fsdp_conformance.workload.definition import Batch, BatchKey, Regime, Workload
from fsdp_conformance.workload.events import Action, Event, Moment

pytestmark = pytest.mark.slow

ENGINES = ("torch-fsdp2", "reference")
STAGES = ("0", "1")

needs_schedules = pytest.mark.skipif(bool(too_old()), reason=too_old())


def with_a_stage_of(kind: str) -> Workload:
    """A pipeline of two whose first or last stage has no parameters."""
    whole = pipeline.smooth_pipeline(2)

    def build(rank: int) -> nn.Module:
        stage, empty = next(whole.build(rank).children()), nn.Tanh()
        return nn.Sequential(*((empty, stage) if kind == "first" else (stage, empty)))

    return replace(whole, build=build, units=("1.unit",) if kind == "first" else ("0.unit",))


@needs_schedules
class Trains(RankTestCase):
    """Each of the two ranks has a stage; what they train together is what one process trains."""

    def assert_parity(self, name: str, workload: Workload, regime: Regime) -> TrainingHistory:
        """Train, and fail unless everything is as in the references."""
        history = self.run_training(name, workload, regime, stages=STAGES)
        references = train_references(workload, regime, rank=self.rank, world_size=2)
        references.agree()
        results = parity(history, references)
        self.assertLess(50, sum(result.count.comparisons for result in results), name)
        self.assertEqual([], [finding for result in results for finding in result.findings], f"{name} {regime}")
        return history

    @pytest.mark.nightly
    def test_numbers_of_micro_batches(self) -> None:
        """Fewer than stages, as many, and more."""
        for name in ENGINES:
            for order, count in (("forwards-first", 1), ("1f1b", 2), ("1f1b", 5)):
                regime = Regime(steps=1, micro_batches=count, pipeline=order)
                history = self.assert_parity(name, pipeline.pipeline(2), regime)
                self.assertEqual(count, len(history.steps[0].losses), f"{name} {order}")

    @pytest.mark.nightly
    def test_driven_by_torch(self) -> None:
        """Deferred reductions, which torch carries out itself where it knows the engine."""
        regime = Regime(steps=2, micro_batches=3, reduced=(False, False, True), pipeline="1f1b")
        for name in ENGINES:
            self.assert_parity(name, pipeline.pipeline(2), regime)

    @pytest.mark.nightly
    def test_stages_without_parameters(self) -> None:
        """The first one, whose output needs no gradient, and the last one; with clipping, which needs all stages."""
        regime = Regime(steps=2, micro_batches=2, pipeline="forwards-first", max_norm=0.5)
        for name in ENGINES:
            for kind in ("first", "last"):
                history = self.assert_parity(name, with_a_stage_of(kind), regime)
                norms = [float(record.grad_norm or 0) for record in history.steps]
                self.assertLess(regime.max_norm or 0, min(norms), msg=kind)

    def test_what_a_stage_has(self) -> None:
        """The adapter sees its stage alone, under original names; the history has all stages."""
        seen: list[set[str]] = []
        history = self.run_training(
            "torch-fsdp2",
            pipeline.pipeline(2),
            Regime(steps=1, micro_batches=2, pipeline="1f1b"),
            observer=Observer(
                on_setup=lambda adapter: seen.append({name.split(".")[0] for name in adapter.full_params()})
            ),
            stages=STAGES,
        )
        self.assertEqual([{STAGES[self.rank]}], seen)
        self.assertEqual({*STAGES}, {name.split(".")[0] for name in history.initial_params})
        self.assertEqual({*STAGES}, {name.split(".")[0] for name in history.steps[0].grads or {}})

    def test_a_name_that_two_stages_have(self) -> None:
        """Neither value is lost."""
        pipe = Pipeline(
            Plan(stages=STAGES), pipeline.pipeline(2), Regime(pipeline="1f1b", micro_batches=2),
            rank=self.rank, world_size=2, device=torch.device("cpu"),
        )  # fmt: skip
        self.assertEqual({"a": 0, "a (again in stage '1')": 1}, pipe.joined({"a": self.rank}))
        self.assertEqual([torch.tensor(1.0)], pipe.losses([torch.tensor(float(self.rank))]))

    @pytest.mark.nightly
    def test_a_checkpoint_that_is_not_this_stages(self) -> None:
        """The reference engine refuses a name under which no stage has saved, and takes this stage's own."""
        adapter, directory = Reference(), self.shared_directory()
        self.run_training(
            adapter,
            pipeline.pipeline(2),
            Regime(steps=1, micro_batches=2, pipeline="1f1b"),
            stages=STAGES,
        )
        adapter.save_checkpoint(directory)
        for stage in ("", "third"):
            with self.assertRaisesRegex(StructureMismatch, "has no optimizer state"):
                load_checkpoint(adapter.model, adapter.optimizer, directory, stage=stage)
        load_checkpoint(adapter.model, adapter.optimizer, directory, stage=STAGES[self.rank])
        dist.barrier()


class _RaisesAtTheEnd(TorchFSDP2):
    """The first stage raises in its last backward, for which no other waits; the others before they step."""

    name: ClassVar[str] = "raises-at-the-end"
    _backwards = 0

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self._backwards += 1
        if self.mesh.get_local_rank("stage") == 0 and self._backwards == 2:
            raise KeyError("mine")
        super().backward(loss, retain_graph=retain_graph)

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        raise KeyError("mine")


@needs_schedules
class Refuses(RankTestCase):
    """Pipelines that every rank refuses, before anything is built."""

    def refused(self, problem: str, workload: Workload | None = None, **fields: Any) -> None:
        """Require a ConfigError with this text; `fields` are those of the plan, or a regime."""
        regime = fields.pop("regime", Regime(micro_batches=2, pipeline="1f1b"))
        with self.assertRaisesRegex(ConfigError, problem):
            self.run_training("torch-fsdp2", workload or pipeline.pipeline(2), regime, **{"stages": STAGES, **fields})

    def test_regimes(self) -> None:
        """Without an order, with too few micro-batches for it, and with what no schedule does."""
        self.refused("pipeline must be an order of passes", regime=Regime(micro_batches=2))
        self.refused("at least the number of stages 2 under 1f1b, got 1", regime=Regime(pipeline="1f1b"))
        saved = Event(action=Action.SAVE, moment=Moment.STEP, step=1)
        for fields, problem in (
            ({"backwards_per_forward": 2}, "two backwards per forward"),
            ({"keep_outputs": True}, "outputs"),
            ({"idle_forwards": 1}, "forwards alone"),
            ({"eval_before": (1,)}, "evaluations"),
            ({"events": (saved,)}, "events"),
            ({"frozen_at": ((0, ("0.last.up.bias",)),)}, "events"),
            ({"init_scale": 2.0}, "loss scaling"),
        ):
            regime = Regime(micro_batches=2, pipeline="1f1b", **fields)
            self.refused(f"must be without .*{problem}", regime=regime)

    def test_stages(self) -> None:
        """More than ranks, with units or parameters outside, and unknown ones."""
        three = Regime(micro_batches=3, pipeline="1f1b")
        self.refused("stages must divide the world size 2, got 3 stages", stages=("0", "1", "2"), regime=three)
        self.refused("contain every unit and every parameter, got '2'", stages=("0", "2"))
        self.refused("got 'stages.2' outside", probes.exact_long(), stages=("stages.0", "stages.1"))
        self.refused(r"got '0.unit\+1.unit' outside", units=("0.unit+1.unit",))

    def test_batches(self) -> None:
        """Batches of several arguments, or of several sizes, are refused."""
        regime = Regime(micro_batches=2, pipeline="1f1b")
        two = replace(pipeline.pipeline(2), batch=lambda key: Batch(args=(torch.ones(3, 7), 1)))
        ragged = replace(
            pipeline.pipeline(2),
            batch=lambda key: Batch(args=(torch.ones(3 + key.micro, 7),), target=torch.ones(3 + key.micro, 7)),
        )
        for workload, problem in ((two, "must have one tensor as argument"), (ragged, "must have equal shapes")):
            with self.assertRaisesRegex(SuiteError, problem):
                self.run_training("torch-fsdp2", workload, regime, stages=STAGES)

    def test_undeclared(self) -> None:
        """An engine that does not declare it is not asked."""
        with self.assertRaisesRegex(Unsupported, "needs pp, but torch-fsdp1 does not declare it"):
            self.run_training("torch-fsdp1", pipeline.pipeline(2), Regime(pipeline="forwards-first"), stages=STAGES)

    def test_an_exception_of_the_engine(self) -> None:
        """It is raised as it is, and not as torch wraps it."""
        workload, regime = pipeline.pipeline(2), Regime(steps=1, micro_batches=2, pipeline="forwards-first")
        with self.assertRaisesRegex(KeyError, "mine"):
            self._unobserved(_RaisesAtTheEnd(), workload, regime)

    def _unobserved(self, adapter: Adapter, workload: Workload, regime: Regime) -> TrainingHistory:
        plan = session.plan_for(workload, regime, Plan(stages=STAGES))
        world, conditions = World(rank=self.rank, size=2), Conditions(observe=False)
        return session.train(adapter, workload, plan, regime, world, conditions=conditions)


def test_an_old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedules without the option are left alone, and the message mentions it."""
    monkeypatch.setattr(pipeline_stage, "_SCHEDULES", {"1f1b": lambda stage, count, loss_fn: None})
    assert re.fullmatch("needs pipeline schedules with .*scale_grads, which torch .* does not have", too_old())
    with pytest.raises(EnvironmentUnavailable, match="scale_grads"):
        Pipeline(
            Plan(stages=STAGES), pipeline.pipeline(2), Regime(pipeline="1f1b", micro_batches=2),
            rank=0, world_size=2, device=torch.device("cpu"),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "world_size", "shape"),
    [
        ({"stages": STAGES}, 4, {"stage": 2, "shard": 2}),
        ({"tensor_parallel": 2, "tensor_styles": (("a", "row"),)}, 4, {"shard": 2, "tensor": 2}),
        (
            {"stages": STAGES, "tensor_parallel": 2, "tensor_styles": (("0.a", "row"),)},
            8,
            {"stage": 2, "shard": 2, "tensor": 2},
        ),
    ],
)
def test_shapes(fields: dict[str, Any], world_size: int, shape: dict[str, int]) -> None:
    """The dimensions that the plan asks for, outermost first."""
    parallel = parallel_shape(Plan(**fields), world_size)
    assert list(parallel.items()) == list(shape.items())


def test_shapes_that_do_not_fit() -> None:
    """The message names the group that is not divided."""
    three = Plan(stages=("0", "1", "2"))
    with pytest.raises(ConfigError, match="stages must divide the world size 4, got 3 stages"):
        parallel_shape(three, 4)
    both = Plan(stages=STAGES, tensor_parallel=2, tensor_styles=(("0.a", "row"),))
    with pytest.raises(ConfigError, match=re.escape("tensor_parallel must divide the 3 ranks of a stage, got 2")):
        parallel_shape(both, 6)


def test_keys_of_batches() -> None:
    """A stage gets no more than activations: batches of a pipeline have one argument."""
    batch = pipeline.pipeline(2).batch(BatchKey(step=0, world_size=4))
    assert len(batch.args) == 1
