"""The process group of the simulated accelerator between processes: gloo's numbers, NCCL's streams and errors."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, _make_nccl_premul_sum
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from fsdp_conformance.harness.collective_log import log
from fsdp_conformance.harness.process_group import BACKEND, is_recording, register_recording_backend
from fsdp_conformance.harness.rank import destroy_process_group
from fsdp_conformance.harness.testcase import ShardedTrainingTestCase
from fsdp_conformance.simulator import build, checker
from fsdp_conformance.simulator import torch_sim as sim
from fsdp_conformance.simulator.hazard import HazardKind
from fsdp_conformance.tests.simulator_collectives import (
    PROGRAMS,
    Outputs,
    Values,
    all_gather_into_tensor,
    collectives,
    differences,
    moves,
    point_to_point,
    reduce_scatter_tensor,
)
from fsdp_conformance.tests.small_training import ThreeLinear, world

pytestmark = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))

DATA_MOVERS = (
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


class OnSim(ShardedTrainingTestCase):
    """Ranks with a group for both devices: gloo for the CPU, ours for sim."""

    device_type = "sim"
    world_size = 2
    case_timeout_s = 120.0
    preload = (
        "fsdp_conformance.tests.simulator_collectives",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "torch._dynamo",
    )

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def init_rank(self) -> None:
        super().init_rank()
        torch.set_num_threads(1)
        self.start_process_group()

    def values(self, *numbers: float) -> Tensor:
        return torch.tensor(numbers, device=self.device)

    def found(self) -> list[str]:
        """The hazards so far, which are forgotten."""
        hazards = [f"{hazard.kind.value}: {hazard.sentence()}" for hazard in checker.hazards()]
        checker.clear()
        return hazards

    def assert_kinds(self, expected: list[HazardKind]) -> None:
        kinds = [hazard.kind for hazard in checker.hazards()]
        texts = [hazard.sentence() for hazard in checker.hazards()]
        checker.clear()
        self.assertEqual(expected, kinds, msg=str(texts))

    def assert_same_as_gloo(self, program: Callable[[Values], Outputs], dtype: torch.dtype = torch.float32) -> None:
        expected = program(Values("cpu", dtype))
        got = program(Values("sim", dtype))
        with checker.suspended():
            different = differences(expected, got)
        self.assertEqual([], different)
        self.assertEqual([], self.found())


class Results(OnSim):
    """On two ranks every collective gives gloo's result, bit for bit, and no hazard."""

    def test_programs(self) -> None:
        """Plain, coalesced, point-to-point, functional collectives, and DTensor's."""
        for name, program in PROGRAMS.items():
            with self.subTest(name):
                self.assert_same_as_gloo(program)

    def test_floating_dtypes(self) -> None:
        """Reductions in half and double precision."""
        for dtype in (torch.float64, torch.float16, torch.bfloat16):
            with self.subTest(str(dtype)):
                self.assert_same_as_gloo(collectives, dtype)

    def test_integers(self) -> None:
        """Reductions of integers; their average is truncated, as NCCL's."""
        ops = (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT)
        for dtype in (torch.int64, torch.int32, torch.uint8, torch.int8):
            with self.subTest(str(dtype)):
                self.assert_same_as_gloo(lambda values: collectives(values, ops), dtype)
        average = torch.tensor([3 + self.rank, -3 - self.rank], device=self.device)
        dist.all_reduce(average, op=dist.ReduceOp.AVG)
        self.assertEqual([3, -3], average.tolist())  # 7 / 2 and -7 / 2

    def test_bool(self) -> None:
        """A sum of bools is a logical or, as NCCL's."""
        mine = torch.tensor([False, self.rank == 1, True], device=self.device)
        dist.all_reduce(mine)
        self.assertEqual([False, True, True], mine.tolist())

    def test_what_is_only_moved(self) -> None:
        """Bytes of every dtype that NCCL knows."""
        for dtype in DATA_MOVERS:
            with self.subTest(str(dtype)):
                expected = moves(Values("cpu", torch.float32))
                got = moves(Values("sim", dtype))
                # Gloo does not know all of these, so the float32 run is converted.
                self.assertEqual(expected.keys(), got.keys())
                mine = Values("sim", dtype).given(9)
                whole = got["moved"][1]
                own = whole[9 * self.rank : 9 * (self.rank + 1)]
                self.assertEqual(mine.view(torch.uint8).tolist(), own.view(torch.uint8).tolist())

    def test_complex(self) -> None:
        """Complex numbers are pairs of real ones."""
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            expected, got = Values("cpu", torch.complex64).given(5), Values("sim", torch.complex64).given(5)
            dist.all_reduce(expected, op=op)
            dist.all_reduce(got, op=op)
            self.assertTrue(torch.equal(expected, got.cpu()))
        with self.assertRaisesRegex(ValueError, "complex"):
            dist.all_reduce(Values("sim", torch.complex64).given(5), op=dist.ReduceOp.MAX)

    def test_premultiplied_sum(self) -> None:
        """PREMUL_SUM multiplies what is given, by a number or by a tensor of the device."""
        for factor in (2.0, self.values(2.0)):
            mine = self.values(1.0, 3.0 + self.rank)
            dist.all_reduce(mine, op=_make_nccl_premul_sum(factor))
            self.assertEqual([4.0, 14.0], mine.tolist())

    def test_stacked_gather(self) -> None:
        """The output may have the ranks in a dimension of their own, or be channels-last memory as it lies."""
        stacked = torch.zeros(2, 3, device=self.device)
        all_gather_into_tensor(stacked, self.values(1.0, 2.0, 3.0 + self.rank))
        self.assertEqual([[1.0, 2.0, 3.0], [1.0, 2.0, 4.0]], stacked.tolist())
        image = torch.arange(24.0, device=self.device).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
        expected = image.cpu() * 2
        dist.all_reduce(image)
        self.assertTrue(torch.equal(expected, image.cpu()))

    def test_uneven_lists(self) -> None:
        """Lists of tensors of different sizes, which gloo refuses: NCCL broadcasts and reduces one by one."""
        sizes = [2, 5]
        parts = [torch.zeros(size, device=self.device) for size in sizes]
        dist.all_gather(parts, torch.arange(float(sizes[self.rank]), device=self.device) + 10 * self.rank)
        self.assertEqual([[0.0, 1.0], [10.0, 11.0, 12.0, 13.0, 14.0]], [part.tolist() for part in parts])
        mine = torch.zeros(sizes[self.rank], device=self.device)
        dist.reduce_scatter(mine, [torch.full((size,), 1.0 + self.rank, device=self.device) for size in sizes])
        self.assertEqual([3.0] * sizes[self.rank], mine.tolist())
        # Rank r sends s + 1 elements to rank s.
        parts = [torch.zeros(self.rank + 1, device=self.device) for _ in range(2)]
        dist.all_to_all(parts, [torch.full((peer + 1,), 1.0 + self.rank, device=self.device) for peer in range(2)])
        self.assertEqual([[1.0] * (self.rank + 1), [2.0] * (self.rank + 1)], [part.tolist() for part in parts])
        self.assertEqual([], self.found())


