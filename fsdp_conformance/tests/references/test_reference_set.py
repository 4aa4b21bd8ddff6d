"""The references agree with each other on real ranks, for every workload and regime, and report it when they do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from parameterized import parameterized
from torch import nn

from fsdp_conformance.checks import parity
from fsdp_conformance.errors import ConfigError, ReferencesDisagree, SuiteError
from fsdp_conformance.fixtures import drawn, experts, models, norms, probes, shapes, workload_by_name, workload_names
from fsdp_conformance.fixtures.drawn import DrawnBlock, DrawnModel
from fsdp_conformance.harness.testcase import ShardedTrainingTestCase
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.references.all_reduce import all_reduce_reference
from fsdp_conformance.references.ddp import ddp_absence, ddp_reference
from fsdp_conformance.references.loop import CLIP_EPSILON
from fsdp_conformance.references.reference_set import Kind, References, train_references
from fsdp_conformance.references.single_process import contributions, single_process_histories, single_process_reference
from fsdp_conformance.tests.references.reference_runs import damaged, gradient, references_of
from fsdp_conformance.workload.definition import Regime, Workload
from fsdp_conformance.workload.events import Action, Event, Moment

pytestmark = pytest.mark.slow

_REGIMES: dict[str, tuple[str, Regime]] = {
    "deferred": ("exact-accumulation", Regime(micro_batches=3, reduced=(False, False, True))),
    "each reduced": ("exact-accumulation", Regime(micro_batches=3)),
    "interleaved": ("exact-accumulation", Regime(micro_batches=3, reduced=(False, True, True))),
    "two backwards": ("exact-long", Regime(backwards_per_forward=2)),
    "eval and idle": ("exact-nested", Regime(eval_before=(0, 2), eval_between=(1,), idle_forwards=2)),
    "frozen and thawed": ("exact-nested", Regime(steps=4, frozen_at=((1, ("head.weight",)), (3, ())))),
    "dropped gradient": ("exact-nested", Regime(gradient_to_none=("stages.0.linear.weight",))),
    "clipped": ("norm-mlp", Regime(max_norm=0.1)),
    "clipped by another norm": ("nested", Regime(max_norm=0.1, norm_type=float("inf"))),
    "clipped with experts": ("mixture-of-experts", Regime(max_norm=0.05)),
    "scaled": ("graded", Regime(init_scale=64.0, growth_interval=2)),
    "scaled and clipped": ("nested", Regime(init_scale=64.0, max_norm=0.1)),
    "adam": ("transformer", Regime(optimizer="adam", steps=5)),
    "parameters of two dtypes": ("mixed-storage", Regime(steps=2)),
    "outputs": ("structured", Regime(keep_outputs=True, steps=2)),
    "loaded and interrupted": ("fused", Regime(events=(
        Event(action=Action.SAVE, moment=Moment.END, step=0),
        Event(action=Action.RAISE, moment=Moment.LOSS, step=1),
        Event(action=Action.LOAD, moment=Moment.END, step=1),
        Event(action=Action.RAISE, moment=Moment.FORWARD, step=2),
    ))),
}  # fmt: skip


class OnRanks(ShardedTrainingTestCase):
    """All references, trained on three ranks over gloo."""

    world_size = 3
    preload = ("fsdp_conformance.checks.parity", "fsdp_conformance.fixtures")

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def _references(self, workload: Workload, regime: Regime) -> References:
        self.start_process_group()
        return train_references(workload, regime, rank=self.rank, world_size=self.world_size)

    @pytest.mark.nightly
    @pytest.mark.slow
    def test_every_workload(self) -> None:
        """DDP, the all-reduce and the single process agree: bit for bit on exact workloads, within bounds elsewhere."""
        self.start_process_group()
        for name in workload_names():
            workload = workload_by_name(name)
            regime = Regime(steps=2)
            references = train_references(workload, regime, rank=self.rank, world_size=self.world_size)

            references.agree()
            for history in references.samples:
                for result in parity.parity(history, references):
                    self.assertEqual([], [finding.sentence() for finding in result.findings], name)
            self.assertEqual(
                {} if name != "no-parameters" else {"torch-ddp"}, references.absent and {"torch-ddp"}, name
            )

    @parameterized.expand(_REGIMES)
    def test_every_regime(self, regime: str) -> None:
        """They agree however the training loop is arranged."""
        name, followed = _REGIMES[regime]
        references = self._references(workload_by_name(name), followed)

        references.agree()
        self.assertEqual(regime == "two backwards", "torch-ddp" in references.absent)
        self.assertGreaterEqual(len(references.histories), 2)

    def test_experts_are_not_averaged(self) -> None:
        """The expert's gradient is this rank's own under every reference, and its values differ between ranks."""
        references = self._references(experts.mixture_of_experts(), Regime())

        references.agree()
        own = references.contributions()[self.rank][0][0]["module.2.weight"]
        for history in references.histories.values():
            torch.testing.assert_close(gradient(history, 0, "module.2.weight").double(), own, rtol=1e-5, atol=1e-8)

    def test_ignored_modules_are_not_averaged(self) -> None:
        """Parameters of ignored modules train on this rank's gradient alone."""
        workload = replace(models.nested(), ignored=("module.2",), units=("module.1.0", "module.1"))
        references = self._references(workload, Regime())

        references.agree()
        self.assertEqual(frozenset({"module.2.weight", "module.2.bias"}), references.local)

    def test_buffers_stay_with_their_rank(self) -> None:
        """Running statistics follow the rank's own batches: no reference broadcasts them."""
        references = self._references(workload_by_name("batch-norm"), Regime())
        others = single_process_histories(workload_by_name("batch-norm"), Regime(), world_size=self.world_size)

        references.agree()
        mine = references.histories["torch-ddp"].steps[2].buffers["input_mean"].double()
        self.assertLess((mine - others[self.rank].steps[2].buffers["input_mean"]).abs().max().item(), 1e-6)
        next_rank = (self.rank + 1) % self.world_size
        self.assertGreater((mine - others[next_rank].steps[2].buffers["input_mean"]).abs().max().item(), 1e-3)

    def test_an_overflow_skips_a_step(self) -> None:
        """By hand or with GradScaler: all references skip the same steps, and have the same scale after each."""
        regime = Regime(steps=6, init_scale=256.0, growth_interval=2)
        references = self._references(norms.overflow_nan(), regime)

        references.agree()
        for history in references.histories.values():
            scales = [float(record.loss_scale) for record in history.steps if record.loss_scale is not None]
            self.assertEqual(scales, [256, 128, 128, 256, 128, 128])

    def test_experts_of_all_ranks_are_in_the_norm(self) -> None:
        """With an expert on each rank, every rank has the norm of the shared gradients and of all experts' ones."""
        references = self._references(experts.mixture_of_experts(), Regime(max_norm=0.05))
        single = single_process_histories(experts.mixture_of_experts(), Regime(max_norm=0.05), world_size=3)

        own = [name for name in single[0].initial_params if name.startswith("module.2.")]
        shared = [grad for name, grad in (single[0].steps[0].grads or {}).items() if name not in own]
        grads = [*shared, *((rank.steps[0].grads or {})[name] for rank in single for name in own)]
        by_hand = torch.cat([grad.flatten() for grad in grads if grad is not None]).norm().item()
        self.assertEqual(len(own), 2)
        for history in references.histories.values():
            norm = history.steps[0].grad_norm
            self.assertAlmostEqual(-1 if norm is None else norm.item(), by_hand, delta=1e-6 * by_hand)

    @pytest.mark.nightly
    def test_a_rank_that_uses_nothing_still_takes_part(self) -> None:
        """A parameter used on odd ranks only has a gradient on all: the mean counts the others as zero."""
        references = self._references(workload_by_name("exact-divergent"), Regime())

        references.agree()
        for history in references.histories.values():
            self.assertGreater(gradient(history, 0, "fork.right.weight").abs().max().item(), 0)


