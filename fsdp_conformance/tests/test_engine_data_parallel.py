"""The engine's data-parallel mode trains as torch's does, bit for bit, and where that goes wrong silently, rightly."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.distributed_c10d import _get_default_group
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from fsdp_conformance.adapters import session
from fsdp_conformance.adapters.reference_data_parallel import ReferenceDataParallel
from fsdp_conformance.checks.reference_all_reduce import all_reduce_reference
from fsdp_conformance.checks.reference_ddp import ddp_absence, ddp_reference
from fsdp_conformance.config import Plan
from fsdp_conformance.engine.data_parallel import DataParallel
from fsdp_conformance.engine.errors import ParameterReplaced, ReductionUnfinished, StructureMismatch
from fsdp_conformance.errors import ConfigError, Unsupported
from fsdp_conformance.fixtures.registry import workload_by_name, workload_names
from fsdp_conformance.harness.collective_log import log
from fsdp_conformance.history.collective import Op
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.tests.reducer_ranks import Coded, ReducerTestCase, code, coded, mean_code, pattern
from fsdp_conformance.workload import Regime, Workload

#: Options of the wrapper under which everything must stay the same.
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"gradient_as_bucket_view": True},
    {"bucket_cap_mb": 0.0},
    {"bucket_cap_mb": (0.0001, 0.001)},
)


class _WithoutSearch(ReferenceDataParallel):
    """As a user wraps a model without unused parameters."""

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        return DataParallel(model, broadcast_buffers=False, **plan.extra)


class ParityTestCase(ReducerTestCase):
    """Trains workloads with the engine and with torch's DistributedDataParallel, and compares what both leave."""

    case_timeout_s = 240.0

    def engine_run(
        self, workload: Workload, regime: Regime, options: dict[str, Any], *, search: bool = True
    ) -> TrainingHistory:
        adapter = ReferenceDataParallel() if search else _WithoutSearch()
        plan = session.plan_for(workload, regime, Plan(extra=options))
        history = session.train(adapter, workload, plan, regime, rank=self.rank, world_size=self.world_size)
        adapter.close()
        return history

    def reference_run(self, workload: Workload, regime: Regime) -> TrainingHistory:
        """DistributedDataParallel, or where that is no reference, explicit all-reduces."""
        reference = all_reduce_reference if ddp_absence(workload, regime) else ddp_reference
        return reference(workload, regime, rank=self.rank, world_size=self.world_size)

    def assert_bitwise(
        self, workload: Workload, regime: Regime | None = None, options: Sequence[dict[str, Any]] = OPTIONS
    ) -> None:
        """Losses, gradients, parameters and buffers of every step equal the reference's."""
        regime = regime or Regime()
        expected = self.reference_run(workload, regime)
        for option in options:
            found = self.engine_run(workload, regime, option)
            self.assertEqual(expected.requires_grad, found.requires_grad)
            compared = 0
            for mine, theirs in zip(found.steps, expected.steps, strict=True):
                place = f"{workload.name} {option} {regime} step {mine.step}"
                for what, got, wanted in (
                    ("loss", dict(enumerate(mine.losses)), dict(enumerate(theirs.losses))),
                    ("gradient", mine.grads or {}, theirs.grads or {}),
                    ("parameter", mine.params, theirs.params),
                    ("buffer", mine.buffers, theirs.buffers),
                ):
                    self.assertEqual(wanted.keys(), got.keys(), f"{place} {what}")
                    for name, tensor in wanted.items():
                        other = got[name]  # type: ignore[index]
                        compared += 1
                        if tensor is None or other is None:
                            self.assertIs(tensor, other, f"{place} {what} {name}")
                        else:
                            self.assertTrue(torch.equal(tensor, other), msg=f"{place} {what} {name} differs")
            self.assertGreaterEqual(compared, 3)


def exact_workloads() -> list[Workload]:
    """The exact probes."""
    return [workload for workload in map(workload_by_name, workload_names()) if workload.exact]


