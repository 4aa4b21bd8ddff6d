"""The seam: what is recorded of a call, what an observer may do to it, what a recording group answers for itself."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore, _resolve_process_group
from torch.distributed import ProcessGroup, Work, distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from fsdp_conformance.errors import ConfigError, SuiteError
from fsdp_conformance.harness.context import log
from fsdp_conformance.harness.recording.collective_log import CollectiveObserver
from fsdp_conformance.harness.recording.process_group import (
    BACKEND,
    RecordingProcessGroup,
    is_recording,
    register_recording_backend,
    require_recording,
    unregister_recording_backend,
)
from fsdp_conformance.harness.testcase import ShardedTrainingTestCase
from fsdp_conformance.history.collective import CollectiveRecord, Op
from fsdp_conformance.tests.harness.recording import small_training
from fsdp_conformance.tests.harness.recording.small_training import world
from fsdp_conformance.tests.torch_versions import as_since_2_10


class HeldBack(Work):
    """
    A Work whose outputs are poisoned until it is waited for: the smallest fault of this kind that there can be.

    The collective is over before anything is poisoned, and its result is kept aside.
    """

    def __init__(self, inner: Work, outputs: tuple[Tensor, ...]) -> None:
        super().__init__()
        inner.wait()
        self.inner = inner
        self.outputs = outputs
        self.results = [output.clone() for output in outputs]
        for output in outputs:
            output.fill_(float("nan"))
        self.future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        self.waited = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Deliver the result."""
        if not self.waited:
            self.waited = True
            for output, result in zip(self.outputs, self.results, strict=True):
                output.copy_(result)
            self.future.set_result(list(self.outputs))
        return True

    def get_future(self) -> Any:
        """Resolves to the list of tensors, as DDP's reducer wants it; it never calls `wait`."""
        self.wait()
        return self.future


class Recorder(CollectiveObserver):
    """Notes in which order it was called, and holds back the results of one op."""

    def __init__(self, held: Op | None = None) -> None:
        self.calls: list[tuple[str, Op]] = []
        self.held = held
        self.tensors: list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = []
        self.works: list[Work | None] = []

    def before(self, record: CollectiveRecord, group: ProcessGroup) -> None:
        """Note it."""
        self.calls.append(("before", record.op))

    def wrap_work(
        self, record: CollectiveRecord, work: Work, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]
    ) -> Work:
        """Note it, and hold the result back if it is of the op."""
        self.calls.append(("wrap", record.op))
        self.tensors.append((inputs, outputs))
        return HeldBack(work, outputs) if record.op is self.held else work

    def after(self, record: CollectiveRecord, work: Work | None) -> None:
        """Note it."""
        self.calls.append(("after", record.op))
        self.works.append(work)


class Refusing(CollectiveObserver):
    """Raises before a collective, on every rank."""

    def before(self, record: CollectiveRecord, group: ProcessGroup) -> None:
        """Refuse it."""
        raise ConnectionError(f"{record.op} refused")


