"""Collectives of the simulated accelerator run on streams like NCCL's: what waits, and what keeps memory alive."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_conformance.simulator import checker
from fsdp_conformance.simulator.checker.hazard import HazardKind
from fsdp_conformance.simulator.device import torch_sim as sim
from fsdp_conformance.tests.harness.recording.small_training import world
from fsdp_conformance.tests.simulator.simulator_collectives import all_gather_into_tensor
from fsdp_conformance.tests.simulator.simulator_ranks import OnSim, compiled
from fsdp_conformance.tests.torch_versions import not_on_old

pytestmark = compiled


class Streams(OnSim):
    """The waits of ProcessGroupNCCL."""

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
        """A collective waits for earlier work on the current stream, but not on other streams."""
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

    def test_future_of_an_all_gather(self) -> None:
        """
        Of equal tensors it holds one tensor, as NCCL's has its buffer, and gives the same each time; of uneven ones the
        list.
        """
        mine = self.values(1.0)
        equal = [torch.empty_like(mine) for _ in range(self.world_size)]
        work = dist.all_gather(equal, mine.add(self.rank), async_op=True)
        (stacked,) = work.get_future().wait()
        self.assertEqual((self.world_size, *mine.shape), stacked.shape)
        self.assertEqual([float(rank + 1) for rank in range(self.world_size)], stacked[:, 0].tolist())
        self.assertEqual(stacked.data_ptr(), work.get_future().wait()[0].data_ptr())
        work.wait()
        self.assertEqual(stacked.tolist(), torch.stack(equal).tolist())
        uneven = [torch.empty(rank + 1, device=self.device) for rank in range(self.world_size)]
        own = torch.full((self.rank + 1,), 2.0, device=self.device)
        value = dist.all_gather(uneven, own, async_op=True).get_future().wait()
        self.assertEqual([rank + 1 for rank in range(self.world_size)], [len(each) for each in value])
        self.assert_kinds([])

    def test_completion(self) -> None:
        """After is_completed() is true, the host knows that the collective has run; result() has its tensors."""
        mine = self.values(1.0)
        work = dist.all_reduce(mine, async_op=True)
        while not work.is_completed():
            pass
        side = sim.Stream()
        with sim.stream(side):
            mine.add(1)
        self.assert_kinds([])
        self.assertEqual(0, work.get_future_result().wait())  # c10d::WorkResult::SUCCESS
        with contextlib.suppress(TypeError):  # Up to torch 2.10 it has no type in Python.
            self.assertIsNone(work.exception())
        self.assertTrue(work.result()[0] is not None)

    @pytest.mark.nightly
    @not_on_old
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

    @pytest.mark.nightly
    def test_collectives_of_a_group_are_in_order(self) -> None:
        """Two collectives of one group need no wait in between; two of different groups do."""
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

    @pytest.mark.slow
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

    @not_on_old
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
    """Objects that keep the memory of a collective alive."""

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
        for wait_for_future in (False, True):  # DistributedDataParallel waits for futures, and never for the Work
            for async_op in (False, True):
                with self.subTest(wait_for_future=wait_for_future, async_op=async_op):
                    before = self.allocated()
                    mine = torch.zeros(256, device=self.device)
                    work = dist.all_reduce(mine, async_op=True)
                    if wait_for_future:
                        work.get_future().wait()
                    del mine, work
                    self.assertEqual(before + 1024, self.allocated())
                    sim.synchronize()
                    self.assertEqual(before + 1024, self.allocated())
                    later = dist.all_reduce(torch.zeros(1, device=self.device), async_op=async_op)
                    if async_op:
                        later.wait()
                    del later
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
        """As with NCCL, the peak includes the size of the list a second time."""
        parts = [torch.empty(256, device=self.device) for _ in range(2)]
        mine = torch.zeros(256, device=self.device)
        sim.reset_peak_memory_stats(self.device)
        before = self.allocated()
        dist.all_gather(parts, mine)
        self.assertEqual(before + 2048, sim.max_memory_allocated(self.device))
        self.assertEqual(before, self.allocated())
