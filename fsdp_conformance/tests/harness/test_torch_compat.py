"""
Tests written in the style of PyTorch's own, on our ranks: the import lines are all that differs.

Each class is what one finds in pytorch/test/distributed: FSDP2 train parity with run_subtests, FSDP1 with FSDPTest's
own helpers, a c10d test that makes its process group and carries skip decorators, a test over `create_pg`, and one of
DTensor. On a machine without accelerators they run on the CPU, because they ask to.
"""

from __future__ import annotations

import copy
import os
import signal
import sys
import unittest
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as c10d
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817 - as upstream writes it
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal import common_distributed

from fsdp_conformance.harness import torch_compat
from fsdp_conformance.harness.torch_compat import (
    FILE_SCHEMA,
    MLP,
    TEST_SKIPS,
    DistributedTestBase,
    DTensorTestBase,
    FSDPTest,
    MultiProcessTestCase,
    check_sharded_parity,
    get_devtype,
    patch_all_gather,
    requires_gloo,
    run_subtests,
    skip_if_lt_x_gpu,
    with_comms,
)
from fsdp_conformance.tests.torch_versions import with_fsdp2_on_the_cpu

device_type = torch.device(get_devtype())


class TestFullyShard1DTrainingCore(FSDPTest):
    """FSDP2, after test_fully_shard_training.py."""

    cpu_world_size = 2

    @property
    def world_size(self) -> int:
        return int(min(4, torch.get_device_module(device_type).device_count()))

    @pytest.mark.nightly
    @with_fsdp2_on_the_cpu
    @skip_if_lt_x_gpu(2)
    def test_train_parity_single_group(self) -> None:
        """Tests train parity for a single FSDP group, with uneven shapes as well."""
        self.run_subtests(
            {"lin_shapes": [[(16, 15), (15, 8)], [(7, 15), (15, 3)]], "reshard_after_forward": [True, False]},
            self._test_train_parity,
        )

    def _test_train_parity(self, lin_shapes: list[tuple[int, int]], reshard_after_forward: bool) -> None:
        torch.manual_seed(42)
        model = nn.Sequential(nn.Linear(*lin_shapes[0]), nn.ReLU(), nn.Linear(*lin_shapes[1])).to(device_type)
        ref_model = copy.deepcopy(model)
        ref_optim = torch.optim.Adam(ref_model.parameters(), lr=1e-2)
        fully_shard(model, reshard_after_forward=reshard_after_forward)
        optim = torch.optim.Adam(model.parameters(), lr=1e-2)
        torch.manual_seed(42 + self.rank + 1)
        inp = torch.randn((4, lin_shapes[0][0]), device=device_type)
        losses: list[torch.Tensor] = []
        for iter_idx in range(3):
            for each_model, each_optim in ((ref_model, ref_optim), (model, optim)):
                each_optim.zero_grad(set_to_none=(iter_idx % 2 == 0))
                losses.append(each_model(inp).sum())
                losses[-1].backward()
                if each_model is ref_model:
                    for param in each_model.parameters():
                        grad = cast(torch.Tensor, param.grad)
                        dist.all_reduce(grad, op=dist.ReduceOp.SUM)
                        grad.div_(self.world_size)
                each_optim.step()
            self.assertEqual(losses[-2], losses[-1])
        check_sharded_parity(self, ref_model, model)
        self.assertTrue(all(isinstance(param, DTensor) for param in model.parameters()))

    @pytest.mark.slow
    @skip_if_lt_x_gpu(2)
    def test_all_gather_is_called_once_per_group(self) -> None:
        """Patches a function of torch.distributed, as upstream's communication tests do."""
        calls = 0
        original = dist.all_gather_into_tensor

        def counting(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return original(*args, **kwargs)

        model = MLP(8, device_type)
        fully_shard(model)
        with patch_all_gather(counting):
            model(torch.randn(2, 8, device=device_type)).sum()
        self.assertEqual(calls, 1)

    @skip_if_lt_x_gpu(2)
    def test_world_is_what_was_chosen(self) -> None:
        self.assertEqual(dist.get_world_size(), self.world_size)
        self.assertGreaterEqual(self.world_size, 2)
        self.assertEqual(self.process_group, dist.distributed_c10d._get_default_group())


class TestTwoRanksByDecree(FSDPTest):
    """A test that names its world size gets it."""

    cpu_world_size = 3

    @property
    def world_size(self) -> int:
        return 2

    def test_world_size(self) -> None:
        self.assertEqual(dist.get_world_size(), 2)


class TestThreeRanks(FSDPTest):
    """A test without its own world size takes the default for machines like this."""

    cpu_world_size = 3

    @unittest.skipIf(torch.accelerator.is_available(), "the number of accelerators decides")
    def test_world_size(self) -> None:
        self.assertEqual(dist.get_world_size(), 3)


class TestParityWithFSDP1(FSDPTest):
    """FSDP1, after test_fsdp_core.py, by the helpers of torch's class."""

    cpu_world_size = 2

    @skip_if_lt_x_gpu(2)
    def test_sharding_strategies(self) -> None:
        self.run_subtests(
            {"sharding_strategy": [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP]}, self._test_parity
        )

    def _test_parity(self, sharding_strategy: ShardingStrategy) -> None:
        torch.manual_seed(0)
        ref_model = MLP(6, device_type)
        device_id = torch.device(device_type.type, self.rank) if device_type.type != "cpu" else torch.device("cpu")
        model = FSDP(
            copy.deepcopy(ref_model), sharding_strategy=sharding_strategy, device_id=device_id, use_orig_params=True
        )
        torch.manual_seed(self.rank)
        inp = torch.randn(2, 6, device=device_type)
        ref_loss, loss = ref_model(inp).sum(), model(inp).sum()
        self.assertEqual(ref_loss, loss)
        loss.backward()
        with FSDP.summon_full_params(model, with_grads=True):
            ref_loss.backward()
            for ref_param, param in zip(ref_model.parameters(), model.parameters(), strict=True):
                dist.all_reduce(ref_param.grad)
                self.assertEqual(ref_param.grad / self.world_size, param.grad)


class ProcessGroupGlooTest(MultiProcessTestCase):
    """c10d, after test_c10d_gloo.py: the test makes its own store and process group."""

    def setUp(self) -> None:
        super().setUp()
        method = getattr(self, self._testMethodName).__wrapped__
        if self._testMethodName == "test_dies_as_expected":
            self.special_return_code_checks = {method: -signal.SIGABRT}
        elif self._testMethodName == "test_any_exit_code":
            self.skip_return_code_checks = [method]
        self._spawn_processes()

    @property
    def world_size(self) -> int:
        return 3

    @property
    def destroy_pg_upon_exit(self) -> bool:
        return False

    def _create_process_group(self) -> dist.ProcessGroup:
        store = c10d.FileStore(self.file_name, self.world_size)  # type: ignore[attr-defined]  # in __all__ of no module
        c10d.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=self.world_size, timeout=timedelta(seconds=20)
        )
        return dist.distributed_c10d._get_default_group()

    @requires_gloo()
    def test_allreduce_basics(self) -> None:
        pg = self._create_process_group()
        tensor = torch.tensor([float(self.rank + 1)])
        pg.allreduce([tensor]).wait()
        self.assertEqual(tensor, torch.tensor([6.0]))

    def test_init_method_is_a_file(self) -> None:
        self.assertTrue(self.init_method.startswith(FILE_SCHEMA))
        c10d.init_process_group("gloo", init_method=self.init_method, rank=self.rank, world_size=self.world_size)
        run_subtests(self, {"n": [1, 2]}, self._test_broadcast)

    def _test_broadcast(self, n: int) -> None:
        tensor = torch.full((n,), float(self.rank))
        dist.broadcast(tensor, src=1)
        self.assertEqual(tensor, torch.ones(n))

    def test_dies_as_expected(self) -> None:
        os.kill(os.getpid(), signal.SIGABRT)

    def test_any_exit_code(self) -> None:
        os._exit(7 + self.rank)

    def test_is_master(self) -> None:
        self.assertEqual(self.is_master, self.rank == 0)