class Seam(ShardedTrainingTestCase):
    """Two ranks on recording groups."""

    world_size = 2
    preload = ("fsdp_conformance.tests.harness.recording.small_training",)

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def _start(self, observer: CollectiveObserver | None = None) -> None:
        register_recording_backend()
        self.start_process_group(BACKEND)
        if observer is not None:
            log().observers.append(observer)

    def test_observer_order_and_tensors(self) -> None:
        """An observer is called before the issue, with the caller's own tensors after it, and last with the Work."""
        observer = Recorder()
        self._start(observer)
        output, mine = torch.zeros(4), torch.ones(2)
        work = dist.all_gather_into_tensor(output, mine, async_op=True)
        work.wait()

        self.assertEqual([("before", Op.ALL_GATHER), ("wrap", Op.ALL_GATHER), ("after", Op.ALL_GATHER)], observer.calls)
        self.assertIs(mine, observer.tensors[0][0][0])
        self.assertIs(output, observer.tensors[0][1][0])
        self.assertIs(work, observer.works[0])

    def test_wrapped_work_in_python(self) -> None:
        """The caller gets what wrap_work returns: here the output is not there before the wait."""
        self._start(Recorder(held=Op.ALL_GATHER))
        output = torch.zeros(4)
        work = dist.all_gather_into_tensor(output, torch.full((2,), float(self.rank)), async_op=True)

        self.assertIsInstance(work, HeldBack)
        self.assertTrue(output.isnan().all())
        work.wait()
        self.assertEqual(torch.tensor([0.0, 0.0, 1.0, 1.0]), output)

    def test_wrapped_work_under_ddp(self) -> None:
        """DDP's reducer, in C++, takes its gradients from a wrapped Work's future."""
        self._start()
        expected = small_training.train("ddp")
        observer = Recorder(held=Op.ALL_REDUCE)
        log().observers.append(observer)

        small_training.train("ddp").assert_bitwise_equal(expected)
        self.assertEqual(small_training.STEPS, observer.calls.count(("wrap", Op.ALL_REDUCE)))
        self.assertTrue(all(work.waited for work in observer.works if isinstance(work, HeldBack)))

    @pytest.mark.slow
    def test_wrapped_work_under_fsdp2(self) -> None:
        """FSDP2 waits for its gathers and reductions, so that results held back until the wait change nothing."""
        self._start()
        expected = small_training.train("fsdp2_reshard")
        for op in (Op.ALL_GATHER, Op.REDUCE_SCATTER):
            observer = Recorder(held=op)
            log().observers[:] = [observer]

            small_training.train("fsdp2_reshard").assert_bitwise_equal(expected)
            self.assertIn(("wrap", op), observer.calls)

    def test_wrapped_work_of_a_functional_collective(self) -> None:
        """wait_tensor, in C++, waits for a wrapped Work."""
        self._start(Recorder(held=Op.ALL_REDUCE))
        result = functional.wait_tensor(functional.all_reduce(torch.full((3,), 2.0), "sum", world()))

        self.assertEqual(torch.full((3,), 4.0), result)

    def test_observer_that_raises(self) -> None:
        """An observer's exception reaches the caller; the collective was not issued, but is in the log."""
        refusing = Refusing()
        self._start(refusing)
        with self.assertRaisesRegex(ConnectionError, "all_reduce refused"):
            dist.all_reduce(torch.ones(1))
        log().observers.remove(refusing)
        mine = torch.ones(1)
        dist.all_reduce(mine)

        self.assertEqual(2.0, mine.item())
        self.assertEqual([Op.ALL_REDUCE, Op.ALL_REDUCE], [record.op for record in log().records])

    def test_identity(self) -> None:
        """A recording group answers as the group that it stands for: backend, names, devices, store."""
        self._start()
        group = world()
        part = dist.new_group([self.rank], use_local_synchronization=True, group_desc="alone")

        self.assertEqual("gloo", dist.get_backend())
        self.assertEqual("gloo", group._get_backend_name())
        self.assertIsInstance(group._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)
        self.assertTrue(type(part) is RecordingProcessGroup)
        self.assertEqual("alone", part.group_desc)
        self.assertEqual((self.rank,), part.global_ranks())
        self.assertIs(part, _resolve_process_group(part.group_name))
        self.assertEqual(["0", "default_pg"], [group.group_name, group.group_desc])
        part.get_group_store().set("key", "value")
        self.assertEqual(b"value", part.get_group_store().get("key"))
        self.assertTrue(dist.is_backend_available(BACKEND))

    def test_isinstance_of_any_group(self) -> None:
        """Inside torch, a group that does not record still counts as a process group."""
        self._start()
        plain = ProcessGroup(HashStore(), 0, 1)
        require_recording()

        self.assertIsInstance(plain, distributed_c10d.ProcessGroup)
        self.assertNotIsInstance(3, distributed_c10d.ProcessGroup)
        self.assertFalse(is_recording(plain))
        with self.assertRaisesRegex(SuiteError, "is a ProcessGroup, not a RecordingProcessGroup"):
            require_recording(plain)

    def test_split(self) -> None:
        """A split of a recording group records."""
        register_recording_backend()
        # As "gloo" it would speak for cpu and cuda, and torch 2.13 splits such a group twice under one name.
        self.start_process_group("cpu:gloo")
        # dist.split_group wants an accelerator; the method of the group, which it calls, does not.
        name: Any = "part"
        ten_s = timedelta(seconds=10)
        part = world().split_group([0, 1], timeout=ten_s, group_name=name, group_desc="a part")
        mine = torch.ones(3)
        assert part is not None, "rank 0 and rank 1 are both in the part"
        part.allreduce([mine]).wait()

        self.assertTrue(type(part) is RecordingProcessGroup)
        self.assertEqual(("part", "a part", 2), (part.group_name, part.group_desc, part.size()))
        self.assertEqual(torch.full((3,), 2.0), mine)
        self.assertEqual(["all_reduce 12B float32 SUM [0,1]"], log().schedule())

    def test_every_form_of_a_call(self) -> None:
        """Options, reduce ops by position or by keyword, single tensors and lists are told apart as torch does it."""
        self._start()
        group, mine = world(), torch.ones(2)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        group.allreduce([mine], options).wait()
        group.allreduce([mine], opts=options).wait()
        group.allreduce([mine], dist.ReduceOp.MIN).wait()
        group.allreduce(tensor=mine, op=dist.ReduceOp.PRODUCT).wait()
        group.allreduce(mine).wait()
        group.broadcast(mine, root=0).wait()
        group.allgather(output_tensors=[torch.ones(2), torch.ones(2)], input_tensor=mine).wait()
        group.reduce_scatter(torch.ones(1), [torch.ones(1), torch.ones(1)], dist.ReduceOp.SUM).wait()

        self.assertExpectedInline(
            "\n".join(log().schedule()),
            """\
all_reduce 8B float32 MAX [0,1]
all_reduce 8B float32 MAX [0,1]
all_reduce 8B float32 MIN [0,1]
all_reduce 8B float32 PRODUCT [0,1]
all_reduce 8B float32 SUM [0,1]
broadcast 8B float32 [0,1]
all_gather 16B float32 [0,1]
reduce_scatter 8B float32 SUM [0,1]""",
        )

    def test_sparse_gradients(self) -> None:
        """DDP's sparse gradients are reduced; their bytes are those of indices and values."""
        self._start()
        torch.manual_seed(0)
        model = nn.Embedding(10, 3, sparse=True)
        module = DistributedDataParallel(model)
        module(torch.tensor([self.rank, 4])).sum().backward()

        assert model.weight.grad is not None, "no gradient"
        self.assertEqual([0, 1, 4], model.weight.grad.coalesce().indices()[0].tolist())
        # Two rows on each rank: 2 indices of 8 bytes, 6 values of 4.
        self.assertEqual([40], [record.nbytes for record in log().records if record.op is Op.ALL_REDUCE])

    def test_mixed_dtypes(self) -> None:
        """A coalesced collective of several dtypes names them all."""
        self._start()
        tensors = [torch.ones(2), torch.ones(2, dtype=torch.bfloat16)]
        with self.assertRaises(RuntimeError):
            world().allreduce_coalesced(tensors).wait()

        self.assertEqual(["all_reduce 12B bfloat16/float32 SUM [0,1]"], log().schedule())

    @as_since_2_10
    def test_timeout_is_the_group_s_own(self) -> None:
        """A group's timeout reaches its backend: a collective that a peer leaves out ends with an error, not a hang."""
        self._start()
        group = dist.new_group([0, 1])
        dist.barrier(group=group)
        log().clear()
        if self.rank == 0:
            distributed_c10d._set_pg_timeout(timedelta(milliseconds=200), group)
            with self.assertRaises(RuntimeError):
                dist.all_reduce(torch.ones(1), group=group)
            self.assertEqual([Op.ALL_REDUCE], [record.op for record in log().records])
        dist.barrier()

    @pytest.mark.nightly
    def test_destroyed_groups_leave_nothing(self) -> None:
        """After destroy_process_group a new default group can be made; destroying one group leaves the others alone."""
        self._start()
        part = dist.new_group([0, 1])
        dist.destroy_process_group(part)
        mine = torch.ones(1)
        dist.all_reduce(mine)
        dist.barrier()
        dist.destroy_process_group()
        self.file_name += "-again"
        self.start_process_group(BACKEND)
        dist.all_reduce(mine)

        self.assertEqual(4.0, mine.item())


