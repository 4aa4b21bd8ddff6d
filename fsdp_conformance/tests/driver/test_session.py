"""The subject's training loop: what it asks, in which order, under which label, and what it notes."""

from __future__ import annotations

import contextlib
import itertools
import unittest
import unittest.mock
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from fsdp_conformance.adapters.sharded import full_copy, local_part
from fsdp_conformance.adapters.vendors.torch_fsdp2 import TorchFSDP2
from fsdp_conformance.checks.streams import same_undisturbed
from fsdp_conformance.driver import recorder, session
from fsdp_conformance.driver.recorder import storage_bytes
from fsdp_conformance.driver.session import plan_for
from fsdp_conformance.driver.task import Conditions, Observer, World
from fsdp_conformance.driver.watch import Watch
from fsdp_conformance.errors import ConfigError, Unsupported
from fsdp_conformance.faults.delay import CollectiveDelay, PointDelay
from fsdp_conformance.faults.fault import Fault
from fsdp_conformance.harness.recording import process_group
from fsdp_conformance.history.collective import Op
from fsdp_conformance.plan import Plan
from fsdp_conformance.tests.adapters.adapter_ranks import RankTestCase
from fsdp_conformance.tests.adapters.adapter_workloads import PLAIN, RICH, Output
from fsdp_conformance.tests.torch_versions import with_fsdp2_on_the_cpu
from fsdp_conformance.workload.definition import Regime
from fsdp_conformance.workload.events import Action, Event, Moment

pytestmark = pytest.mark.slow


class Diary(TorchFSDP2):
    """FSDP2 that writes down what it is asked, with the label of the moment."""

    def __init__(self) -> None:
        self.entries: list[str] = []

    def note(self, what: str) -> None:
        phase, step = process_group.log().label
        self.entries.append(" ".join(str(part) for part in (what, phase, "" if step is None else step) if part != ""))

    def setup(self, *args: Any) -> None:
        self.note("setup")
        super().setup(*args)

    @contextlib.contextmanager
    def microbatch(self, last: bool, *, reduced: bool = True) -> Iterator[None]:
        self.note(f"microbatch(last={last}, reduced={reduced})")
        with super().microbatch(last, reduced=reduced):
            yield
        self.note("microbatch ends")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.note("forward" if self.model.training else "forward in eval mode")
        return super().forward(*args, **kwargs)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.note("backward, graph kept" if retain_graph else "backward")
        super().backward(loss, retain_graph=retain_graph)

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        self.note("step" if max_norm is None else f"step({max_norm})")
        return super().step(max_norm, norm_type=norm_type)

    def full_params(self) -> dict[str, Tensor]:
        self.note("full_params")
        return super().full_params()

    def full_grads(self) -> dict[str, Tensor | None]:
        self.note("full_grads")
        return super().full_grads()

    def drop_grads(self, names: Any) -> None:
        self.note(f"drop_grads({', '.join(names)})")
        super().drop_grads(names)


class SavesBeside(Diary):
    """Begins to save, and has saved when it is waited for."""

    def save_checkpoint(self, directory: Path) -> None:
        self.note("saved")

    def load_checkpoint(self, directory: Path) -> None:
        self.note("loaded")

    def save_checkpoint_async(self, directory: Path) -> Any:
        self.note("begins to save")
        return unittest.mock.Mock(wait=lambda: self.note("has saved"))


class DiaryFault(Fault):
    """Writes into the adapter's diary."""

    def __init__(self, adapter: Diary) -> None:
        super().__init__()
        self.adapter = adapter

    def describe(self) -> str:
        return "a note"

    def prepare(self, model: nn.Module) -> None:
        self.adapter.note(f"prepare {type(model).__name__}")

    def at(self, point: str, step: int) -> None:
        self.adapter.note(f"fault at {point} {step}, installed={self.installed}")


class OneNorm(TorchFSDP2):
    """Clips by the 2-norm only."""

    declines: ClassVar[frozenset[str]] = frozenset({"clip_norm_type"})