@pytest.fixture
def _no_world_size_is_left() -> Iterator[None]:
    """`DistributedTestBase.setUp` sets WORLD_SIZE in the process that runs the tests."""
    before = os.environ.get("WORLD_SIZE")
    yield
    if before is None:
        os.environ.pop("WORLD_SIZE", None)


@pytest.mark.usefixtures("_no_world_size_is_left")
class TestOverCreatePG(DistributedTestBase):
    """After test_c10d_common.py."""

    @property
    def world_size(self) -> int:
        return 2

    def test_all_to_all_object(self) -> None:
        self.create_pg(device_type.type, self.world_size)
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, {"rank": self.rank})
        self.assertEqual(gathered, [{"rank": 0}, {"rank": 1}])


class DistTensorTest(DTensorTestBase):
    """After test_dtensor.py."""

    @property
    def world_size(self) -> int:
        return 2

    @with_comms
    def test_distribute_tensor(self) -> None:
        mesh = self.build_device_mesh()
        whole = torch.arange(6.0, device=self.device_type).reshape(3, 2)
        sharded = distribute_tensor(whole, mesh, [Shard(0)])
        self.assertEqual(sharded.to_local().shape[0], 2 if self.rank == 0 else 1)
        self.assertEqual(sharded.full_tensor(), whole)


