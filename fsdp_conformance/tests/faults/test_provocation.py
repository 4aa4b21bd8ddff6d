"""A stress run leaves right engines right, and shows what is wrong with engines that gloo forgives."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils import deterministic

from fsdp_conformance.engine.communication import all_gather, all_reduce
from fsdp_conformance.errors import ConfigError
from fsdp_conformance.faults import late, poison
from fsdp_conformance.faults.late import LateCollectives
from fsdp_conformance.faults.pending import LateWork, PendingCollective
from fsdp_conformance.faults.poison import PoisonedMemory
from fsdp_conformance.faults.provocation import Provoked
from fsdp_conformance.harness import context
from fsdp_conformance.harness.accounting import Part
from fsdp_conformance.harness.recording.collective_log import Collective
from fsdp_conformance.stress import Provocation
from fsdp_conformance.tests.faults import async_engines
from fsdp_conformance.tests.harness.recording import small_training
from fsdp_conformance.tests.harness.recording.small_training import world
from fsdp_conformance.tests.harness.started_ranks import RecordedRanks
from fsdp_conformance.tests.torch_versions import not_on_old

pytestmark = pytest.mark.slow


class _Lot(random.Random):
    """Always draws the same."""

    def __init__(self, drawn: float) -> None:
        super().__init__()
        self.drawn = drawn

    def random(self) -> float:
        return self.drawn


@contextmanager
def _late(drawn: float = 0.0) -> Iterator[list[Provocation]]:
    """Late collectives alone, and what they count. In-place inputs are read late if `drawn` is below a half."""
    struck: list[Provocation] = []
    with LateCollectives(_Lot(drawn), struck.append):
        yield struck


@not_on_old
class Provoking(RecordedRanks):
    """Two ranks."""

    preload = (
        "fsdp_conformance.tests.harness.recording.small_training",
        "fsdp_conformance.tests.faults.async_engines",
        "fsdp_conformance.faults.provocation",
    )

    def _provoked(self, seed: int = 1) -> Provoked:
        return Provoked(seed, "R001/exact-probe-ws2", rank=self.rank, world_size=2)

    def _grads(self) -> list[Tensor]:
        return [torch.arange(6.0) + 10 * index + self.rank for index in range(4)]

    def _code(self) -> Tensor:
        return torch.full((2,), float(self.rank))

    @pytest.mark.nightly
    def test_right_and_wrong_engines(self) -> None:
        """Right ways to wait give the right result, wrong ones only as long as nothing is provoked."""
        expected = [torch.arange(6.0) + 10 * index + 0.5 for index in range(4)]
        for engine in async_engines.RIGHT + async_engines.WRONG:
            with self.subTest(engine.__name__):
                self.assertEqual(expected, engine(self._grads()))
                provoked = self._provoked()
                with provoked:
                    got = engine(self._grads())
                right = all(map(torch.equal, expected, got))
                self.assertEqual(right, engine in async_engines.RIGHT, msg=engine.__name__)
                self.assertEqual(4, provoked.strikes[Provocation.LATE])
                self.assertEqual(4, provoked.strikes[Provocation.POISONED])
                if engine is not async_engines.by_future:  # its delays are drawn
                    overtaken = {"in_reverse": 3, "waits_for_the_last": 1}.get(engine.__name__, 0)
                    self.assertEqual(overtaken, provoked.strikes[Provocation.OVERTAKEN])

    @pytest.mark.nightly
    def test_engines_of_torch(self) -> None:
        """DDP, FSDP1 and FSDP2 train the same numbers, bit for bit."""
        for engine, strikes in {
            "ddp": {Provocation.LATE, Provocation.POISONED},
            "fsdp1_full_shard": {Provocation.FREED, Provocation.NEW},
            "fsdp2_reshard": {Provocation.FREED, Provocation.NEW},
        }.items():
            with self.subTest(engine):
                expected = small_training.train(engine)
                provoked = self._provoked()
                with provoked:
                    small_training.train(engine).assert_bitwise_equal(expected)
                self.assertLessEqual(strikes, {name for name, count in provoked.strikes.items() if count})

    def test_one_rank_is_slow(self) -> None:
        """The ranks agree on who is slow, and that one alone sleeps."""
        provoked = self._provoked()
        provoked.install()
        for _ in range(20):
            dist.all_reduce(torch.ones(1))
        provoked.remove(must_have_struck=False)
        slept = torch.tensor([0, 0])
        slept[self.rank] = provoked.strikes[Provocation.SLOW]
        dist.all_reduce(slept)
        self.assertEqual(1, int((slept > 0).sum()))
        self.assertLess(int(slept.max()), 20)

    def test_same_seed_same_strikes(self) -> None:
        """The strikes depend on the seed alone."""

        def strikes(seed: int) -> dict[str, int]:
            with self._provoked(seed) as provoked:
                for _ in range(12):
                    async_engines.in_order(self._grads())
                    all_reduce(torch.ones(1), world()).wait()
            return provoked.strikes

        first = strikes(1)
        self.assertEqual(first, strikes(1))
        self.assertNotEqual(first, strikes(2))

    def test_suite_is_left_alone(self) -> None:
        """The suite's own work is not provoked."""
        provoked = self._provoked()
        provoked.install()
        with context.working(Part.SUITE):
            async_engines.in_order(self._grads())
            torch.ones(4).untyped_storage().resize_(0)
        with self.assertRaisesRegex(ConfigError, "never struck on rank"):
            provoked.remove()
        self.assertEqual(0, sum(provoked.strikes.values()))

    def test_removed_without_a_trace(self) -> None:
        """Afterwards collectives, storages and new tensors are torch's own, and no thread is left."""
        resize, filled = torch.UntypedStorage.resize_, deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        before = threading.active_count()
        with self._provoked():
            output = torch.zeros(4)
            forgotten = all_gather(output, self._code(), world())
            self.assertEqual(before + 1, threading.active_count())
        self.assertIs(Collective.issue, context.log().issuer)
        self.assertEqual([], context.log().observers)
        self.assertIs(resize, torch.UntypedStorage.resize_)
        self.assertIs(filled, deterministic.fill_uninitialized_memory)  # type: ignore[attr-defined]
        self.assertEqual(before, threading.active_count())
        # A Work from before can still be waited for.
        forgotten.wait()
        self.assertEqual(torch.tensor([0.0, 0.0, 1.0, 1.0]), output)

    # One collective.

    def test_output_is_poisoned_until_its_wait(self) -> None:
        """An output holds poison until its own wait, also after another's on the same group."""
        output, other = torch.zeros(4), torch.zeros(4, dtype=torch.int64)
        with _late() as struck:
            first = all_gather(output, self._code(), world())
            second = all_gather(other, self._code().long(), world())
            self.assertIsInstance(first, LateWork)
            self.assertTrue(output.isnan().all())
            self.assertEqual(torch.full((4,), torch.iinfo(torch.int64).max), other)
            second.wait()
            self.assertEqual(torch.tensor([0, 0, 1, 1]), other)
            self.assertTrue(output.isnan().all())
            self.assertFalse(first.is_completed() and bool(output.isnan().any()))
            first.wait()
            self.assertEqual(torch.tensor([0.0, 0.0, 1.0, 1.0]), output)
        self.assertIn(Provocation.OVERTAKEN, struck)

    def test_input_is_read_late(self) -> None:
        """If an engine writes to an input before the wait, its peers receive the new value."""
        output, mine = torch.zeros(4), self._code()
        with _late():
            work = all_gather(output, mine, world())
            mine.add_(5)
            work.wait()
        self.assertEqual(torch.tensor([5.0, 5.0, 6.0, 6.0]), output)

    def test_input_inside_the_output(self) -> None:
        """An input that is a part of the output is read at the issue: then the poison covers it."""
        output = torch.zeros(4)
        mine = output[2 * self.rank : 2 * self.rank + 2]
        mine.fill_(float(self.rank))
        with _late() as struck:
            work = all_gather(output, mine, world())
            self.assertTrue(output.isnan().all())
            work.wait()
        self.assertEqual(torch.tensor([0.0, 0.0, 1.0, 1.0]), output)
        self.assertNotIn(Provocation.READ_LATE, struck)

    def test_in_place(self) -> None:
        """A tensor that is input and output is either poisoned at once, or read late; both are right if one waits."""
        for drawn, poisoned, after_change in ((0.9, True, 1.0), (0.0, False, 21.0)):
            tensor, changed = self._code(), self._code()
            with _late(drawn):
                work = all_reduce(tensor, world())
                self.assertEqual(poisoned, bool(tensor.isnan().all()))
                work.wait()
                self.assertEqual(torch.ones(2), tensor)
                work = all_reduce(changed, world())
                changed.add_(10)
                work.wait()
            self.assertEqual(torch.full((2,), after_change), changed)

    def test_freed_tensors(self) -> None:
        """A freed input gives poison, and a result for a freed output goes nowhere."""
        output, mine, nowhere = torch.zeros(4), self._code(), torch.zeros(4)
        with _late():
            sent = all_gather(output, mine, world())
            if self.rank == 0:
                mine.untyped_storage().resize_(0)
            dropped = all_gather(nowhere, self._code(), world())
            nowhere.untyped_storage().resize_(0)
            sent.wait()
            dropped.wait()
        self.assertTrue(output[:2].isnan().all())
        self.assertEqual(torch.ones(2), output[2:])

    @pytest.mark.nightly
    def test_autograd_notices_nothing(self) -> None:
        """Poison and results are written past the version counter, as a backend does; in inference mode as well."""
        with _late():
            saved = torch.ones(4, requires_grad=True)
            output = torch.zeros(4)
            product = saved * output
            work = all_gather(output, self._code(), world())
            work.wait()
            product.sum().backward()
            with torch.inference_mode():
                inferred = torch.zeros(4)
                work = all_gather(inferred, self._code(), world())
            work.wait()
        self.assertEqual(output, saved.grad)
        self.assertEqual(output, inferred)

    def test_what_is_passed_on(self) -> None:
        """Synchronous calls, sparse tensors, and what gloo may reject at the call are not kept back."""
        with _late() as struck:
            all_reduce(torch.ones(1), world()).wait()
            struck.clear()
            dist.all_reduce(torch.ones(1))
            dist.broadcast(torch.ones(1), 0)
            sparse = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (3,))
            dist.all_reduce(sparse)
            self.assertNotIsInstance(dist.all_reduce(torch.ones(1), op=dist.ReduceOp.AVG, async_op=True), LateWork)
            whole = torch.zeros(2, 4)
            self.assertNotIsInstance(dist.all_reduce(whole.bool(), dist.ReduceOp.MAX, async_op=True), LateWork)
        # Options of torch before 2.8 do not tell that a reduction is synchronous.
        if hasattr(dist.AllreduceOptions(), "asyncOp"):
            self.assertEqual([], struck)

    def test_backend_that_rejects(self) -> None:
        """An error of the backend reaches the caller, together with the wait, and other collectives go on."""
        output = torch.zeros(4)
        with _late():
            with self.assertRaises((RuntimeError, ValueError)):
                all_gather(torch.zeros(3), self._code(), world()).wait()
            all_gather(output, self._code(), world()).wait()
        self.assertEqual(torch.tensor([0.0, 0.0, 1.0, 1.0]), output)

    def test_future_that_fails(self) -> None:
        """A future of a collective that fails raises, and C++ (here DDP's reducer) takes that for an error."""
        with _late():
            future = all_gather(torch.zeros(3), self._code(), world()).get_future()
            with self.assertRaisesRegex(RuntimeError, "."):
                future.wait()
            wrapped = DistributedDataParallel(small_training.ThreeLinear())
            loss = wrapped(torch.ones(2, 5)).sum()
            with (
                mock.patch.object(PendingCollective, "wait_for_backend", side_effect=ConnectionError("peer gone")),
                self.assertRaisesRegex(RuntimeError, "peer gone"),
            ):
                loss.backward()

    # Progress.

    def test_two_groups(self) -> None:
        """A rank that waits for one group has its part in the others under way."""
        other, output = dist.new_group([0, 1]), torch.zeros(4)
        with _late():
            work = all_gather(output, self._code(), world())
            if self.rank == 0:
                work.wait()
            dist.all_reduce(torch.ones(1), group=other)
            work.wait()
        self.assertEqual(torch.tensor([0.0, 0.0, 1.0, 1.0]), output)

    def test_rank_that_waits_elsewhere(self) -> None:
        """A collective starts by itself if its rank waits in a call that is not observed."""
        output = torch.zeros(4)
        store = dist.distributed_c10d._get_default_store()
        with mock.patch.object(late, "_KEPT_BACK_S", 0.01), _late():
            work = all_gather(output, self._code(), world())
            if self.rank == 0:
                work.wait()
                store.set("rank 0 has waited", "")
            store.wait(["rank 0 has waited"], timedelta(seconds=30))
            work.wait()
        self.assertEqual(torch.tensor([0.0, 0.0, 1.0, 1.0]), output)

    # Memory.

    def test_memory(self) -> None:
        """New tensors, grown storages and the bytes that are freed hold poison; memory of others is left alone."""
        struck: list[Provocation] = []
        borrowed = torch.from_numpy(np.ones(4, dtype=np.float32))
        with (
            PoisonedMemory(struck.append),
            mock.patch.object(ctypes, "memset", wraps=ctypes.memset) as fill,
        ):
            self.assertTrue(torch.empty(3).isnan().all())
            tensor = torch.ones(4)
            tensor.untyped_storage().resize_(0)
            self.assertEqual((255, 16), fill.call_args.args[1:])
            tensor.untyped_storage().resize_(16)
            self.assertTrue(tensor.isnan().all())
            tensor.fill_(1.0)
            tensor.untyped_storage().resize_(32)
            self.assertEqual(torch.ones(4), tensor)
            with self.assertRaises(RuntimeError):
                borrowed.untyped_storage().resize_(8)
        self.assertEqual(torch.ones(4), borrowed)
        self.assertEqual([Provocation.FREED, Provocation.NEW, Provocation.NEW], struck)

    def test_every_dtype_can_be_poisoned(self) -> None:
        """No value that was there is left."""
        dtypes = [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float64, torch.complex64]
        dtypes += [torch.float8_e4m3fn, torch.float8_e5m2]
        for dtype in dtypes:
            tensor = torch.zeros(3, dtype=dtype)
            poison.poison(tensor)
            self.assertFalse(bool((tensor.to(torch.complex64) == 0).any()), msg=str(dtype))
