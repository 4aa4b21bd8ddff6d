"""The precision of the fully sharded module: of parameters, reductions and buffers, by unit and by mode."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fsdp_conformance.engine.errors import TrainingStateError
from fsdp_conformance.engine.fully_sharded.fully_shard import clean_unit_name
from fsdp_conformance.engine.fully_sharded.model_state import full_state_dict, load_full_state_dict
from fsdp_conformance.engine.fully_sharded.wrapper import FullyShardedDataParallel
from fsdp_conformance.engine.sharding_strategy import MixedPrecision, ShardingStrategy
from fsdp_conformance.tests.engine.fully_sharded.sharded_ranks import (
    WIDTH,
    ShardedTestCase,
    Stage,
    batch,
    chain,
    sharded,
)

LOW = MixedPrecision(param_dtype=torch.bfloat16)
FULL_IN_EVAL = MixedPrecision(
    param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16, cast_forward_inputs=True, full_precision_in_eval=True
)


class Scaled(Stage):
    """A stage with a table of factors that no dtype but float32 holds, and a count."""

    factors: Tensor
    count: Tensor

    def __init__(self, outputs: int = WIDTH) -> None:
        super().__init__(WIDTH, outputs)
        self.register_buffer("factors", torch.full((outputs,), 1 + 2.0**-12))
        self.register_buffer("count", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return super().forward(x) * self.factors


class TestPrecision(ShardedTestCase):
    """Low precision while unsharded."""

    def test_dtypes(self) -> None:
        """Forward computes in bfloat16; shards and their gradients stay float32, and are reduced in what was asked."""
        for reduce_dtype in (None, torch.float32):
            policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
            subject = sharded(chain(), mixed_precision=policy)
            self.schedule()
            output = subject(batch(self.rank))
            self.assertEqual(torch.bfloat16, output.dtype)
            output.float().sum().backward()
            for parameter in subject.parameters():
                self.assertEqual(torch.float32, parameter.dtype)
                assert parameter.grad is not None, "every parameter was used"
                self.assertEqual(torch.float32, parameter.grad.dtype)
            wire = "bfloat16" if reduce_dtype is None else "float32"
            reductions = [line for line in self.schedule() if "reduce_scatter" in line]
            self.assertTrue(reductions and all(wire in line for line in reductions), msg=str(reductions))

    @pytest.mark.slow
    def test_accumulates_in_the_dtype_of_the_reduction(self) -> None:
        """Micro-batches that are not reduced add up in float32: 257 times one is not 256."""
        model = nn.Linear(1, 1, bias=False)
        subject = FullyShardedDataParallel(
            model, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        )
        x = torch.ones(1, 1)
        with subject.no_sync():
            for _ in range(256):
                subject(x).sum().backward()
        subject(x).sum().backward()
        gradients = [p.grad for p in subject.parameters() if p.grad is not None and p.grad.numel()]
        self.assertEqual([257.0] * len(gradients), [gradient.item() for gradient in gradients])

    def test_policies_differ_in_a_tree(self) -> None:
        """A unit computes and reduces by its own policy; inputs are cast where that was asked for, or not at all."""
        seen: dict[str, tuple[torch.dtype, torch.dtype]] = {}

        def note(name: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
            seen[name] = (args[0].dtype, module.get_parameter("linear.weight").dtype)

        model = nn.Sequential(Stage(), Stage(), Stage(WIDTH, 3))
        for name, child in model.named_children():
            child.register_forward_pre_hook(lambda module, args, name=name: note(name, module, args))
        low = MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=True)
        wide = MixedPrecision(param_dtype=torch.float32, cast_forward_inputs=True)
        model[0] = FullyShardedDataParallel(model[0], mixed_precision=wide)
        model[1] = FullyShardedDataParallel(model[1], mixed_precision=low)
        model[2] = FullyShardedDataParallel(model[2], mixed_precision=wide)
        subject = FullyShardedDataParallel(model)
        self.schedule()
        subject(batch(self.rank)).sum().backward()
        self.assertEqual({"0": torch.float32, "1": torch.bfloat16, "2": torch.float32}, _first(seen))
        self.assertEqual(_first(seen), {name: dtypes[1] for name, dtypes in seen.items()})
        wires = ["bfloat16" in line for line in self.schedule() if "reduce_scatter" in line]
        self.assertEqual([False, True, False], wires)

    def test_inputs_that_are_not_cast(self) -> None:
        """A unit that is asked to leave its inputs alone does so, and torch says what does not fit."""
        subject = sharded(
            chain(), mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, cast_root_forward_inputs=False)
        )
        with self.assertRaisesRegex(RuntimeError, "same dtype"):
            subject(batch(self.rank))


class TestFullPrecisionInEval(ShardedTestCase):
    """In eval mode, on request, a unit computes as it would without a policy."""

    @pytest.mark.slow
    def test_with_and_without_a_graph(self) -> None:
        """Outputs and gradients are those without a policy, reduced in float32; training goes on in low precision."""
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
            plain = sharded(chain(), sharding_strategy=strategy).eval()
            subject = sharded(chain(), sharding_strategy=strategy, mixed_precision=FULL_IN_EVAL).eval()
            x = batch(self.rank)
            with torch.no_grad():
                self.assertTrue(torch.equal(plain(x), subject(x)))
            for _ in range(2):
                self.schedule()
                plain(x).sum().backward()
                expected = self.schedule()
                subject(x).sum().backward()
                self.assertEqual(expected, self.schedule())
                self._assert_same_gradients(plain, subject)
                subject.train()
                output = subject(x)
                self.assertEqual(torch.bfloat16, output.dtype)
                output.float().sum().backward()
                plain.zero_grad()
                subject.zero_grad()
                subject.eval()

    def test_evaluated_inside_of_a_step(self) -> None:
        """A forward without a graph between a forward and its backward changes nothing of the step."""
        subject = sharded(chain(), mixed_precision=FULL_IN_EVAL)
        undisturbed = sharded(chain(), mixed_precision=FULL_IN_EVAL)
        for model in (undisturbed, subject):
            with model.no_sync():
                model(batch(self.rank, 1)).float().sum().backward()
            loss = model(batch(self.rank)).float().sum()
            if model is subject:
                with torch.no_grad():
                    model.eval()(batch(self.rank))
                model.train()
            loss.backward()
        self._assert_same_gradients(undisturbed, subject)

    def test_mode_changes_inside_of_a_step(self) -> None:
        """Another mode between forward and backward, or while gradients wait, is told: both precisions cannot be."""
        subject = sharded(chain(), mixed_precision=FULL_IN_EVAL)
        loss = subject(batch(self.rank)).float().sum()
        subject.eval()(batch(self.rank)).sum().backward()
        with self.assertRaisesRegex(TrainingStateError, "low precision in the forward"):
            loss.backward()
        subject = sharded(chain(), mixed_precision=FULL_IN_EVAL)
        with subject.no_sync():
            subject(batch(self.rank)).float().sum().backward()
        with self.assertRaisesRegex(TrainingStateError, "while gradients have yet to be reduced"):
            subject.eval()(batch(self.rank))

    def test_copies_and_casts(self) -> None:
        """A copy that is made in full precision trains in low, and a cast to float64 is followed in both."""
        subject = sharded(chain(), mixed_precision=FULL_IN_EVAL).eval()
        subject(batch(self.rank)).sum().backward()
        twin = copy.deepcopy(subject)
        self.assertEqual(torch.bfloat16, twin.train()(batch(self.rank)).dtype)
        subject.zero_grad()
        subject.double()
        self.assertEqual(torch.float64, subject(batch(self.rank).double()).dtype)
        self.assertEqual(torch.bfloat16, subject.train()(batch(self.rank)).dtype)

    def _assert_same_gradients(self, expected: nn.Module, subject: nn.Module) -> None:
        for (name, theirs), got in zip(expected.named_parameters(), subject.parameters(), strict=True):
            self.assertEqual(theirs.grad is None, got.grad is None, msg=name)
            if theirs.grad is not None and got.grad is not None:
                self.assertTrue(torch.equal(theirs.grad, got.grad), msg=f"{name}: {got.grad}, not {theirs.grad}")


class TestBuffers(ShardedTestCase):
    """Floating-point buffers in the dtype of the policy."""

    def test_cast_at_first_use(self) -> None:
        """They are cast in the unit's first forward, integers never; a state dict has them in their own dtype."""
        subject = sharded(nn.Sequential(Scaled(), Scaled(3)), units=["0"], mixed_precision=FULL_IN_EVAL)
        self.assertEqual({torch.float32, torch.int64}, _buffer_dtypes(subject))
        subject(batch(self.rank)).float().sum().backward()
        self.assertEqual({torch.bfloat16, torch.int64}, _buffer_dtypes(subject))
        for state in (full_state_dict(subject), subject.state_dict(), full_state_dict(subject, offload_to_cpu=True)):
            self.assertEqual(torch.float32, state["0.factors"].dtype)
            self.assertEqual(1.0, state["1.factors"][0].item())
            self.assertEqual(torch.int64, state["1.count"].dtype)
        load_full_state_dict(subject, {**state, "0.factors": state["0.factors"] * 2})
        self.assertEqual(2.0, _buffer(subject, "0.factors")[0].item())
        self.assertEqual(torch.bfloat16, _buffer(subject, "0.factors").dtype)

    def test_in_eval(self) -> None:
        """In full precision buffers have their own dtype, and afterwards the one they had before."""
        subject = sharded(nn.Sequential(Scaled(), Scaled(3)), units=["0"], mixed_precision=FULL_IN_EVAL).eval()
        with torch.no_grad():
            subject(batch(self.rank))
        self.assertEqual(1 + 2.0**-12, _buffer(subject, "0.factors")[0].item())
        subject.train()(batch(self.rank))
        twin = copy.deepcopy(subject)
        with torch.no_grad():
            self.assertEqual(torch.float32, subject.eval()(batch(self.rank)).dtype)
        self.assertEqual({torch.bfloat16, torch.int64}, _buffer_dtypes(subject))
        subject(batch(self.rank))
        self.assertEqual({torch.float32, torch.int64}, _buffer_dtypes(subject))
        self.assertEqual([2, 4], [_buffer(model, "1.count").item() for model in (twin, subject)])
        self.assertEqual(torch.float32, full_state_dict(twin)["1.factors"].dtype)
        self.assertEqual({torch.bfloat16, torch.int64}, _buffer_dtypes(twin))


def _first(seen: dict[str, tuple[torch.dtype, torch.dtype]]) -> dict[str, torch.dtype]:
    return {name: dtypes[0] for name, dtypes in seen.items()}


def _buffer(model: nn.Module, name: str) -> Tensor:
    return {clean_unit_name(key): buffer for key, buffer in model.named_buffers()}[name]


def _buffer_dtypes(model: nn.Module) -> set[torch.dtype]:
    return {buffer.dtype for buffer in model.buffers()}