def _history(workload: Workload, regime: Regime | None = None, *, world_size: int = 2) -> TrainingHistory:
    return single_process_reference(workload, regime or Regime(), rank=0, world_size=world_size)


def test_the_gradient_is_the_mean_over_ranks() -> None:
    """With gradients 2**rank times a code, the mean over 3 ranks of element i is (1 + 2 + 4) / 3 * (i + 1) * 3/4."""
    got = gradient(_history(probes.rank_coded(), world_size=3), 0, "parts.1.weight")

    assert got.tolist() == [7 / 4 * (index + 1) for index in range(13)]


def test_the_closed_form_by_hand() -> None:
    """One step of Linear(3, 3) is the weight that was worked out by hand, at any world size."""
    for world_size in (1, 2, 3, 4):
        history = _history(probes.closed_form(), Regime(steps=1), world_size=world_size)

        assert torch.equal(history.steps[0].params["weight"].float(), probes.closed_form_weight(world_size))


def test_clipping_by_hand() -> None:
    """The mean gradient's rows are (1, 2, 3) * 1.5, so the norm is 1.5 * sqrt(42); the clipped one has norm 1."""
    history = _history(probes.closed_form(), Regime(steps=1, max_norm=1.0))
    norm = 1.5 * 42**0.5

    record = history.steps[0]
    assert record.grad_norm is not None
    assert record.grad_norm.item() == pytest.approx(norm)
    assert record.clipped_grads is not None
    clipped = record.clipped_grads["weight"]
    assert clipped is not None
    assert clipped.norm().item() == pytest.approx(norm / (norm + CLIP_EPSILON))
    assert gradient(history, 0, "weight").norm().item() == pytest.approx(norm)


