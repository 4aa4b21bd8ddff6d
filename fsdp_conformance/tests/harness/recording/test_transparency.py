"""Recording groups change nothing, miss nothing and invent nothing: seen against stock gloo and a second recorder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from parameterized import parameterized
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fsdp_conformance.harness.context import log
from fsdp_conformance.harness.rank import destroy_process_group
from fsdp_conformance.harness.recording.process_group import BACKEND, is_recording, register_recording_backend
from fsdp_conformance.harness.testcase import ShardedTrainingTestCase
from fsdp_conformance.tests.harness.recording import small_training
from fsdp_conformance.tests.harness.recording.dispatch_recorder import DispatchRecorder

pytestmark = pytest.mark.slow

Result = TypeVar("Result")


class _Transparency(ShardedTrainingTestCase):
    """The same work on stock groups and on recording groups, in the same processes."""

    preload = (
        "fsdp_conformance.tests.harness.recording.small_training",
        "fsdp_conformance.tests.harness.recording.dispatch_recorder",
        "torch.distributed.checkpoint.state_dict",
    )

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def _both(self, work: Callable[[], Result]) -> tuple[Result, Result]:
        """
        The results of `work` on stock groups and on recording ones, after checking that all three schedules are equal.
        """
        self.start_process_group()
        self.assertFalse(is_recording())
        with DispatchRecorder() as stock:
            expected = work()
        destroy_process_group()
        register_recording_backend()
        self.file_name += "-recording"
        self.start_process_group(BACKEND)
        self.assertTrue(is_recording())
        with DispatchRecorder() as inside:
            got = work()

        self.assertEqual([], stock.unknown + inside.unknown)
        self.assertGreater(len(stock.records), 0)
        self.assertEqual(stock.schedule(), inside.schedule())
        self.assertEqual(stock.schedule(), log().schedule())
        self.assertEqual(
            [(record.nbytes, record.num_tensors, record.dtype, record.step) for record in stock.records],
            [(record.nbytes, record.num_tensors, record.dtype, record.step) for record in log().records],
        )
        return expected, got


class Transparency(_Transparency):
    """Two ranks."""

    world_size = 2

    @parameterized.expand(small_training.ENGINES)
    def test_training(self, engine: str) -> None:
        """Losses and parameters are bitwise those of stock gloo, and both recorders give one schedule."""
        expected, got = self._both(lambda: small_training.train(engine))

        got.assert_bitwise_equal(expected)

    @pytest.mark.nightly
    def test_checkpoint_and_clipping(self) -> None:
        """Norms of sharded gradients and a rewritten distributed checkpoint are bitwise equal, too."""
        # The path is sent between ranks, so both are of one length.
        paths = iter([Path(self.file_name).with_name(name) for name in ("first-one", "other-one")])

        def work() -> list[Tensor]:
            model = small_training.ThreeLinear()
            fully_shard(model)
            model(torch.full((2, 5), 1.0 + self.rank)).sum().backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            path = next(paths)
            save(get_model_state_dict(model), checkpoint_id=path)
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()
            state = get_model_state_dict(model)
            load(state, checkpoint_id=path)
            return [tensor.full_tensor() for tensor in (norm, *state.values()) if isinstance(tensor, DTensor)]

        expected, got = self._both(work)

        self.assertEqual(7, len(got))
        self.assertTrue(all(tensor.count_nonzero() for tensor in got))
        for mine, stocks in zip(got, expected, strict=True):
            self.assertTrue(torch.equal(mine, stocks), msg=f"expected {stocks}, got {mine}")

    def test_results_that_differ_are_noticed(self) -> None:
        """The comparison that this test relies on raises for a difference in the last bit, and for missing tensors."""
        self.start_process_group()
        mine = small_training.train("ddp")
        theirs = small_training.Trained(mine.losses, {name: tensor.clone() for name, tensor in mine.params.items()})
        mine.assert_bitwise_equal(theirs)
        weight = theirs.params["layers.2.weight"]
        weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(9.0))

        with self.assertRaisesRegex(AssertionError, r"(?s)layers\.2\.weight: expected bitwise"):
            mine.assert_bitwise_equal(theirs)
        del theirs.params["layers.2.weight"]
        with self.assertRaisesRegex(AssertionError, "expected names "):
            mine.assert_bitwise_equal(theirs)


class TransparencyOfHybrids(_Transparency):
    """Two replicas of two shards: groups for each dimension of a mesh."""

    world_size = 4

    @parameterized.expand(small_training.HYBRIDS)
    @pytest.mark.nightly
    def test_hybrid(self, engine: str) -> None:
        """Hybrid sharding communicates in its sub-groups alone, which are recorded by their global ranks."""
        expected, got = self._both(lambda: small_training.train(engine))

        got.assert_bitwise_equal(expected)
        in_steps = {(record.op.value, record.group) for record in log().records if record.step is not None}
        shards = (0, 1) if self.rank < 2 else (2, 3)
        replicas = (self.rank % 2, self.rank % 2 + 2)
        self.assertEqual({("all_gather", shards), ("reduce_scatter", shards), ("all_reduce", replicas)}, in_steps)