class ResultsOnFour(OnSim):
    """On four ranks, where the order of a sum shows."""

    world_size = 4

    def test_programs(self) -> None:
        """Bit for bit gloo's: in single and in half precision."""
        for dtype in (torch.float32, torch.bfloat16):
            with self.subTest(str(dtype)):
                self.assert_same_as_gloo(collectives, dtype)
        for name in ("coalesced", "functional"):
            with self.subTest(name):
                self.assert_same_as_gloo(PROGRAMS[name])

    def test_groups(self) -> None:
        """new_group, the dimensions of a mesh, and a group of one rank."""
        mesh = init_device_mesh("sim", (2, 2), mesh_dim_names=("replicate", "shard"))
        mine = self.values(1.0 + self.rank)
        dist.all_reduce(mine, group=mesh.get_group("shard"))
        self.assertEqual([[3.0], [3.0], [7.0], [7.0]][self.rank], mine.tolist())
        dist.all_reduce(mine, group=mesh.get_group("replicate"))
        self.assertEqual([10.0], mine.tolist())
        odd = dist.new_group([1, 3], backend="simccl")
        alone = [dist.new_group([rank]) for rank in range(4)][self.rank]
        if self.rank in (1, 3):
            dist.all_reduce(mine, group=odd)
            dist.barrier(group=odd)
        dist.all_reduce(mine, group=alone)
        self.assertEqual([10.0, 20.0, 10.0, 20.0][self.rank], mine.item())
        self.assertEqual([], self.found())