class NoGradients(TorchFSDP2):
    """Gradients cannot be read, and no module is exposed."""

    declines: ClassVar[frozenset[str]] = frozenset({"full_grads", "full_buffers"})

    def module(self) -> nn.Module:
        raise NotImplementedError

    def train(self, mode: bool = True) -> None:
        self.model.train(mode)

    def parameters(self) -> dict[str, nn.Parameter]:
        raise NotImplementedError

    def full_params(self) -> dict[str, Tensor]:
        return {name: full_copy(parameter) for name, parameter in self.names.parameters_of(self.model).items()}

    def local_tensors(self) -> dict[str, list[Tensor]]:
        return {"params": [local_part(parameter) for parameter in self.model.parameters()], "optim": []}


class NoBuffers(TorchFSDP2):
    """The adapter does not read buffers, but exposes the module."""

    declines: ClassVar[frozenset[str]] = frozenset({"full_buffers"})


class Plain(TorchFSDP2):
    """Clips by the 2-norm only, and scales no losses."""

    declines: ClassVar[frozenset[str]] = frozenset({"clip_norm_type", "grad_scaler"})


class Failing(TorchFSDP2):
    """Raises in its second step."""

    steps = 0

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        self.steps += 1
        if self.steps == 2:
            raise RuntimeError("tired")
        return super().step(max_norm, norm_type=norm_type)


class UnderWatch(TorchFSDP2):
    """FSDP2 that writes down when its parameters are read."""

    def __init__(self, moments: list[str]) -> None:
        self.moments = moments

    def full_params(self) -> dict[str, Tensor]:
        self.moments.append("full_params")
        return super().full_params()


class Accelerator(Watch):
    """An accelerator, as far as the loop can tell."""

    counts_bytes = True

    def __init__(self, moments: list[str]) -> None:
        self.moments = moments

    def synchronise(self) -> None:
        self.moments.append("synchronised")

    def allocated_bytes(self) -> int:
        self.moments.append("counted")
        return 0


@contextlib.contextmanager
def watched(moments: list[str]) -> Iterator[None]:
    """A loop that writes down when it waits for the device, and when it reads from it."""
    fetched = recorder._fetched

    def fetch(value: Any) -> Any:
        if value and moments[-1:] != ["fetched"]:
            moments.append("fetched")
        return fetched(value)

    with (
        unittest.mock.patch.object(recorder, "watch_for", return_value=Accelerator(moments)),
        unittest.mock.patch.object(recorder, "_fetched", fetch),
    ):
        yield


