"""The recorder on the simulated accelerator: what is recorded is what streams and the host have waited for."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fsdp_conformance.driver.overlap import OverlapRecorder
from fsdp_conformance.harness.context import log
from fsdp_conformance.harness.recording.process_group import BACKEND, register_recording_backend
from fsdp_conformance.harness.testcase import ShardedTrainingTestCase
from fsdp_conformance.simulator.device import torch_sim as sim
from fsdp_conformance.tests.simulator.simulator_collectives import all_gather_into_tensor
from fsdp_conformance.tests.simulator.simulator_ranks import SimulatedRanks, compiled
from fsdp_conformance.tests.torch_versions import OLD

pytestmark = compiled


class Recorded(SimulatedRanks):
    """One kernel, and collectives during it, after it and before it."""

    def init_rank(self) -> None:
        ShardedTrainingTestCase.init_rank(self)
        torch.set_num_threads(1)
        register_recording_backend(self.device_type)
        self.start_process_group(BACKEND)

    def test_relations(self) -> None:
        """On the stream that computes, on another one, and with a host that waits in between."""
        gathered, mine = torch.empty(2, device=self.device), torch.ones(1, device=self.device)
        side = sim.Stream()
        side.wait_stream(sim.current_stream())
        recorder = OverlapRecorder(self.device)
        observers = len(log().observers)
        with recorder, log().phase("forward", 3):
            kernel = mine + 1
            recorder.compute()
            with sim.stream(side):
                during = all_gather_into_tensor(gathered, mine, async_op=True)
            behind = all_gather_into_tensor(torch.empty(2, device=self.device), kernel, async_op=True)
            behind.wait()
            kernel.add_(1)
            recorder.compute()
            sim.synchronize()
            with sim.stream(side):
                after_host = dist.all_reduce(torch.ones(1, device=self.device), async_op=True)
        after_host.wait()
        during.wait()
        self.assertEqual(observers, len(log().observers))

        first, second = recorder.work.computed
        one, two, three = recorder.work.communicated
        self.assertEqual(["all_gather", "all_gather", "all_reduce"], [each.op for each in recorder.work.communicated])
        self.assertEqual({("forward", 3)}, {(each.phase, each.step) for each in (first, second, one, two, three)})
        self.assertEqual([0, 1, 2, 3, 4], [each.order for each in (first, one, two, second, three)])
        self.assertTrue(one.may_overlap(first))
        self.assertTrue(two.waits_for(first))
        self.assertFalse(two.may_overlap(first))
        # It has waited for the second gather, and so for the one before it on the group's stream.
        self.assertTrue(second.waits_for(two))
        self.assertTrue(second.waits_for(one))
        self.assertTrue(three.waits_for(second))
        self.assertGreaterEqual(three.known_to_host[second.stream], second.number)
        self.assertLess(two.known_to_host[second.stream : second.stream + 1] or (0,), (second.number,))

    @pytest.mark.nightly
    def test_a_synchronous_collective(self) -> None:
        """It is an operation of the current stream, after all that came before."""
        recorder = OverlapRecorder(self.device)
        with recorder:
            kernel = torch.ones(1, device=self.device) + 1
            recorder.compute()
            dist.all_reduce(kernel)
            kernel.add_(1)
            recorder.compute()
        first, second = recorder.work.computed
        (collective,) = recorder.work.communicated

        if not OLD:  # there it runs on the group's own stream, as with NCCL of that time
            self.assertEqual(first.stream, collective.stream)
        self.assertTrue(collective.waits_for(first))
        self.assertTrue(second.waits_for(collective))

    @pytest.mark.slow
    def test_collectives_of_the_cpu(self) -> None:
        """They have no stream, and are left out."""
        recorder = OverlapRecorder(self.device)
        with recorder:
            dist.all_reduce(torch.ones(1))

        self.assertEqual([], recorder.work.communicated)