class Registration(ShardedTrainingTestCase):
    """Tests that put the seam in and take it out, in a separate rank."""

    world_size = 1

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def test_too_late(self) -> None:
        """A default group that does not record is an error: its collectives would be missed without a word."""
        self.start_process_group()

        with self.assertRaisesRegex(SuiteError, r"is a ProcessGroup, not a Recording.*before init_process"):
            register_recording_backend()

    def test_unknown_device(self) -> None:
        """A device that torch has no backend for is refused by name."""
        with self.assertRaisesRegex(ConfigError, r"device_type must have a backend in torch \(cpu, cuda.*'abacus'"):
            register_recording_backend("abacus")

    def test_backend_string_of_an_accelerator(self) -> None:
        """On an accelerator the name stands for gloo on CPU tensors and the device's backend on its own."""
        register_recording_backend("cuda")

        self.assertEqual("cpu:gloo,cuda:nccl", distributed_c10d.Backend(BACKEND))

    def test_bound_device(self) -> None:
        """A group that is bound to a device tells its twin, which would let their backend forget it."""
        device, store = torch.device("cuda", 0), HashStore()
        group = RecordingProcessGroup(store, 0, 1)
        group.bound_device_id = device
        gloo = dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=60))
        group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)

        self.assertEqual([device, device], [group.bound_device_id, group._twin.bound_device_id])

    def test_one_backend_alone(self) -> None:
        """There is no group for tensors on the CPU, as with `init_process_group("nccl")`."""
        register_recording_backend("cuda", only="nccl")

        self.assertEqual("nccl", distributed_c10d.Backend(BACKEND))
        self.assertEqual(
            {"cuda": "nccl"}, distributed_c10d.BackendConfig(distributed_c10d.Backend(BACKEND)).device_backend_map
        )

    def test_backend_string_of_ranks_that_share_gpus(self) -> None:
        """Plain gloo, which torch gives CUDA tensors too, and which engines recognise by its name."""
        register_recording_backend("cuda", shared=True)

        self.assertEqual("gloo", distributed_c10d.Backend(BACKEND))
        self.assertEqual(
            {"cpu": "gloo", "cuda": "gloo"},
            distributed_c10d.BackendConfig(distributed_c10d.Backend(BACKEND)).device_backend_map,
        )

    def test_twice_and_out(self) -> None:
        """Registering twice is registering once; after unregistering, torch is as it was."""
        backends = list(distributed_c10d.Backend.backend_list)
        register_recording_backend()
        register_recording_backend()
        unregister_recording_backend()
        unregister_recording_backend()
        self.start_process_group()

        self.assertTrue(type(world()) is ProcessGroup)
        self.assertEqual(backends, distributed_c10d.Backend.backend_list)
        self.assertFalse(hasattr(distributed_c10d.Backend, BACKEND.upper()))
