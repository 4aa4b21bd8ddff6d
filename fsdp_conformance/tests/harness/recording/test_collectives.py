"""Every collective of torch is carried out by a recording group as by a stock one, and is seen with its bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from fsdp_conformance.harness.context import log
from fsdp_conformance.harness.rank import destroy_process_group
from fsdp_conformance.harness.recording import process_group
from fsdp_conformance.harness.recording.gloo_on_devices import SUBSTITUTES, method_for
from fsdp_conformance.harness.recording.process_group import BACKEND, is_recording, register_recording_backend
from fsdp_conformance.harness.testcase import ShardedTrainingTestCase
from fsdp_conformance.tests.harness.recording.dispatch_recorder import DispatchRecorder
from fsdp_conformance.tests.harness.recording.small_training import world

Outputs = dict[str, list[Tensor]]

# torch 2.13 renamed these.
_all_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
_all_gather_autograd = getattr(functional, "all_gather_single_autograd", None) or functional.all_gather_tensor_autograd
_reduce_scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor


def _values(numel: int) -> Tensor:
    """0, 1, 2, .. plus ten times the rank: no two ranks have an element in common."""
    return torch.arange(numel, dtype=torch.float32) + 10 * dist.get_rank()


def _empty(numel: int) -> Tensor:
    return torch.zeros(numel)


def c10d_collectives() -> Outputs:
    """Every function of torch.distributed that communicates tensors of one size, on three ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    results: Outputs = {}

    def run(name: str, call: Callable[..., object], outputs: list[Tensor], *args: Any, **kwargs: Any) -> None:
        call(*args, **kwargs)
        results[name] = outputs

    parts = [_empty(3) for _ in range(size)]
    run("all_gather", dist.all_gather, parts, parts, _values(3))
    whole = _empty(3 * size)
    run("all_gather_into_tensor", dist.all_gather_into_tensor, [whole], whole, _values(3))
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
        mine = _values(3)
        run(f"all_reduce {op}", dist.all_reduce, [mine], mine, op=op)
    mine = _values(3)
    run("broadcast", dist.broadcast, [mine], mine, 1)
    mine = _values(3)
    # Only the destination's tensor means anything afterwards.
    run("reduce", dist.reduce, [mine] if rank == 1 else [], mine, 1)
    parts = [_empty(3) for _ in range(size)] if rank == 2 else []
    run("gather", dist.gather, parts, _values(3), parts or None, dst=2)
    mine = _empty(3)
    run("scatter", dist.scatter, [mine], mine, [_values(3) for _ in range(size)] if rank == 2 else None, src=2)
    mine = _empty(3)
    run("reduce_scatter", dist.reduce_scatter, [mine], mine, [_values(3) for _ in range(size)])
    mine = _empty(3)
    run("reduce_scatter_tensor", dist.reduce_scatter_tensor, [mine], mine, _values(3 * size))
    mine = _empty(size)
    run("all_to_all_single", dist.all_to_all_single, [mine], mine, _values(size))
    run("barrier", dist.barrier, [])
    run("monitored_barrier", dist.monitored_barrier, [])
    return results


def all_to_all_of_lists() -> Outputs:
    """A tensor from and for every rank."""
    size = dist.get_world_size()
    parts = [_empty(3) for _ in range(size)]
    dist.all_to_all(parts, [_values(3) for _ in range(size)])
    return {"all_to_all": parts}


def coalesced_collectives() -> Outputs:
    """The coalescing manager, which issues several calls as one."""
    size, group = dist.get_world_size(), world()
    reduced = [_values(3), _values(5)]
    with dist.distributed_c10d._coalescing_manager(group):
        for tensor in reduced:
            dist.all_reduce(tensor)
    gathered = [_empty(3 * size), _empty(2 * size)]
    with dist.distributed_c10d._coalescing_manager(group, async_ops=True) as manager:
        for tensor in gathered:
            dist.all_gather_into_tensor(tensor, _values(tensor.numel() // size))
    manager.wait()
    scattered = [_empty(3), _empty(2)]
    with dist.distributed_c10d._coalescing_manager(group):
        for tensor in scattered:
            dist.reduce_scatter_tensor(tensor, _values(tensor.numel() * size))
    return {"reduced": reduced, "gathered": gathered, "scattered": scattered}


def object_collectives() -> Outputs:
    """Python objects; each goes as a size and then as bytes."""
    size, rank = dist.get_world_size(), dist.get_rank()
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, rank)
    sent: list[Any] = [rank]
    dist.broadcast_object_list(sent, src=1)
    at_root: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(rank, at_root)
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, [7, 8, 9] if rank == 0 else None)
    return {"objects": [torch.tensor([*gathered, *sent, *(at_root or []), *scattered])]}