class Loop(RankTestCase):
    """One run of the loop, looked at from the adapter."""

    def test_order_and_labels(self) -> None:
        """A step goes through its parts in the documented order, each under its label."""
        adapter = Diary()
        regime = Regime(
            steps=1,
            micro_batches=2,
            reduced=(False, True),
            max_norm=0.5,
            eval_before=(0,),
            eval_between=(0,),
            idle_forwards=1,
            gradient_to_none=("head.bias",),
        )
        self.run_training(
            adapter,
            regime=regime,
            faults=[DiaryFault(adapter)],
            observer=Observer(on_setup=lambda seen: adapter.note("on_setup")),
        )

        self.assertEqual(
            [
                "setup setup",
                "prepare Plain setup",
                "on_setup setup",
                "full_params observe",
                "forward in eval mode eval 0",
                "forward forward 0",
                "microbatch(last=False, reduced=False)",
                "forward forward 0",
                "fault at after_loss 0, installed=True",
                "backward backward 0",
                "microbatch ends",
                "microbatch(last=True, reduced=True)",
                "forward forward 0",
                "fault at after_loss 0, installed=True",
                "backward backward 0",
                "microbatch ends",
                "full_grads observe 0",
                "drop_grads(head.bias)",
                "forward in eval mode eval 0",
                "fault at before_step 0, installed=True",
                "step(0.5) step 0",
                "full_params observe 0",
            ],
            adapter.entries,
        )

    @pytest.mark.nightly
    def test_a_save_meanwhile_is_complete_before_the_next_load_and_at_the_end(self) -> None:
        """Training goes on until then."""
        adapter = SavesBeside()
        events = (
            Event(action=Action.SAVE_MEANWHILE, moment=Moment.END, step=0),
            Event(action=Action.LOAD, moment=Moment.END, step=1),
            Event(action=Action.SAVE_MEANWHILE, moment=Moment.END, step=1),
        )
        regime = Regime(steps=3, events=events)
        conditions = Conditions(new_directory=lambda: Path("nowhere"))
        world = World(rank=self.rank, size=self.world_size)
        session.train(adapter, PLAIN, plan_for(PLAIN, regime), regime, world, conditions=conditions)

        noted = [entry for entry in adapter.entries if "sav" in entry or "load" in entry or entry.startswith("step")]
        self.assertEqual(
            [
                "step step 0",
                "begins to save event 0",
                "step step 1",
                "has saved event",
                "loaded event 1",
                "begins to save event 1",
                "step step 2",
                "has saved event",
            ],
            noted,
        )

    @pytest.mark.nightly
    def test_a_training_beside_another_one(self) -> None:
        """Its steps are trained when they are asked for, and neither history has the other's collectives."""
        world = World(rank=self.rank, size=self.world_size)
        plan, regime = plan_for(PLAIN, Regime(steps=2)), Regime(steps=2)
        alone = self.run_training(Diary(), regime=regime)
        second = Diary()
        conditions = Conditions(beside=True)
        with session.training(second, PLAIN, plan, regime, world, conditions=conditions) as steps:
            observer = Observer(after_step=lambda adapter, step: self.assertEqual(step, next(steps)))
            first = self.run_training(Diary(), regime=regime, observer=observer)

        issued, expected_lines = ([record.line() for record in each.collectives] for each in (first, alone))
        self.assertEqual(expected_lines, issued)
        self.assertTrue(steps.history.collectives)
        self.assertTrue(all(record.phase.endswith(" beside") for record in steps.history.collectives))
        for got, other, expected in zip(steps.history.steps, first.steps, alone.steps, strict=True):
            torch.testing.assert_close(got.params, expected.params)
            torch.testing.assert_close(other.params, expected.params)

    @pytest.mark.nightly
    @with_fsdp2_on_the_cpu
    def test_pipelines(self) -> None:
        """Passes come in the order of the regime, each in its micro-batch's context; others are Unsupported."""
        orders = {
            "forwards-first": ["F 0", "F 0", "F 1", "B 0", "B 0", "B 1"],
            "1f1b": ["F 0", "F 0", "B 0", "F 1", "B 0", "B 1"],
        }
        for pipeline, order in orders.items():
            adapter = Diary()
            regime = Regime(steps=1, micro_batches=3, reduced=(False, False, True), pipeline=pipeline)
            self.run_training(adapter, regime=regime)
            passes = [
                f"{'F' if what.startswith('forward') else 'B'} {int('reduced=True' in context)}"
                for context, what in itertools.pairwise(adapter.entries)
                if context.startswith("microbatch(")
            ]
            self.assertEqual(order, passes, pipeline)
            self.assert_trains(TorchFSDP2, regime=replace(regime, steps=2))
        with self.assertRaisesRegex(Unsupported, "pipelined_microbatch"):
            self.run_training("torch-ddp", regime=regime)

    @with_fsdp2_on_the_cpu
    def test_several_backwards(self) -> None:
        """The loss is split in halves; the graph is kept for the second."""
        adapter = Diary()
        self.run_training(adapter, regime=Regime(steps=1, backwards_per_forward=2))
        self.assertEqual(
            ["backward, graph kept backward 0", "backward backward 0"],
            [entry for entry in adapter.entries if entry.startswith("backward")],
        )
        self.assert_trains(TorchFSDP2, regime=Regime(backwards_per_forward=2))

    def test_collectives_of_the_run(self) -> None:
        """All that training issued, each with its step and phase; nothing of reading results, or of runs before."""
        first = self.run_training("torch-fsdp2")
        second = self.run_training("torch-fsdp2")

        self.assertEqual([r.line() for r in first.collectives], [r.line() for r in second.collectives])
        self.assertEqual({"forward", "backward"}, {record.phase for record in second.collectives})
        self.assertEqual([0, 1, 2], sorted({record.step for record in second.collectives if record.step is not None}))
        self.assertGreater(second.collectives[0].seq, first.collectives[-1].seq)
        self.assertIn("observe", {record.phase for record in process_group.log().records})

    def test_histories_alias_nothing(self) -> None:
        """The record of a step does not change in later steps."""
        history = self.run_training("torch-fsdp2")
        storages = [
            tensor.data_ptr()
            for record in history.steps
            for tensors in (record.params, {k: v for k, v in (record.grads or {}).items() if v is not None})
            for tensor in tensors.values()
        ]
        self.assertEqual(len(storages), len(set(storages)))
        self.assertEqual(["cpu"], sorted({tensor.device.type for record in history.steps for tensor in record.losses}))

    def test_what_else_is_noted(self) -> None:
        """Flags, buffers of every step, outputs with their structure, and eval outputs."""
        regime = Regime(steps=2, keep_outputs=True, eval_before=(1,))
        history = self.run_training("torch-fsdp2", RICH, regime)

        for flags in (history.requires_grad, history.final_requires_grad):
            self.assertEqual([False, False], [flags[f"frozen.{key}"] for key in ("weight", "bias")])
        self.assertEqual([1, 2], [int(record.buffers["count"]) for record in history.steps])
        self.assertEqual(0, int(history.initial_buffers["count"]))
        self.assertIsInstance(history.steps[0].outputs[0], Output)
        self.assertFalse(history.steps[0].outputs[0].logits.requires_grad)
        self.assertIsInstance(history.eval_outputs[0], Output)
        self.assertGreater(history.seconds, 0)

    @with_fsdp2_on_the_cpu
    def test_what_an_adapter_cannot_show(self) -> None:
        """No gradients, no buffers, no flags: the history leaves them out and has the rest."""
        history = self.assert_trains(NoGradients, RICH)
        self.assertIsNone(history.steps[0].grads)
        self.assertEqual(({}, {}), (history.steps[0].buffers, history.requires_grad))
        self.assertFalse(history.shows_buffers)

    @with_fsdp2_on_the_cpu
    def test_buffers_are_read_from_the_module(self) -> None:
        """An adapter that does not read them itself cannot hide them."""
        history = self.assert_trains(NoBuffers, RICH)
        self.assertTrue(history.shows_buffers)
        self.assertEqual([1, 2, 3], [int(record.buffers["count"]) for record in history.steps])
        self.assertEqual(0, int(history.initial_buffers["count"]))

    def test_unobserved(self) -> None:
        """For timing: losses of every step and the parameters at the end, and nothing is gathered in between."""
        adapter = Diary()
        history = session.train(
            adapter,
            PLAIN,
            plan_for(PLAIN, Regime()),
            Regime(),
            World(rank=self.rank, size=2),
            conditions=Conditions(observe=False),
        )
        self.assertEqual([True, True, False], [record.params == {} for record in history.steps])
        self.assertEqual(2, len([entry for entry in adapter.entries if entry.startswith("full_params")]))
        self.assertEqual([], [entry for entry in adapter.entries if entry.startswith("full_grads")])

    def test_undisturbed(self) -> None:
        """Nothing waits for the device, reads from it or counts on it before the end; the numbers are the same."""
        regime = Regime(micro_batches=2, max_norm=0.5)
        usual = self.run_training(TorchFSDP2, RICH, regime)
        moments: list[str] = []
        with watched(moments):
            plan = plan_for(RICH, regime, Plan())
            plain = session.train(
                UnderWatch(moments),
                RICH,
                plan,
                regime,
                World(rank=self.rank, size=self.world_size),
                Observer(after_step=lambda adapter, step: moments.append(f"step {step}")),
                Conditions(undisturbed=True),
            )
        self.assertEqual(["full_params", "step 0", "step 1", "fetched", "full_params", "step 2"], moments)
        self.assertEqual([[2, 2, 2]] * 2, [[len(record.losses) for record in run.steps] for run in (usual, plain)])
        result = same_undisturbed(usual, plain, "R075")
        self.assertEqual([], result.findings)
        self.assertEqual(6 + len(usual.steps[-1].params), result.count.comparisons)
        self.assertEqual([], plain.memory)
        # An ordinary run does wait, read and count.
        with watched(moments):
            self.run_training(TorchFSDP2, RICH, regime)
        self.assertLessEqual({"synchronised", "counted", "fetched"}, set(moments))

    def test_an_exception_passes_and_faults_are_taken_out(self) -> None:
        """An exception of the implementation reaches the case; nothing stays installed."""
        adapter = Failing()
        fault = PointDelay("after_loss", ranks=[1], milliseconds=1)
        with self.assertRaisesRegex(RuntimeError, "tired"):
            self.run_training(adapter, faults=[fault])
        self.assertFalse(fault.installed)

    @pytest.mark.nightly
    @with_fsdp2_on_the_cpu
    def test_delays_change_nothing(self) -> None:
        """Delays strike where they are meant to, and the numbers stay."""
        faults: list[Fault] = [
            CollectiveDelay(Op.REDUCE_SCATTER, ranks=[1], milliseconds=2),
            PointDelay("before_step", ranks=[0], milliseconds=2),
        ]
        history = self.run_training("torch-fsdp2", faults=faults)
        self.assertEqual([], self.divergences(history))
        self.assertEqual([], [phrase for fault in faults for phrase in fault.silent(self.rank)])

    def test_regimes_that_cannot_be_followed(self) -> None:
        """An optimizer that the workload does not have, another norm than the adapter's, and loss scaling."""
        with self.assertRaisesRegex(ConfigError, "optimizer must be one of adam, adamw, sgd, got 'lion'"):
            self.run_training("torch-fsdp2", regime=Regime(optimizer="lion"))
        with self.assertRaisesRegex(Unsupported, "clip_norm_type"):
            self.run_training(OneNorm, regime=Regime(max_norm=1.0, norm_type=1.0))
        with self.assertRaisesRegex(Unsupported, "grad_scaler"):
            self.run_training(Plain(), regime=Regime(init_scale=4.0))

    def test_losses_are_scaled(self) -> None:
        """The scale after each step is recorded, and scaled gradients are not; the losses are the user's own."""
        plain = self.run_training(Diary())
        adapter = Diary()
        scaled = self.run_training(adapter, regime=Regime(init_scale=4.0, growth_interval=2))
        scales = [float(record.loss_scale) for record in scaled.steps if record.loss_scale is not None]
        self.assertEqual([4.0, 8.0, 8.0], scales)
        self.assertEqual([None] * 3, [record.grads for record in scaled.steps])
        self.assertNotIn("full_grads", adapter.entries)
        for got, expected in zip(scaled.steps, plain.steps, strict=True):
            torch.testing.assert_close(got.losses, expected.losses)
            torch.testing.assert_close(got.params, expected.params)