class Streams(OnSim):
    """What waits for what, as ProcessGroupNCCL makes it."""

    def test_missing_wait(self) -> None:
        """An output that is used before the stream waits for the work is a read after a write."""
        output = torch.empty(2, device=self.device)
        work = all_gather_into_tensor(output, self.values(1.0), async_op=True)
        output.add(1)
        self.assert_kinds([HazardKind.READ_AFTER_WRITE])
        work.wait()
        output.add(1)
        self.assert_kinds([])

    def test_input_overwritten(self) -> None:
        """An input that is overwritten before the stream waits is a write after a read."""
        mine, output = self.values(1.0), torch.empty(2, device=self.device)
        work = all_gather_into_tensor(output, mine, async_op=True)
        mine.zero_()
        self.assert_kinds([HazardKind.WRITE_AFTER_READ])
        work.wait()

    def test_wait_is_for_the_current_stream(self) -> None:
        """`Work.wait()` on another stream does not order this one."""
        mine = self.values(1.0)
        work = dist.all_reduce(mine, async_op=True)
        with sim.stream(sim.Stream()):
            work.wait()
        mine.add(1)
        self.assert_kinds([HazardKind.READ_AFTER_WRITE])

    def test_synchronous_calls_are_on_the_current_stream(self) -> None:
        """async_op=False needs no wait there, and orders no other stream."""
        mine, side = self.values(1.0), sim.Stream()
        dist.all_reduce(mine)
        mine.add_(1)
        self.assert_kinds([])
        side.wait_stream(sim.current_stream())
        with sim.stream(side):
            dist.all_reduce(mine)
        mine.add(1)
        self.assert_kinds([HazardKind.READ_AFTER_WRITE])

    def test_issue_waits_for_the_current_stream(self) -> None:
        """What was computed on the current stream before is there; what was computed on another one is not."""
        mine, side = self.values(1.0), sim.Stream()
        dist.all_reduce(mine.mul_(2), async_op=True).wait()
        self.assert_kinds([])
        side.wait_stream(sim.current_stream())
        with sim.stream(side):
            mine.mul_(2)
        dist.all_reduce(mine, async_op=True).wait()
        self.assertEqual(HazardKind.READ_AFTER_WRITE, checker.hazards()[0].kind)
        checker.clear()

    def test_every_wait_can_be_dropped(self) -> None:
        """A study drops the wait at the issue, or that of the Work, by its kind."""
        for kind in (checker.Wait.COLLECTIVE_ISSUE, checker.Wait.WORK_WAIT):
            with self.subTest(str(kind)), checker.wait_filter(lambda wait, *_, kind=kind: wait != kind):
                mine = self.values(1.0).mul_(2)
                dist.all_reduce(mine, async_op=True).wait()
                mine.add(1)
                self.assertNotEqual([], self.found())

    def test_future(self) -> None:
        """The future is complete at once and holds a list of tensors; waiting for it makes a stream wait."""
        mine = self.values(1.0)
        future = dist.all_reduce(mine, async_op=True).get_future()
        self.assertTrue(future.done())
        doubled = future.then(lambda done: done.value()[0] * 2)
        self.assert_kinds([])
        value = future.wait()
        value[0].add(1)
        self.assertEqual([4.0], doubled.wait().tolist())
        self.assert_kinds([])
        self.assertEqual([2.0], value[0].tolist())

    def test_completion(self) -> None:
        """A work that has answered "completed" is over for the host; its result is told."""
        mine = self.values(1.0)
        work = dist.all_reduce(mine, async_op=True)
        while not work.is_completed():
            pass
        side = sim.Stream()
        with sim.stream(side):
            mine.add(1)
        self.assert_kinds([])
        self.assertEqual(0, work.get_future_result().wait())  # c10d::WorkResult::SUCCESS
        self.assertIsNone(work.exception())
        self.assertTrue(work.result()[0] is not None)

    def test_barrier_is_the_hosts(self) -> None:
        """A barrier on the device waits for the current stream; a work's does so when it is waited for."""
        mine, side = torch.zeros(3, device=self.device), sim.Stream()
        mine.add_(1)
        dist.barrier(device_ids=[self.device.index])
        with sim.stream(side):
            mine.add_(1)
        self.assert_kinds([])
        work = dist.barrier(device_ids=[self.device.index], async_op=True)
        sim.current_stream().wait_stream(side)
        work.wait()
        with sim.stream(sim.Stream()):
            mine.add_(1)
        self.assert_kinds([])

    def test_collectives_of_a_group_are_in_order(self) -> None:
        """Two on one group need no wait in between; on two groups they do."""
        mine, other = self.values(1.0), dist.new_group([0, 1])
        first = dist.all_reduce(mine, async_op=True)
        second = dist.all_reduce(mine, async_op=True)
        second.wait()
        self.assert_kinds([])
        third = dist.all_reduce(mine, async_op=True)
        fourth = dist.all_reduce(mine, group=other, async_op=True)
        self.assertEqual(HazardKind.READ_AFTER_WRITE, checker.hazards()[0].kind)
        checker.clear()
        for work in (first, third, fourth):
            work.wait()
        self.assertEqual([16.0], mine.tolist())

    def test_coalesced_works(self) -> None:
        """One work for all calls; without a wait every output is in flight."""
        tensors = [self.values(1.0), self.values(2.0)]
        with dist.distributed_c10d._coalescing_manager(world(), async_ops=True) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        tensors[1].add(1)
        self.assert_kinds([HazardKind.READ_AFTER_WRITE])
        manager.wait()
        tensors[0].add(1)
        self.assert_kinds([])

    def test_messages_have_streams_of_their_own(self) -> None:
        """An unbatched receive is not ordered with the group's collectives; a batched one is."""
        peer = 1 - self.rank
        for batched in (False, True):
            received, mine = torch.zeros(3, device=self.device), self.values(1.0, 2.0, 3.0)
            ops = [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, received, peer)]
            if batched:
                works: list[Any] = dist.batch_isend_irecv(ops)
            else:
                works = [op.op(op.tensor, op.peer) for op in ops]
            work = dist.all_reduce(received, async_op=True)
            kinds = [hazard.kind for hazard in checker.hazards()]
            checker.clear()
            self.assertEqual([] if batched else [HazardKind.READ_AFTER_WRITE], kinds[:1])
            for each in (*works, work):
                each.wait()
            self.assertEqual([2.0, 4.0, 6.0], received.tolist())

    def test_poison(self) -> None:
        """In poison mode what a race touches becomes NaN, on the ranks that raced."""
        with checker.mode(checker.Mode.POISON):
            mine = self.values(1.0)
            work = dist.all_reduce(mine, async_op=True)
            raced = mine.add(1)
            work.wait()
            self.assertTrue(raced.isnan().all().item())
            self.assertEqual([2.0], mine.tolist())
        checker.clear()