class TwoRanks(ParityTestCase):
    """Sums of two commute: every workload is bitwise, exact or not."""

    def test_every_workload(self) -> None:
        """Models of the field and exact probes, all options for the probes."""
        self.assertGreater(len(workload_names()), 30)
        for name in workload_names():
            workload = workload_by_name(name)
            self.assert_bitwise(workload, options=OPTIONS if workload.exact else OPTIONS[:2])

    def test_accumulation(self) -> None:
        """Micro-batches reduced each, deferred, and in any interleaving."""
        workload = workload_by_name("exact-accumulation")
        for reduced in ((True, True, True), (False, False, True), (False, True, True), (True, False, True)):
            self.assert_bitwise(workload, Regime(micro_batches=3, reduced=reduced))
        for name in ("transformer", "exact-unused", "exact-divergent"):
            regime = Regime(micro_batches=2, reduced=(False, True), unused_parameters=True)
            self.assert_bitwise(workload_by_name(name), regime)

    def test_other_regimes(self) -> None:
        """Adam, clipping, evaluation, forwards without backward, dropped gradients, freezing, two backwards."""
        frozen = ((1, ("stages.0.linear.weight", "stages.1.linear.bias")), (2, ("stages.2.linear.weight",)))
        for regime in (
            Regime(optimizer="adam"),
            Regime(max_norm=0.1),
            Regime(eval_before=(1, 2), eval_between=(1,)),
            Regime(idle_forwards=2),
            Regime(gradient_to_none=("stages.1.linear.weight",)),
            Regime(frozen_at=frozen, unused_parameters=True),
            Regime(frozen_at=frozen, micro_batches=2, reduced=(False, True), unused_parameters=True),
            Regime(backwards_per_forward=2),
        ):
            self.assert_bitwise(workload_by_name("exact-long"), regime, OPTIONS[:2])

    def test_without_the_search_for_unused_parameters(self) -> None:
        """And with the order of readiness, which changes after the first step."""
        for name in ("exact-nested", "exact-tied", "exact-multi-forward", "transformer"):
            workload = workload_by_name(name)
            expected = self.reference_run(workload, Regime())
            for option in ({"bucket_cap_mb": 0.0001}, {"static_graph": True}, {"gradient_as_bucket_view": True}):
                found = self.engine_run(workload, Regime(), option, search=False)
                for mine, theirs in zip(found.steps, expected.steps, strict=True):
                    for parameter, value in theirs.params.items():
                        self.assertTrue(torch.equal(value, mine.params[parameter]), msg=f"{name} {option} {parameter}")


class OneRank(ParityTestCase):
    """A world of one is plain training, and nothing is communicated."""

    @property
    def world_size(self) -> int:
        return 1

    def test_exact_probes(self) -> None:
        """Bitwise, without a collective."""
        for workload in exact_workloads():
            self.assert_bitwise(workload, options=OPTIONS[:2])
        begin = self.mark()
        self.engine_run(workload_by_name("exact-nested"), Regime(), {})
        self.assertEqual([], log().records[begin:])


class ThreeRanks(ParityTestCase):
    """An odd world."""

    @property
    def world_size(self) -> int:
        return 3

    def test_exact_probes(self) -> None:
        """Bitwise in every option."""
        for workload in exact_workloads():
            self.assert_bitwise(workload)
        self.assert_bitwise(
            workload_by_name("exact-accumulation"), Regime(micro_batches=3, reduced=(False, False, True)), OPTIONS[:2]
        )


class FourRanks(ParityTestCase):
    """Ring and tree sums differ here, but not for exact values."""

    @property
    def world_size(self) -> int:
        return 4

    def test_exact_probes(self) -> None:
        """Bitwise."""
        for workload in exact_workloads():
            self.assert_bitwise(workload, options=OPTIONS[:2])