class Parts(unittest.TestCase):
    """Tests that need no ranks."""

    def test_plan_for(self) -> None:
        """The workload's structure and the regime's demands are put into a plan; what the plan names stays."""
        regime = Regime(micro_batches=3, reduced=(False, True, True), max_norm=2.0)
        workload = replace(PLAIN, local_units=("head",))

        plan = plan_for(workload, regime)
        self.assertEqual(
            (("body.0", "body.2", "body"), ("head",), 3, 4, True, 2.0),
            (
                plan.units,
                plan.local_units,
                plan.micro_batches,
                plan.micro_batch_size,
                plan.defer_reduction,
                plan.max_norm,
            ),
        )
        self.assertEqual(("head",), plan_for(workload, Regime(), Plan(units=("head",))).units)
        self.assertEqual((), plan_for(workload, Regime(), Plan(auto_wrap="size:10")).units)
        self.assertFalse(plan_for(workload, Regime(micro_batches=2)).defer_reduction)

    def test_storage_bytes(self) -> None:
        """Each storage counts once and whole, views of one buffer do not add up, and empty ones count nothing."""
        buffer = torch.zeros(10)
        self.assertEqual(40, storage_bytes([buffer[:3], buffer[3:], buffer.view(2, 5)]))
        self.assertEqual(48, storage_bytes([buffer, torch.zeros(1, dtype=torch.float64)]))
        self.assertEqual(0, storage_bytes([torch.empty(0), torch.empty(0)]))