def point_to_point() -> Outputs:
    """Around the ring: blocking, asynchronous, batched."""
    size, rank = dist.get_world_size(), dist.get_rank()
    after, ahead = (rank + 1) % size, (rank - 1) % size
    # A stage of a pipeline receives into leaves that require gradients.
    received = [_empty(3), _empty(3), _empty(3).requires_grad_()]
    if rank == 0:
        dist.send(_values(3), 1)
    elif rank == 1:
        dist.recv(received[0], 0)
    values = _values(3)
    works = [dist.isend(values, after), dist.irecv(received[1], ahead)]
    works += dist.batch_isend_irecv([dist.P2POp(dist.isend, values, after), dist.P2POp(dist.irecv, received[2], ahead)])
    for work in works:
        if work is not None:
            work.wait()
    return {"received": received}


def functional_collectives() -> Outputs:
    """The collectives that FSDP2's and DTensor's graphs are made of, with and without gradients."""
    size, group = dist.get_world_size(), world()
    wait = functional.wait_tensor
    leaf = _values(3).requires_grad_()
    _all_gather_autograd(leaf, 0, group).square().sum().backward()
    assert leaf.grad is not None, "no gradient came back through the all-gather"
    return {
        "all_reduce": [wait(functional.all_reduce(_values(3), "sum", group))],
        "all_reduce_coalesced": [
            wait(each) for each in functional.all_reduce_coalesced([_values(3), _values(2)], "max", group)
        ],
        "all_gather": [wait(_all_gather(_values(3), 0, group))],
        "all_gather_coalesced": [
            wait(each) for each in functional.all_gather_into_tensor_coalesced([_values(3), _values(2)], group)
        ],
        "reduce_scatter": [wait(_reduce_scatter(_values(3 * size), "avg", 0, group))],
        "all_to_all": [wait(functional.all_to_all_single(_values(size), None, None, group))],
        "broadcast": [wait(functional.broadcast(_values(3), 0, group))],
        "gradient": [leaf.grad],
    }


def dtensor_redistributions() -> Outputs:
    """The placements of a DTensor, changed."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    return {
        "full": [DTensor.from_local(_values(3), mesh, [Shard(0)]).full_tensor()],
        "partial": [DTensor.from_local(_values(size), mesh, [Partial()]).redistribute(mesh, [Shard(0)]).to_local()],
        "uneven": [distribute_tensor(torch.arange(7.0), mesh, [Shard(0)]).to_local()],
        "replicated": [distribute_tensor(_values(7), mesh, [Replicate()]).to_local()],
    }


def subgroup_collectives() -> Outputs:
    """A group of ranks 0 and 2, made by new_group, once with an explicit backend."""
    results: Outputs = {}
    for name, backend in (("inherited", None), ("named", "gloo")):
        group = dist.new_group([0, 2], backend=backend)
        if dist.get_rank() != 1:
            mine = _values(3)
            dist.all_reduce(mine, group=group)
            functional.wait_tensor(functional.all_reduce(_values(3), "sum", group))
            results[name] = [mine]
    return results


def from_any_rank() -> Outputs:
    """A message to rank 0, which does not say from whom it expects one; and lists of tensors for every rank."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), world()
    received = _empty(3)
    if rank == 0:
        assert dist.recv(received) == 1, "the message is from rank 1"
    elif rank == 1:
        dist.send(_values(3), 0)
    parts = [[_empty(3), _empty(2)] for _ in range(size)]
    group.allgather_coalesced(parts, [_values(3), _values(2)]).wait()
    return {"received": [received], "parts": [part for of_rank in parts for part in of_rank]}