class OnlyOnAccelerators(FSDPTest):
    """Does not ask for the CPU."""

    __test__ = False

    def test_training(self) -> None:
        self.fail("there is no accelerator")


class OnlyWithTwo(MultiProcessTestCase):
    """The same for a decorator; `Asks` asks for the CPU."""

    __test__ = False

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    @property
    def world_size(self) -> int:
        return 1

    @skip_if_lt_x_gpu(2)
    def test_training(self) -> None:
        if type(self).cpu_world_size is None:
            self.fail("there are no two accelerators")


class Asks(OnlyWithTwo):
    __test__ = False
    cpu_world_size = 1


class NoRanks(MultiProcessTestCase):
    """A world of none."""

    __test__ = False

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    @property
    def world_size(self) -> int:
        return 0

    def test_nothing(self) -> None:
        self.fail("there is no rank")


class Skips(MultiProcessTestCase):
    """The ways in which upstream's tests skip; the test below looks at what comes out."""

    __test__ = False

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    @property
    def world_size(self) -> int:
        return 2

    def test_skip_code(self) -> None:
        sys.exit(TEST_SKIPS["small_worldsize"].exit_code)

    @common_distributed.skip_if_lt_x_gpu(64)
    def test_torchs_own_decorator(self) -> None:
        self.fail("no machine has 64")

    def test_fails_on_rank_1(self) -> None:
        self.assertEqual(self.rank, 0)


def test_ours_in_place_of_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may put our decorator into torch's module: it then still uses torch's where there are accelerators."""
    monkeypatch.setattr(common_distributed, "skip_if_lt_x_gpu", skip_if_lt_x_gpu)
    monkeypatch.setattr(torch_compat, "accelerator_or_cpu", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def runs(_: object) -> str:
        return "ran"

    assert common_distributed.skip_if_lt_x_gpu(2)(runs)(None) == "ran"
    with pytest.raises(SystemExit):
        common_distributed.skip_if_lt_x_gpu(3)(runs)(None)


def outcome(method: str, case: type[unittest.TestCase] = Skips) -> unittest.TestResult:
    """Run a method, of Skips or of another class."""
    result = unittest.TestResult()
    case(method).run(result)
    return result


needs_no_accelerator = pytest.mark.skipif(torch.accelerator.is_available(), reason="upstream skips only without them")


@needs_no_accelerator
def test_what_upstream_skips_is_skipped() -> None:
    """FSDPTest, and the decorator: a class has to ask for the CPU."""
    assert "cpu_world_size" in outcome("test_training", OnlyOnAccelerators).skipped[0][1]
    assert outcome("test_training", OnlyWithTwo).skipped
    result = outcome("test_training", Asks)
    assert (result.skipped, result.errors, result.failures) == ([], [], [])


def test_a_world_without_ranks_is_refused_by_name() -> None:
    """The error comes before anything is started."""
    ((_, text),) = outcome("test_nothing", NoRanks).errors

    assert "world_size must be a positive integer, got 0 [NoRanks]" in text


def test_skip_codes_are_skips_with_their_words() -> None:
    """An exit with one of torch's codes is a SkipTest in the controller."""
    assert [reason for _, reason in outcome("test_skip_code").skipped] == ["Skipped due to small world size."]
    # torch 2.6 has no code for 64 devices and raises KeyError in the ranks
    if "multi-gpu-64" in TEST_SKIPS:
        assert outcome("test_torchs_own_decorator").skipped


def test_assertion_on_any_rank_fails_the_test() -> None:
    """An assertion on a rank other than 0 counts, too."""
    result = outcome("test_fails_on_rank_1")

    assert "Process 1 exited with error code 10 and exception:" in result.errors[0][1]
    assert "rank 1 raised AssertionError" in result.errors[0][1]


def test_unknown_name_is_reported() -> None:
    """A name that torch's modules do not have is an error that says where it was looked for."""
    with pytest.raises(AttributeError, match="nor torch's own test modules have an attribute"):
        _ = torch_compat.NoSuchName


if __name__ == "__main__":
    torch_compat.run_tests()
