"""The host issues collectives of the simulated accelerator and goes on: it waits where it would with NCCL."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from fsdp_conformance.simulator import checker
from fsdp_conformance.simulator.device import torch_sim as sim
from fsdp_conformance.tests.simulator.simulator_collectives import all_gather_into_tensor
from fsdp_conformance.tests.simulator.simulator_ranks import OnSim, compiled
from fsdp_conformance.tests.torch_versions import not_on_old

pytestmark = [compiled, pytest.mark.slow]


class Host(OnSim):
    """The host waits only where it would wait on an accelerator."""

    def test_groups_in_opposite_orders(self) -> None:
        """Each rank issues the collectives of two groups in a different order."""
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
        """A rank may continue after its call and only then let the other rank make its call."""
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
        """Until the peer comes, neither the Work nor an event after it is complete."""
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

    @pytest.mark.nightly
    @pytest.mark.slow
    def test_a_timeout_is_the_hosts(self) -> None:
        """`wait(timeout)` blocks the host; a Work that is too late takes its group down."""
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

    @pytest.mark.slow
    def test_the_groups_timeout(self) -> None:
        """Waiting for a missing result raises after the group's timeout and names the collective."""
        # The timeout also applies to creating the group, so all ranks must arrive at about the same time.
        dist.barrier()
        group = dist.new_group([0, 1], timeout=timedelta(seconds=3))
        if self.rank == 0:
            mine = self.values(1.0)
            dist.all_reduce(mine, group=group)
            with self.assertRaisesRegex(dist.DistBackendError, r"all_reduce\(SUM, 1 Float\)"):
                mine.item()
        dist.barrier()

    @pytest.mark.nightly
    @not_on_old
    def test_abort(self) -> None:
        """After an abort every call of the group fails, and the others go on."""
        group = dist.new_group([0, 1])
        group.abort()
        with self.assertRaisesRegex(dist.DistBackendError, "was aborted on rank"):
            dist.all_reduce(self.values(1.0), group=group)
        mine = self.values(1.0)
        dist.all_reduce(mine)
        self.assertEqual([2.0], mine.tolist())