class Memory(OnSim):
    """Who holds what a collective uses."""

    def allocated(self) -> int:
        gc.collect()
        return int(sim.memory_allocated(self.device))

    def test_a_work_holds_its_tensors_until_it_is_waited_for(self) -> None:
        """Dropped references do not free memory in flight; `wait` does."""
        before = self.allocated()
        mine, output = torch.zeros(256, device=self.device), torch.empty(512, device=self.device)
        work = all_gather_into_tensor(output, mine, async_op=True)
        del mine
        self.assertEqual(before + 3072, self.allocated())
        work.wait()
        self.assertEqual(before + 2048, self.allocated())

    def test_a_dropped_work_holds_until_the_host_knows(self) -> None:
        """As NCCL's watchdog: released at the next collective after the host has waited."""
        before = self.allocated()
        mine = torch.zeros(256, device=self.device)
        dist.all_reduce(mine, async_op=True)
        del mine
        self.assertEqual(before + 1024, self.allocated())
        sim.synchronize()
        dist.all_reduce(torch.zeros(1, device=self.device), async_op=True).wait()
        self.assertEqual(before, self.allocated())
        self.assertEqual([], self.found())

    def test_memory_that_is_freed_by_hand_in_flight(self) -> None:
        """A storage that is resized away under a running collective is a hazard where the memory is used again."""
        mine = torch.zeros(256, device=self.device)
        work = dist.all_reduce(mine, async_op=True)
        mine.untyped_storage().resize_(0)
        torch.zeros(256, device=self.device)
        self.assertIn(HazardKind.REUSE_IN_FLIGHT, [hazard.kind for hazard in checker.hazards()])
        checker.clear()
        work.wait()

    def test_a_list_is_gathered_through_a_buffer(self) -> None:
        """As NCCL: the peak has the size of the list once more."""
        parts = [torch.empty(256, device=self.device) for _ in range(2)]
        mine = torch.zeros(256, device=self.device)
        sim.reset_peak_memory_stats(self.device)
        before = self.allocated()
        dist.all_gather(parts, mine)
        self.assertEqual(before + 2048, sim.max_memory_allocated(self.device))
        self.assertEqual(before, self.allocated())