def test_a_rollback_by_hand() -> None:
    """
    Saved after the first step and loaded after the second: parameters, momentum and learning rate are those of then.
    """
    events = (
        Event(action=Action.SAVE, moment=Moment.END, step=0),
        Event(action=Action.LEARNING_RATE, moment=Moment.STEP, step=1, value=0.25),
        Event(action=Action.LOAD, moment=Moment.END, step=1),
    )
    history = _history(drawn.workload(DrawnModel()), Regime(events=events), world_size=1)
    first, second, third = history.steps
    name = "head.weight"
    saved = first.params[name]

    assert torch.equal(second.params[name], saved)
    assert gradient(history, 1, name).any()
    expected = saved - 0.125 * (0.5 * gradient(history, 0, name) + gradient(history, 2, name))
    assert torch.equal(third.params[name], expected)


def test_an_interrupted_attempt_changes_buffers_alone() -> None:
    """Losses, gradients and parameters are those of an undisturbed run; the attempts' forwards have been counted."""
    workload = drawn.workload(DrawnModel(blocks=(DrawnBlock(counts=True), DrawnBlock(counts=True))), micro_batches=2)
    regime = Regime(steps=2, micro_batches=2)
    events = (
        Event(action=Action.RAISE, moment=Moment.FORWARD, step=1, micro=1),
        Event(action=Action.RAISE, moment=Moment.LOSS, step=1),
        Event(action=Action.RAISE, moment=Moment.OPTIMIZER, step=1),
    )
    plain, disturbed = (_history(workload, each) for each in (regime, replace(regime, events=events)))

    interruptions = [("forward", 101), ("backward", 100)]
    assert disturbed.caught == [f"Interrupted: interrupted in {place}, code {code}" for place, code in interruptions]
    assert not plain.caught
    for got, expected in zip(disturbed.steps, plain.steps, strict=True):
        assert got.losses == expected.losses
        assert all(torch.equal(got.params[name], value) for name, value in expected.params.items())
    assert [int(buffer) for buffer in plain.steps[1].buffers.values()] == [4, 4]
    assert [int(buffer) for buffer in disturbed.steps[1].buffers.values()] == [4 + 2 + 1 + 2] * 2


def test_contributions_add_up() -> None:
    """The gradients of single ranks and micro-batches, added and divided by the world size, are the reference's."""
    regime = Regime(micro_batches=3, reduced=(False, True, True))
    per_rank = contributions(probes.exact_accumulation(), regime, world_size=4)
    history = _history(probes.exact_accumulation(), regime, world_size=4)

    for step in range(3):
        parts = [micro["head.weight"] for rank in per_rank for micro in rank[step]]
        assert len(parts) == 12
        total = torch.stack([part for part in parts if part is not None]).sum(0)
        assert torch.equal(total / 4, gradient(history, step, "head.weight"))


def test_data_loss_and_frozen_parameters_follow_the_regime() -> None:
    """A parameter frozen at step 1 has no gradient from there on and moves by its momentum no more."""
    history = _history(probes.exact_nested(), Regime(steps=4, frozen_at=((1, ("head.weight",)), (3, ()))))

    has_gradient = [record.grads["head.weight"] is not None for record in history.steps if record.grads is not None]
    assert has_gradient == [True, False, False, True]
    assert torch.equal(history.steps[0].params["head.weight"], history.steps[2].params["head.weight"])