class Wrapping(ReducerTestCase):
    """What is checked, sent and refused when a module is wrapped."""

    def test_state_of_the_first_rank(self) -> None:
        """Parameters and buffers of every dtype and layout, from the first rank of the group."""
        module: Any = nn.BatchNorm1d(3)
        module.register_parameter("turned", nn.Parameter((torch.arange(6.0) + self.rank).view(2, 3).t()))
        module.register_parameter("frozen", nn.Parameter(torch.full((2,), 5.0 + self.rank), requires_grad=False))
        module.register_buffer("flags", torch.tensor([self.rank == 0, True]))
        module.register_buffer("complex", torch.tensor([1j + self.rank]))
        module.register_buffer("gone", torch.full((2,), 7.0 + self.rank), persistent=False)
        module.running_mean += self.rank
        DataParallel(module)

        self.assertTrue(torch.equal(torch.arange(6.0).view(2, 3).t(), module.turned))
        self.assertEqual([5.0, 5.0], module.frozen.tolist())
        self.assertEqual([True, True], module.flags.tolist())
        self.assertEqual([1j], module.complex.tolist())
        self.assertEqual([7.0, 7.0], module.gone.tolist())
        self.assertEqual([0.0] * 3, module.running_mean.tolist())

    def test_parameters_that_differ_raise_on_every_rank(self) -> None:
        """The reference raises on rank 1 alone, and rank 0 hangs."""
        with self.assertRaisesRegex(StructureMismatch, r"rank 1: shape of p1=\(6,\), but should be \(5,\)"):
            DataParallel(Coded([(3,), (5 + self.rank,)]))

    def test_nothing_is_sent_where_that_is_asked(self) -> None:
        """sync_module_states=False: equal parameters are the caller's affair."""
        begin = self.mark()
        model = DataParallel(Coded(), sync_module_states=False)
        self.assertEqual([], log().records[begin:])
        self.train(model)

        self.assert_means(model)

    def test_a_module_cannot_be_wrapped_twice(self) -> None:
        """Nor can one that is inside of another wrapper."""
        inner = DataParallel(Coded())
        for module in (inner, nn.Sequential(nn.Linear(2, 2), inner), DistributedDataParallel(Coded())):
            with self.assertRaisesRegex(ConfigError, "averages gradients already"):
                DataParallel(module)

    def test_a_container_without_forward(self) -> None:
        """Its wrapper's forward would never run."""
        for container in (nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict({"a": nn.Linear(2, 2)})):
            with self.assertRaisesRegex(ConfigError, "which has no forward, but should have one"):
                DataParallel(container)

    def test_attributes_of_the_module(self) -> None:
        """Data and items are reached; what would compute past the wrapper is not."""
        module = nn.Sequential(nn.Linear(2, 2))
        vars(module).update(id="mine", config={"width": 2}, device="mine too")
        model = DataParallel(module)

        self.assertEqual(("mine", {"width": 2}, "mine too"), (model.id, model.config, model.device))
        self.assertIs(module[0], model[0])
        for name in ("append", "0"):
            with self.assertRaisesRegex(AttributeError, f"{name} of Sequential is called through .module"):
                getattr(model, name)
        with self.assertRaisesRegex(AttributeError, "no attribute 'nothing'"):
            _ = model.nothing

    def test_devices(self) -> None:
        """Parameters on two devices, or without values, are refused with their names; lazy ones too."""
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
        with self.assertRaises(ConfigError) as caught:
            DataParallel(module)
        self.assertIn(
            "parameters are on 2 devices (0.weight, 0.bias on cpu; 1.weight, 1.bias on meta)", str(caught.exception)
        )
        self.assertIn("1.weight, 1.bias are on the meta device", str(caught.exception))
        with self.assertRaisesRegex(Unsupported, "weight, bias have no shape yet"):
            DataParallel(nn.LazyLinear(3))
        with self.assertRaisesRegex(ConfigError, "device_id=3, but should be a torch.device"):
            DataParallel(Coded(), device_id=3)

    def test_options_out_of_range(self) -> None:
        """All of a kind in one error."""
        with self.assertRaisesRegex(ConfigError, "bucket_cap_mb=-1"):
            DataParallel(Coded(), bucket_cap_mb=-1)
        with self.assertRaisesRegex(ConfigError, r"ignored_names=\['nobody'\]"):
            DataParallel(Coded(), ignored_names=["nobody", "p0"])

    def test_bucket_limits_in_mib(self) -> None:
        """One number holds for every bucket, the first included; several one after the other."""
        mib = 1024 * 1024
        module = Coded([(mib // 4,)] * 4)
        names = [DataParallel(module, bucket_cap_mb=caps).reducer.bucket_names for caps in (None, 1, (2, 1), 0.5)]

        self.assertEqual(
            [
                [["p3"], ["p2", "p1", "p0"]],
                [["p3"], ["p2"], ["p1"], ["p0"]],
                [["p3", "p2"], ["p1"], ["p0"]],
                [["p3"], ["p2"], ["p1"], ["p0"]],
            ],
            names,
        )

    def test_ignored_names(self) -> None:
        """They are neither sent nor averaged."""
        module = Coded()
        with torch.no_grad():
            module.p1.fill_(float(self.rank))
        model = DataParallel(module, ignored_names=["p1"])
        self.train(model)

        self.assertEqual([float(self.rank)] * 5, module.p1.tolist())
        self.assert_mean(module.p1, code(self.rank))
        self.assert_mean(module.p0)

    def test_a_module_without_trainable_parameters(self) -> None:
        """It runs, and nothing is communicated in training; the reference refuses it."""
        for module in (nn.Flatten(), nn.Linear(2, 2).requires_grad_(False)):
            model = DataParallel(module)
            begin = self.mark()
            x = torch.ones(1, 2, requires_grad=True)
            model(x).sum().backward()

            self.assertEqual([], log().records[begin:])
            self.assertIsNotNone(x.grad)

    def test_in_a_group_of_its_own(self) -> None:
        """Means are those of the group, also for a group whose first rank is not 0."""
        groups = [dist.new_group([rank]) for rank in range(2)]
        model = DataParallel(Coded(), groups[self.rank])
        self.train(model)

        self.assert_mean(coded(model).p0, code(self.rank))


@dataclass
class _Output:
    logits: Tensor
    extra: dict[str, Any]


class _Branches(nn.Module):
    """Two linear layers and an output for each, in a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.left, self.right = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor, *, with_right: bool = True) -> _Output:
        right = self.right(x) if with_right else None
        return _Output(self.left(x), {"right": [right], "detached": x.detach(), "number": 3})


class Iterations(ReducerTestCase):
    """What forwards and backwards a user may run."""

    def _inputs(self, step: int = 0) -> Tensor:
        return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + self.rank))

    def test_nested_outputs(self) -> None:
        """A dataclass passes unchanged; parameters behind its tensors are found, also where a branch is not taken."""
        model = DataParallel(_Branches(), find_unused_parameters=True)
        assert isinstance(model.module, _Branches)
        for step, with_right in enumerate((True, self.rank == 0, False, True)):
            output = model(self._inputs(step), with_right=with_right)
            self.assertIs(_Output, type(output))
            self.assertEqual(3, output.extra["number"])
            right = output.extra["right"][0]
            loss = output.logits.sum() if right is None else output.logits.sum() + right.sum()
            loss.backward()
            grads = [None if p.grad is None else p.grad.tolist() for p in model.parameters()]
            first, second = self.on_every_rank(grads)
            self.assertEqual(first, second)
            self.assertEqual(step == 2, model.module.right.weight.grad is None)
            model.zero_grad()

    def test_a_backward_for_each_output(self) -> None:
        """Both branches are averaged, with outputs that need no gradient among them."""
        model = DataParallel(_Branches())
        for step in range(3):
            output = model(self._inputs(step))
            output.logits.sum().backward()
            output.extra["right"][0].square().sum().backward()
            found = self.on_every_rank([p.grad.tolist() for p in model.parameters() if p.grad is not None])
            self.assertEqual(4, len(found[0]))
            self.assertEqual(found[0], found[1])
            model.zero_grad()

    def test_forwards_without_a_graph(self) -> None:
        """Under no_grad and in inference mode, before and between iterations, also after a bad one."""
        model = DataParallel(Coded(), broadcast_buffers=False)
        begin = self.mark()
        for step in range(3):
            with torch.no_grad():
                model(1.0)
            with torch.inference_mode():
                model(1.0)
            self.train(model, step)
            self.assert_means(model, step=step)
            model.zero_grad()
        self.assertEqual(3, len(self.since(begin)))

        self.train(model, use=(0, 1))
        with torch.no_grad():
            model(1.0)
        with self.assertRaises(ReductionUnfinished):
            model(1.0)

    def test_inside_of_a_checkpoint(self) -> None:
        """The wrapper's forward runs again in backward: gradients are averaged once, and the same."""
        gradients = []
        for reentrant in (None, False, True):
            model = DataParallel(_Branches(), bucket_cap_mb=0)
            for step in range(3):
                x = self._inputs(step).requires_grad_()

                def loss(x: Tensor, model: DataParallel = model) -> Tensor:
                    output = model(x)
                    value: Tensor = output.logits.square().sum() + output.extra["right"][0].sum()
                    return value

                begin = self.mark()
                value: Any = loss(x) if reentrant is None else checkpoint(loss, x, use_reentrant=reentrant)
                value.backward()
                self.assertEqual(4, len(self.since(begin)))
                gradients.append([p.grad.tolist() for p in model.parameters() if p.grad is not None])
                model.zero_grad()

        self.assertEqual(4, len(gradients[0]))
        self.assertEqual(gradients[:3], gradients[3:6])
        self.assertEqual(gradients[:3], gradients[6:])

    def test_deferral_ends_with_its_block(self) -> None:
        """Also when an exception ends it; blocks nest."""
        model = DataParallel(Coded())
        with self.assertRaises(ZeroDivisionError), model.no_sync():
            self.train(model, step=self.rank // 0)
        with model.no_sync():
            with model.no_sync():
                self.train(model)
            self.train(model)
        self.assert_mean(coded(model).p0, 2 * code(self.rank))
        self.train(model)

        for parameter in model.parameters():
            self.assert_mean(parameter, 3 * mean_code(2))

    def test_after_an_exception(self) -> None:
        """In forward or in backward, on every rank: the next iteration is right."""
        model = DataParallel(Coded())
        self.train(model)
        model.zero_grad()
        with self.assertRaises(TypeError):
            model("not a number")
        for failing in ("p3", "p0"):
            output = model(code(self.rank))
            handle = model.module.get_parameter(failing).register_hook(_raise)
            with self.assertRaisesRegex(RuntimeError, "on purpose"):
                output.backward()
            handle.remove()
            model.zero_grad()
            self.train(model, 3)
            self.assert_means(model, step=3)
            model.zero_grad()

    def test_communication_hook(self) -> None:
        """Registered on the wrapper, it stays when the reducer is made anew."""
        model = DataParallel(Coded())
        model.register_comm_hook(_get_default_group(), default_hooks.fp16_compress_hook)
        self.train(model)
        self.assert_means(model)
        model.zero_grad()
        begin = self.mark()
        coded(model).p2.requires_grad_(False)
        self.train(model, 1)

        self.assert_mean(coded(model).p0, step=1)
        self.assertEqual([2 * (3 + 5 + 11)], self.since(begin))

    def test_inputs_are_moved_where_a_device_is_named(self) -> None:
        """Nested inputs arrive as they were."""
        model = DataParallel(nn.Identity(), device_id=torch.device("cpu"))
        x = torch.ones(2)
        output = model({"a": [x, "text"]})

        self.assertEqual("text", output["a"][1])
        self.assertTrue(torch.equal(x, output["a"][0]))


class Changes(ReducerTestCase):
    """What may change between iterations."""

    def test_freezing_and_thawing(self) -> None:
        """A frozen parameter has no gradient; a thawed one is averaged, which the reference leaves local."""
        for find_unused in (False, True):
            module = Coded()
            module.p1.requires_grad_(False)
            model = DataParallel(module, find_unused_parameters=find_unused)
            for step, frozen in enumerate(({1}, set(), {0, 2}, {3}, set())):
                for index in range(4):
                    module.get_parameter(f"p{index}").requires_grad_(index not in frozen)
                self.train(model, step)
                for index in range(4):
                    parameter = module.get_parameter(f"p{index}")
                    if index in frozen:
                        self.assertIsNone(parameter.grad)
                    else:
                        self.assert_mean(parameter, step=step)
                model.zero_grad()

    def test_freezing_what_has_not_been_reduced(self) -> None:
        """Gradients that were deferred before their parameter was frozen are reduced all the same, and only once."""
        for find_unused in (False, True):
            module = Coded()
            model = DataParallel(module, find_unused_parameters=find_unused)
            self.train(model, sync=False)
            module.p1.requires_grad_(False)
            self.train(model)
            self.assert_mean(module.p1)
            self.assert_mean(module.p0, 2 * mean_code(2))
            model.zero_grad()
            self.train(model, 1)

            self.assertIsNone(module.p1.grad)
            self.assert_mean(module.p0, step=1)
            self.assertNotIn("p1", [name for names in model.reducer.bucket_names for name in names])

    def test_freezing_does_not_hide_an_unfinished_reduction(self) -> None:
        """What a backward left undone is said although the reducer is to be made anew."""
        module = Coded()
        model = DataParallel(module)
        self.train(model, use=(0, 1))
        module.p3.requires_grad_(False)
        with self.assertRaisesRegex(ReductionUnfinished, r"p2 \(index 2\)"):
            model(1.0)

    def test_ranks_that_freeze_differently_are_told(self) -> None:
        """Both changed something, but not the same."""
        module = Coded()
        model = DataParallel(module)
        module.get_parameter(f"p{self.rank}").requires_grad_(False)
        with self.assertRaisesRegex(StructureMismatch, "requires_grad of p0=True, but should be False"):
            model(1.0)

    def test_cast(self) -> None:
        """In between, on the wrapper or on the module inside: gradients have the new dtype, and are averaged in it."""
        for find_unused in (False, True):
            model = DataParallel(Coded(), find_unused_parameters=find_unused)
            self.train(model)
            self.assert_means(model)
            model.zero_grad()
            model.double()
            self.train(model, 1)
            self.assertEqual({torch.float64}, {p.grad.dtype for p in model.parameters() if p.grad is not None})
            self.assert_means(model, step=1)
            model.zero_grad()
            model.module.float()
            self.train(model, 2)
            self.assert_means(model, step=2)

    def test_one_rank_moves_its_model_away_and_back(self) -> None:
        """As to save it: nothing is communicated, and training goes on."""
        model = DataParallel(Coded())
        self.train(model)
        model.zero_grad()
        begin = self.mark()
        if self.rank == 0:
            model.to(torch.float64).to(torch.float32)
            model.cpu()
        self.assertEqual([], log().records[begin:])
        self.train(model, 1)

        self.assert_means(model, step=1)

    def test_a_parameter_that_was_replaced(self) -> None:
        """Its gradient would stay local: the next forward says so."""
        model = DataParallel(Coded())
        coded(model).p1 = nn.Parameter(torch.zeros(5))
        with self.assertRaisesRegex(ParameterReplaced, "p1 is another parameter than the one that was wrapped"):
            model(1.0)

    def test_wrapped_again_after_training(self) -> None:
        """The module is averaged once, by the newer wrapper; the older one refuses."""
        older = DataParallel(Coded())
        self.train(older)
        older.zero_grad()
        newer = DataParallel(older.module)
        begin = self.mark()
        self.train(newer, 1)

        self.assert_means(newer, step=1)
        self.assertEqual(1, len(self.since(begin)))
        with self.assertRaisesRegex(RuntimeError, "another one has taken over"):
            older(1.0)


class Copies(ReducerTestCase):
    """Copies of a wrapper train by themselves."""

    def test_deep_copy(self) -> None:
        """One rank may make it alone; it averages its own parameters, and the original its own."""
        begin = self.mark()
        model = DataParallel(Coded(), find_unused_parameters=True)
        self.train(model)
        model.eval()
        setup = self.mark()
        duplicate = copy.deepcopy(model)
        self.assertEqual([], log().records[setup:])
        self.assertGreater(setup, begin)
        self.assertFalse(duplicate.training)
        duplicate.zero_grad()
        model.zero_grad()
        self.train(duplicate, 1)
        self.assertIsNone(coded(model).p0.grad)
        self.assert_means(duplicate, step=1)
        self.train(model, 2)

        self.assert_means(model, step=2)
        self.assert_means(duplicate, step=1)
        self.assertTrue(duplicate.reducer.config.find_unused_parameters)

    def test_pickle(self) -> None:
        """It comes back on the default group."""
        model = DataParallel(nn.Linear(3, 2), bucket_cap_mb=(1, 2))
        again = pickle.loads(pickle.dumps(model))
        self.assertEqual(model.reducer.config, again.reducer.config)
        self.assertTrue(torch.equal(model.module.weight, again.module.weight))  # type: ignore[arg-type]
        again(torch.full((1, 3), code(self.rank))).sum().backward()

        self.assertEqual([mean_code(2)] * 3, again.module.weight.grad[0].tolist())

    def test_what_cannot_be_copied(self) -> None:
        """A shallow copy, a pickle of another group, and a hook's state."""
        model = DataParallel(Coded())
        with self.assertRaisesRegex(Unsupported, "two wrappers cannot share one module"):
            copy.copy(model)
        other = DataParallel(Coded(), dist.new_group([0, 1]))
        with self.assertRaisesRegex(Unsupported, "another group than the default one"):
            pickle.dumps(other)
        self.assertIs(other.process_group, copy.deepcopy(other).process_group)
        model.register_comm_hook(None, default_hooks.allreduce_hook)
        with self.assertRaisesRegex(Unsupported, "a communication hook cannot be copied"):
            copy.deepcopy(model)

    def test_state_dict(self) -> None:
        """It has the names that DistributedDataParallel gives, and each loads the other's."""
        model, reference = DataParallel(nn.Linear(2, 2)), DistributedDataParallel(nn.Linear(2, 2))
        self.assertEqual(list(reference.state_dict()), list(model.state_dict()))
        file = io.BytesIO()
        torch.save(reference.state_dict(), file)
        file.seek(0)
        model.load_state_dict(torch.load(file, weights_only=True))

        self.assertTrue(torch.equal(reference.module.weight, model.module.weight))  # type: ignore[arg-type]


class Buffers(ReducerTestCase):
    """Buffers of the first rank, before forwards that follow a synchronised one."""

    class _Counting(nn.Module):
        """A buffer that each forward moves on, by a step of the rank's own; its value reaches the output."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))
            self.register_buffer("seen", torch.zeros(1))
            self.seen: Tensor

        def forward(self, step: float) -> Tensor:
            self.seen += step
            return self.weight * 2 + self.seen

    def _seen(self, kind: type[DataParallel] | type[DistributedDataParallel]) -> list[list[float]]:
        """What the buffer is after each of some forwards, on this rank."""
        model = kind(self._Counting())
        step, seen = 1.0 + self.rank, []
        for action in ("train", "train", "defer", "defer", "train", "eval", "eval", "train", "train", "idle", "train"):
            if action == "eval":
                with torch.no_grad():
                    model(step)
            elif action == "defer":
                with model.no_sync():
                    model(step).backward()
            elif action == "idle":
                model(step)
            else:
                model(step).backward()
            seen.append([float(value) for value in model.module.seen])  # type: ignore[union-attr]
        return seen

    def test_as_the_reference_does(self) -> None:
        """Trained, deferred, evaluated, and forwards without backward: equal after each."""
        self.assertEqual(self._seen(DistributedDataParallel), self._seen(DataParallel))

    def test_two_forwards_before_their_backwards(self) -> None:
        """The second one's broadcast does not spoil what the first one's graph has saved."""
        module = nn.BatchNorm1d(3)
        model = DataParallel(module)
        outputs = [model(torch.randn(4, 3)) for _ in range(2)]
        for output in outputs:
            output.square().sum().backward()

        first, second = self.on_every_rank(module.weight.grad.tolist())  # type: ignore[union-attr]
        self.assertEqual(first, second)

    def test_left_alone_where_that_is_asked(self) -> None:
        """Each rank keeps its own."""
        module = self._Counting()
        model = DataParallel(module, broadcast_buffers=False)
        for _ in range(3):
            model(1.0 + self.rank).backward()

        self.assertEqual([3.0 * (1 + self.rank)], module.seen.tolist())

    def test_a_buffer_that_forward_replaces(self) -> None:
        """What is sent is what is registered at that time."""
        module = self._Counting()
        model = DataParallel(module)
        model(1.0 + self.rank).backward()
        module.seen = module.seen * 10
        model(0.0).backward()

        self.assertEqual([10.0], module.seen.tolist())


class Joining(ReducerTestCase):
    """Ranks with different numbers of inputs."""

    def test_zeros_of_a_rank_that_has_joined(self) -> None:
        """Rank 0 has one input less: in the third iteration its gradient counts as zero, and the step is shared."""
        for kind in ({}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"static_graph": True}):
            module = Coded()
            model = DataParallel(module, **kind)  # type: ignore[arg-type]
            inputs = 2 + self.rank
            seen = []
            with model.join():
                for step in range(inputs):
                    self.train(model, step)
                    assert module.p1.grad is not None
                    seen.append(float(module.p1.grad[0]))
                    with torch.no_grad():
                        for parameter in module.parameters():
                            assert parameter.grad is not None
                            parameter.sub_(parameter.grad)
                    model.zero_grad()

            expected = [mean_code(2), mean_code(2, 1), code(1, 2) / 2]
            self.assertEqual(expected[:inputs], seen, str(kind))
            # Both have the model of the rank that left last.
            for parameter in module.parameters():
                self.assertTrue(torch.equal(pattern(parameter.shape) * -sum(expected), parameter.detach()))

    def test_division_by_the_ranks_that_are_left(self) -> None:
        """divide_by_initial_world_size=False: rank 1 alone keeps its own gradient."""
        module = Coded()
        model = DataParallel(module)
        with model.join(divide_by_initial_world_size=False):
            for step in range(2 + self.rank):
                self.train(model, step)
                if step == 2:
                    self.assert_mean(module.p0, code(1, 2))
                else:
                    self.assert_mean(module.p0, step=step)
                model.zero_grad()
        # Outside of the context the size of the group counts again, and nobody is asked any more.
        begin = self.mark()
        self.train(model)
        self.assert_means(model)
        self.assertEqual(1, len(log().records[begin:]))

    def test_a_rank_without_any_input(self) -> None:
        """The first rank, whose order of readiness nobody has seen: buckets are rebuilt all the same."""
        module = Coded()
        model = DataParallel(module, bucket_cap_mb=0)
        with model.join():
            for step in range(4 * self.rank):
                self.train(model, step)
                self.assert_mean(module.p3, code(1, step) / 2)
                model.zero_grad()

        self.assertTrue(all(self.on_every_rank(model.reducer.rebuilt)))
        for step in range(2):
            self.train(model, step)
            self.assert_means(model, step=step)
            model.zero_grad()

    def test_a_static_graph_that_one_rank_never_saw(self) -> None:
        """It learns it when its own turn comes, without asking the others again."""
        module = Coded()
        model = DataParallel(module, static_graph=True)
        with model.join():
            for step in range(2 * self.rank):
                self.train(model, step, use=(0, 1, 2))
                self.assert_mean(module.p0, code(1, step) / 2)
                model.zero_grad()
        for step in range(3):
            self.train(model, step, use=(0, 1, 2))
            self.assert_mean(module.p2, step=step)
            self.assertIsNone(module.p3.grad)
            model.zero_grad()

    def test_deferral_and_evaluation(self) -> None:
        """Iterations without a reduction are shadowed as such, and buffers are those of a rank with inputs."""
        module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        model = DataParallel(module, bucket_cap_mb=0)
        draw = torch.Generator().manual_seed(self.rank)
        with model.join():
            for step in range(2 + 3 * self.rank):
                x = torch.randn(4, 2, generator=draw)
                if step % 2:
                    with torch.no_grad():
                        model(x)
                if step % 3 == 1:
                    with model.no_sync():
                        model(x).square().sum().backward()
                else:
                    model(x).square().sum().backward()
                    model.zero_grad()

        states = self.on_every_rank({name: value.tolist() for name, value in model.state_dict().items()})
        self.assertEqual(states[0], states[1])
        self.assertEqual(5 + 2, int(model.state_dict()["module.1.num_batches_tracked"]))

    def test_communication_hook_and_sparse_gradients(self) -> None:
        """A rank that has joined runs the hook on zeros, and gathers nothing."""
        module = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 1))
        model = DataParallel(module)
        with model.join():
            for _ in range(1 + 2 * self.rank):
                model(torch.tensor([1, 3])).sum().backward()
        for parameter in module.parameters():
            assert parameter.grad is not None
            self.assertTrue(bool(parameter.grad.to_dense().abs().sum() > 0))
        hooked = DataParallel(Coded())
        hooked.register_comm_hook(_get_default_group(), default_hooks.allreduce_hook)
        with hooked.join():
            for step in range(1 + 2 * self.rank):
                hooked.zero_grad()
                self.train(hooked, step)
        if self.rank == 1:
            self.assert_mean(coded(hooked).p0, code(1, 2) / 2)

    def test_early_end_for_all(self) -> None:
        """throw_on_early_termination: every rank raises when the first has no inputs left."""
        model = DataParallel(Coded())
        with self.assertRaisesRegex(RuntimeError, "exhausted"), model.join(throw_on_early_termination=True):
            for step in range(1 + 2 * self.rank):
                self.train(model, step)

    def test_beside_other_joinables(self) -> None:
        """Behind one that gets the context's notice in its place, and before a sharded optimizer."""
        model = DataParallel(Coded())
        first = _Silent()
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=1.0)
        with Join([first, model, optimizer], divide_by_initial_world_size=False):
            for step in range(1 + self.rank):
                Join.notify_join_context(first)
                self.train(model, step)
                self.assert_mean(coded(model).p0, code(1, 1) if step else mean_code(2))
                optimizer.step()
                optimizer.zero_grad()

        # The optimizer updates in the last step what rank 1 holds the state of; the model is rank 1's on both.
        states = self.on_every_rank([parameter.tolist() for parameter in model.parameters()])
        self.assertEqual(states[0], states[1])
        self.assertIn(-(mean_code(2) + code(1, 1)), [values[0] for values in states[0]])

    def test_freezing_is_refused_inside(self) -> None:
        """A rank that has joined could not follow."""
        model = DataParallel(Coded())
        with self.assertRaisesRegex(Unsupported, "frozen_dynamic"), model.join():
            self.train(model)
            coded(model).p0.requires_grad_(False)
            self.train(model)

    def test_switched_off(self) -> None:
        """enable=False costs nothing."""
        model = DataParallel(Coded())
        begin = self.mark()
        with model.join(enable=False):
            self.train(model)

        self.assertEqual([Op.ALL_REDUCE], [record.op for record in log().records[begin:]])


class _Silent(Joinable):
    """Communicates nothing of its own."""

    def __init__(self) -> None:
        super().__init__()

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return JoinHook()

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return _get_default_group()


def _raise(grad: Tensor) -> Tensor:
    raise RuntimeError("on purpose")