class Host(OnSim):
    """The host does not wait where it would not on an accelerator."""

    def test_groups_in_opposite_orders(self) -> None:
        """Each rank issues the collectives of two groups in an order of its own."""
        groups = [dist.new_group([0, 1]) for _ in range(2)]
        tensors = [self.values(1.0 + self.rank), self.values(10.0)]
        works = {}
        for index in (0, 1) if self.rank == 0 else (1, 0):
            works[index] = dist.all_reduce(tensors[index], group=groups[index], async_op=True)
        for index in (0, 1):
            works[index].wait()
        self.assertEqual([3.0, 20.0], [tensor.item() for tensor in tensors])
        side = sim.Stream()
        side.wait_stream(sim.current_stream())
        for index in (0, 1) if self.rank == 0 else (1, 0):
            with sim.stream(side if index else sim.current_stream()):
                dist.all_reduce(tensors[index], group=groups[index])
        sim.current_stream().wait_stream(side)
        self.assertEqual([6.0, 40.0], [tensor.item() for tensor in tensors])
        self.assertEqual([], self.found())

    def test_hosts_talk_in_between(self) -> None:
        """A rank that goes on after its call, and only then lets the other one come, is no deadlock."""
        mine, output, store = (
            self.values(1.0 + self.rank),
            torch.empty(2, device=self.device),
            PrefixStore("talk", dist.distributed_c10d._get_default_store()),
        )
        if self.rank == 1:
            store.wait(["issued"], timedelta(seconds=60))
        all_gather_into_tensor(output, mine)
        work = dist.all_reduce(mine, async_op=True)
        work.wait()
        if self.rank == 0:
            store.set("issued", "yes")
        self.assertEqual([1.0, 2.0], output.tolist())
        self.assertEqual([3.0], mine.tolist())

    def test_the_host_waits_for_the_peers(self) -> None:
        """Synchronising the device, a stream or an event returns when the peers have come: programs rely on it."""
        store = PrefixStore("peers", dist.distributed_c10d._get_default_store())
        mine = self.values(1.0)
        for wait in ("device", "stream", "event", "item"):
            other = self.values(3.0)
            if self.rank == 1:
                store.set(wait, "rank 1 comes to its call")
            dist.all_reduce(mine)
            event = sim.Event()
            event.record()
            match wait:
                case "device":
                    sim.synchronize()
                case "stream":
                    sim.current_stream().synchronize()
                case "event":
                    event.synchronize()
                case "item":
                    other.item()  # Of another tensor: it waits for its stream.
            self.assertTrue(store.check([wait]), msg=wait)

    def test_queries(self) -> None:
        """While the peer has yet to come, neither the work nor an event after it is over."""
        store = PrefixStore("queries", dist.distributed_c10d._get_default_store())
        if self.rank == 1:
            store.wait(["asked"], timedelta(seconds=60))
        mine = self.values(1.0)
        work = dist.all_reduce(mine, async_op=True)
        work.wait()
        event = sim.Event()
        event.record()
        if self.rank == 0:
            answers = [work.is_completed(), event.query(), sim.current_stream().query()]
            store.set("asked", "yes")
            self.assertEqual([False, False, False], answers)
        sim.synchronize()
        self.assertEqual([True, True, True], [work.is_completed(), event.query(), sim.current_stream().query()])
        self.assertEqual([2.0], mine.tolist())

    def test_a_timeout_is_the_hosts(self) -> None:
        """`wait(timeout)` blocks the host; a work that is too late takes its group down."""
        group = dist.new_group([0, 1])
        mine = self.values(1.0)
        self.assertTrue(dist.all_reduce(mine, async_op=True).wait(timedelta(seconds=60)))
        with sim.stream(sim.Stream()):
            mine.add(1)  # The host knows that it is over.
        self.assertEqual([], self.found())
        if self.rank == 0:
            work = dist.all_reduce(mine, group=group, async_op=True)
            with self.assertRaisesRegex(dist.DistBackendError, "collective operation timeout: .*OpType=ALLREDUCE"):
                work.wait(timedelta(milliseconds=50))
            with self.assertRaisesRegex(dist.DistBackendError, "after a failure"):
                dist.all_reduce(mine, group=group)
        checker.clear()

    def test_the_groups_timeout(self) -> None:
        """Who needs a result that does not come is told what it was, after the group's timeout."""
        group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
        if self.rank == 0:
            mine = self.values(1.0)
            dist.all_reduce(mine, group=group)
            with self.assertRaisesRegex(dist.DistBackendError, r"all_reduce\(SUM, 1 Float\)"):
                mine.item()
        dist.barrier()

    def test_abort(self) -> None:
        """After an abort every call of the group fails, and the others go on."""
        group = dist.new_group([0, 1])
        group.abort()
        with self.assertRaisesRegex(dist.DistBackendError, "was aborted on rank"):
            dist.all_reduce(self.values(1.0), group=group)
        mine = self.values(1.0)
        dist.all_reduce(mine)
        self.assertEqual([2.0], mine.tolist())