@pytest.mark.parametrize(
    ("workload", "regime", "reason"),
    [
        (shapes.no_parameters(), Regime(), "no parameter requires a gradient"),
        (models.nested(), Regime(backwards_per_forward=2), "several backwards of one forward"),
        (models.nested(), Regime(), None),
    ],
)
def test_where_ddp_is_no_reference(workload: Workload, regime: Regime, reason: str | None) -> None:
    """The corners are known beforehand; nothing is caught and passed over."""
    absence = ddp_absence(workload, regime)

    assert absence is None if reason is None else reason in (absence or "")


def test_an_unknown_optimizer_is_refused() -> None:
    """The regime must name an optimizer of the workload."""
    with pytest.raises(ConfigError, match="optimizer must be one of adam, sgd, got 'lion'"):
        _history(models.nested(), Regime(optimizer="lion"))


def test_references_that_differ_judge_no_engine() -> None:
    """A reference that is off by one bit on an exact workload, or by a thousandth elsewhere, is named."""
    exact = references_of(probes.exact_long())
    gradient(exact.samples[0], 1, "head.weight")[0, 0] += 2**-20
    calibrated = references_of(models.nested())
    gradient(calibrated.samples[1], 2, "module.2.bias").mul_(1.001)

    with pytest.raises(
        ReferencesDisagree, match=r"gradient 'head.weight': expected bitwise equality.*step 1, rank 1, float32"
    ):
        exact.agree()
    with pytest.raises(
        ReferencesDisagree,
        match=r"gradient 'module.2.bias': expected noise of at most .* of its scale.*float32 reversed",
    ):
        calibrated.agree()


def test_references_that_differ_in_none_judge_no_engine() -> None:
    """A reference that has a gradient where the others have none is a disagreement too."""
    references = references_of(models.nested())
    grads = references.samples[0].steps[0].grads
    assert grads is not None
    grads["module.2.bias"] = None

    with pytest.raises(ReferencesDisagree, match=r"in which are None: \['module.2.bias'\]"):
        references.agree()


def test_a_bound_of_an_unknown_tensor_is_the_suites_mistake() -> None:
    """There is no default bound."""
    with pytest.raises(SuiteError, match="no bound for gradient 'gone' at step 0"):
        references_of(models.nested()).bound(Kind.GRADIENT, 0, "gone")


def test_histories_share_nothing_with_the_run() -> None:
    """Histories hold copies: a later step does not change an earlier record."""
    history = _history(probes.exact_long())

    first, last = (history.steps[step].params["head.weight"] for step in (0, 2))
    assert not torch.equal(first, last)
    assert not torch.equal(history.initial_params["head.weight"], first)
    assert not damaged(history).steps[0].params["head.weight"].is_set_to(first)


def test_the_loops_of_references_do_not_touch_random_state() -> None:
    """A reference that drew from the global generator would change the implementation's dropout."""
    before = torch.get_rng_state()

    _history(workload_by_name("transformer"), Regime(steps=1))

    assert torch.equal(before, torch.get_rng_state())


def test_the_distributed_references_are_callable_alone() -> None:
    """On one rank without a process group both distributed references raise, because they need one."""
    for reference in (ddp_reference, all_reduce_reference):
        with pytest.raises(ValueError, match=r"[Dd]efault process group"):
            reference(models.nested(), Regime(steps=1), rank=0, world_size=1)


def test_dtype_of_the_expected_history() -> None:
    """The expected history is float64 throughout; integers stay integers."""
    history = _history(workload_by_name("batch-norm"), Regime(steps=1))

    assert {tensor.dtype for tensor in history.steps[0].params.values()} == {torch.float64}
    assert history.steps[0].buffers["blocks.0.samples_seen"].dtype is torch.int64
    assert history.steps[0].losses[0].dtype is torch.float64
    assert isinstance(workload_by_name("batch-norm").build(0), nn.Module)


def test_a_parameter_may_be_as_wrong_as_the_gradient_that_it_was_stepped_with() -> None:
    """Clipped updates are small beside the rounding of parameters, so their own noise says little."""
    refs = references_of(models.nested(), Regime(max_norm=1e-4, steps=3), rank=0, world_size=2)
    step = 2
    for name, value in refs.expected.steps[step].params.items():
        parameter = refs.bound(Kind.PARAMETER, step, name)
        clipped = [refs.bound(Kind.CLIPPED, earlier, name).relative for earlier in range(step + 1)]
        assert parameter.relative >= max(clipped), name
        assert parameter.limit is not None
        assert bool((parameter.limit >= max(clipped) * parameter.scale).all()), name
        assert parameter.limit.shape in ((), value.shape)