class Collectives(ShardedTrainingTestCase):
    """Each family of collectives, first on stock gloo, then on recording groups, a dispatch recorder around both."""

    world_size = 3
    preload = ("fsdp_conformance.tests.harness.recording.dispatch_recorder", "torch.distributed.tensor")

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def _compare(self, collectives: Callable[[], Outputs]) -> str:
        """Rank 0's schedule, after results and both recorders were found equal."""
        self.start_process_group()
        with DispatchRecorder() as stock:
            expected = collectives()
        # A rank that had nothing to do would close its connections while others still open theirs.
        dist.barrier()
        destroy_process_group()
        register_recording_backend()
        self.file_name += "-recording"
        self.start_process_group(BACKEND)
        with DispatchRecorder() as inside:
            got = collectives()

        self.assertEqual(expected.keys(), got.keys())
        for name, tensors in expected.items():
            for mine, stocks in zip(got[name], tensors, strict=True):
                self.assertTrue(torch.equal(mine, stocks), msg=f"{name}: expected {stocks}, got {mine}")
        self.assertEqual([], stock.unknown)
        self.assertEqual(stock.schedule(), inside.schedule())
        self.assertEqual(stock.schedule(), log().schedule())
        self.assertEqual(
            [(record.num_tensors, record.device) for record in stock.records],
            [(record.num_tensors, record.device) for record in log().records],
        )
        return "\n".join(log().schedule())

    def test_c10d(self) -> None:
        """Bytes are those of the unsharded side; every rank counts a gather and a scatter as its root does."""
        schedule = self._compare(c10d_collectives)
        self.assertExpectedInline(
            schedule,
            """\
all_gather 36B float32 [0,1,2]
all_gather 36B float32 [0,1,2]
all_reduce 12B float32 SUM [0,1,2]
all_reduce 12B float32 AVG [0,1,2]
all_reduce 12B float32 MAX [0,1,2]
broadcast 12B float32 [0,1,2]
reduce 12B float32 SUM [0,1,2]
gather 36B float32 [0,1,2]
scatter 36B float32 [0,1,2]
reduce_scatter 36B float32 SUM [0,1,2]
reduce_scatter 36B float32 SUM [0,1,2]
all_to_all 12B float32 [0,1,2]
barrier [0,1,2]
barrier [0,1,2]""",
        )

    @pytest.mark.nightly
    @pytest.mark.skipif(torch.__version__ < "2.12", reason="before torch 2.12, gloo has no all_to_all of lists")
    def test_all_to_all(self) -> None:
        """The one of lists."""
        self.assertEqual("all_to_all 36B float32 [0,1,2]", self._compare(all_to_all_of_lists))

    def test_coalesced(self) -> None:
        """Coalesced calls are one collective with the bytes of all."""
        schedule = self._compare(coalesced_collectives)
        self.assertExpectedInline(
            schedule,
            """\
all_reduce 32B float32 SUM [0,1,2]
all_gather 60B float32 [0,1,2]
reduce_scatter 60B float32 SUM [0,1,2]""",
        )
        self.assertEqual([2, 2, 2], [record.num_tensors for record in log().records])

    def test_objects(self) -> None:
        """Object collectives are seen as what they send."""
        self._compare(object_collectives)
        self.assertEqual(
            ["all_gather", "all_gather", "broadcast", "broadcast"], [record.op.value for record in log().records][:4]
        )

    def test_point_to_point(self) -> None:
        """Sends and receives are seen on the rank that issues them."""
        self._compare(point_to_point)
        expected = {0: 1, 1: 1, 2: 0}[self.rank] + 4
        self.assertEqual(expected, len(log().records))

    def test_functional(self) -> None:
        """Functional collectives find the recording group by its name, in C++ too."""
        schedule = self._compare(functional_collectives)
        self.assertExpectedInline(
            schedule,
            """\
all_gather 36B float32 [0,1,2]
reduce_scatter 36B float32 SUM [0,1,2]
all_reduce 12B float32 SUM [0,1,2]
all_reduce 20B float32 MAX [0,1,2]
all_gather 36B float32 [0,1,2]
all_gather 60B float32 [0,1,2]
reduce_scatter 36B float32 AVG [0,1,2]
all_to_all 12B float32 [0,1,2]
broadcast 12B float32 [0,1,2]""",
        )

    def test_dtensor(self) -> None:
        """DTensor's redistributions are seen."""
        schedule = self._compare(dtensor_redistributions)
        self.assertExpectedInline(
            schedule,
            """\
all_gather 36B float32 [0,1,2]
reduce_scatter 12B float32 SUM [0,1,2]
scatter 36B float32 [0,1,2]
broadcast 28B float32 [0,1,2]""",
        )

    def test_subgroups(self) -> None:
        """A group that the implementation makes is recorded with its global ranks, whatever backend it names."""
        self._compare(subgroup_collectives)
        self.assertEqual([(0, 2)] * (0 if self.rank == 1 else 4), [record.group for record in log().records])
        self.assertTrue(is_recording())


class SharedDevices(ShardedTrainingTestCase):
    """
    The substitutes for collectives that gloo lacks on an accelerator, with tensors on the CPU, where gloo has them.

    Nothing else can compare the two: on the accelerator the originals end the process.
    """

    world_size = 3
    preload = Collectives.preload

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    @pytest.mark.slow
    def test_substitutes_do_as_gloo(self) -> None:
        """The same results, and one record for a call, however many calls of gloo's it is made of."""
        families = (
            coalesced_collectives,
            point_to_point,
            functional_collectives,
            dtensor_redistributions,
            from_any_rank,
        )
        register_recording_backend(shared=True)
        self.start_process_group(BACKEND)
        expected = [family() for family in families]
        schedule = log().schedule()
        log().records.clear()
        with mock.patch.object(process_group, "method_for", _substitute):
            got = [family() for family in families]

        self.assertEqual(expected, got)
        self.assertEqual(schedule, log().schedule())
        replaced: list[set[str]] = [set()] * self.world_size
        dist.all_gather_object(replaced, _REPLACED)
        # torch has two names for one of them, and calls the newer one.
        names = {name for name in SUBSTITUTES if not name.endswith("_coalesced")} | {"allreduce_coalesced"}
        self.assertEqual(set(), names - set().union(*replaced))
        self.assertTrue({"allgather_into_tensor_coalesced", "all_gather_single_coalesced"} & _REPLACED)
        self.assertIn("allgather_coalesced", _REPLACED)


#: Names of methods that were replaced in this process.
_REPLACED: set[str] = set()


def _substitute(group: dist.ProcessGroup, name: str, device_type: str) -> Callable[..., dist.Work]:
    if name not in SUBSTITUTES:
        return method_for(group, name, device_type)
    _REPLACED.add(name)
    return partial(SUBSTITUTES[name], group)