class Refusals(OnSim):
    """Wrong use gives the error that users of NCCL know, with the tensor."""

    def refused(
        self, error: type[Exception], text: str, call: Callable[..., object], *args: Any, **kwargs: Any
    ) -> None:
        with self.subTest(text), self.assertRaisesRegex(error, text):
            call(*args, **kwargs)

    def test_refusals(self) -> None:
        """Layout, device, dtype, size, reduction, roots."""
        matrix = torch.zeros(4, 4, device=self.device)
        four, eight = torch.zeros(4, device=self.device), torch.zeros(8, device=self.device)
        ints, shorts = four.to(torch.int32), four.to(torch.int16)
        contiguous = r"Tensors must be contiguous, but got the "
        self.refused(
            ValueError, contiguous + r"tensor of shape \[4, 4\], strides \[1, 4\]", dist.all_reduce, matrix.t()
        )
        self.refused(
            ValueError,
            contiguous + "input tensor",
            all_gather_into_tensor,
            torch.zeros(32, device=self.device),
            matrix.t(),
        )
        self.refused(
            ValueError,
            contiguous + "output tensor",
            reduce_scatter_tensor,
            matrix[:, :2].t(),
            torch.zeros(16, device=self.device),
        )
        self.refused(
            ValueError,
            "on sim and dense, but got the output tensor .* on cpu",
            all_gather_into_tensor,
            torch.zeros(8),
            four,
        )
        self.refused(TypeError, "must have the same type", all_gather_into_tensor, eight.to(torch.int32), four)
        self.refused(
            ValueError, "must be equal to world_size times input tensor size", all_gather_into_tensor, four, four
        )
        self.refused(ValueError, "output size times world size", reduce_scatter_tensor, four, four)
        self.refused(ValueError, r"BAND with NCCL", dist.all_reduce, ints, dist.ReduceOp.BAND)
        self.refused(TypeError, r"not supported .*: tensor of shape \[4\].* Short", dist.all_reduce, shorts)
        self.refused(TypeError, "AVG with boolean", dist.all_reduce, four.to(torch.bool), dist.ReduceOp.AVG)
        self.refused(RuntimeError, "Float8", dist.all_reduce, four.to(torch.float8_e4m3fn))
        backend: Any = world()._get_backend(self.device)
        self.refused(NotImplementedError, "recvAnysource", backend.recv_anysource, [four], 0)
        self.refused(ValueError, r"len\(tensor_list\)=1", dist.all_gather, [four], four)
        self.assertEqual([], self.found())


