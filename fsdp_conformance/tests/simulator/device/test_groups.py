"""The process group of the simulated accelerator is a backend like torch's own, recorded and bound to a device."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_conformance.harness.context import log
from fsdp_conformance.harness.rank import destroy_process_group
from fsdp_conformance.harness.recording.process_group import BACKEND, is_recording, register_recording_backend
from fsdp_conformance.harness.testcase import ShardedTrainingTestCase
from fsdp_conformance.simulator import checker
from fsdp_conformance.tests.harness.recording.small_training import world
from fsdp_conformance.tests.simulator.simulator_collectives import Values, collectives, differences, point_to_point
from fsdp_conformance.tests.simulator.simulator_ranks import OnSim, compiled
from fsdp_conformance.tests.torch_versions import OLD, not_on_old

pytestmark = compiled

SPLITS_ONLY_CUDA = 'parent_pg._get_backend(torch.device("cuda"))' in inspect.getsource(dist.split_group)


class Seams(OnSim):
    """The backend is one like torch's own."""

    @pytest.mark.slow
    def test_names(self) -> None:
        """torch reports the group's name, its options and sequence numbers."""
        backend: Any = world()._get_backend(self.device)
        self.assertEqual("simccl", backend.name())
        self.assertEqual("gloo", world()._get_backend(torch.device("cpu")).name())
        self.assertTrue(OLD or backend.supports_coalescing)
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
        self.assertIn(f"all_reduce 4148B float32 {'MAX' if OLD else 'AVG'} [0,1]", log().schedule())
        self.assertEqual({"sim", ""}, {record.device for record in log().records})  # A barrier has no tensors.
        self.assertEqual([], self.found())


@not_on_old
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

    @pytest.mark.skipif(SPLITS_ONLY_CUDA, reason=f"split_group of torch {torch.__version__} asks for a backend of CUDA")
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