class Seams(OnSim):
    """The backend is one like torch's own."""

    def test_names(self) -> None:
        """What torch says of the group, its options, sequence numbers."""
        backend: Any = world()._get_backend(self.device)
        self.assertEqual("simccl", backend.name())
        self.assertEqual("gloo", world()._get_backend(torch.device("cpu")).name())
        self.assertTrue(backend.supports_coalescing)
        self.assertEqual("simccl", dist.get_backend(dist.new_group([0, 1], backend="simccl")))
        before = backend._get_sequence_number_for_group()
        dist.all_reduce(self.values(1.0))
        self.assertEqual(before + 1, backend._get_sequence_number_for_group())
        self.assertIsNot(copy.deepcopy(backend.options), backend.options)

    def test_recording(self) -> None:
        """A recording group wraps it as it wraps NCCL, with the same numbers and no hazard."""
        expected = collectives(Values("sim"))
        destroy_process_group()
        register_recording_backend("sim")
        self.file_name += "-recording"
        self.start_process_group(BACKEND)
        got = collectives(Values("sim"))
        point_to_point(Values("sim"))
        with checker.suspended():
            self.assertEqual([], differences(expected, got))
        self.assertTrue(is_recording())
        self.assertIn("all_reduce 4148B float32 AVG [0,1]", log().schedule())
        self.assertEqual({"sim", ""}, {record.device for record in log().records})  # A barrier has no tensors.
        self.assertEqual([], self.found())


class Bound(OnSim):
    """A default group that is bound to its device."""

    def init_rank(self) -> None:
        ShardedTrainingTestCase.init_rank(self)
        torch.set_num_threads(1)
        dist.init_process_group(
            "cpu:gloo,sim:simccl",
            init_method=self.init_method,
            rank=self.rank,
            world_size=self.world_size,
            device_id=self.device,
        )

    def test_split(self) -> None:
        """`split_group` gives a group of the same backends; so does splitting it again."""
        for _ in range(2):
            part = dist.split_group(None, [[0, 1]])
            assert part is not None
            self.assertEqual("simccl", part._get_backend(self.device).name())
            mine = self.values(1.0)
            dist.all_reduce(mine, group=part)
            self.assertEqual([2.0], mine.tolist())

    def test_messages_are_on_the_groups_stream(self) -> None:
        """As NCCL's, which has one communicator then: a receive is ordered with collectives."""
        received = torch.zeros(3, device=self.device)
        mine = self.values(1.0, 2.0, 3.0)
        peer = 1 - self.rank
        works = [dist.isend(mine, peer), dist.irecv(received, peer)]
        dist.all_reduce(received, async_op=True).wait()
        self.assertEqual([2.0, 4.0, 6.0], received.tolist())
        for work in works:
            assert work is not None
            work.wait()
        self.assert_kinds([])


def wrapped(engine: str, model: nn.Module, device: torch.device) -> nn.Module:
    """The model under one of torch's engines."""
    match engine:
        case "ddp":
            return DistributedDataParallel(model)
        case "fsdp1":
            return FullyShardedDataParallel(
                model,
                auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
                device_id=device,
                use_orig_params=True,
            )
        case _:
            assert isinstance(model, ThreeLinear)
            mesh = init_device_mesh(device.type, (dist.get_world_size(),))
            for layer in model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            return model


def train(engine: str, device: torch.device, steps: int = 3) -> list[Tensor]:
    """The losses of a rank, on the CPU."""
    model = wrapped(engine, ThreeLinear().to(device), device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(steps):
        batch = torch.randn(4, 5, generator=generator).to(device, non_blocking=True)
        loss = model(batch).square().mean()
        losses.append(loss.detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if device.type == "cpu":
        return losses
    with checker.suspended():
        return [loss.cpu() for loss in losses]


class Training(OnSim):
    """torch's engines train on it, to the bit as on the CPU with gloo, and without a hazard."""

    def test_engines(self) -> None:
        """DDP, FSDP1 and FSDP2."""
        for engine in ("ddp", "fsdp1", "fsdp2"):
            with self.subTest(engine):
                expected = train(engine, torch.device("cpu"))
                accesses = checker.accesses()
                got = train(engine, self.device)
                self.assertEqual([loss.item() for loss in expected], [loss.item() for loss in got])
                self.assertEqual([], self.found())
                self.assertGreater(checker.accesses(), accesses + 100)
                with checker.without_waits():
                    train(engine, self.device)
                    self.assertGreater(checker.num_hazards(), 0, msg="the positive control")
                checker.clear()


class TrainingOnFour(Training):
    """The same on four ranks."""

    world_size = 4
