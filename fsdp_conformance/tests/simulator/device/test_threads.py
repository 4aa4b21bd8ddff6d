"""Ranks as threads of one process: their collectives, their ends, and FSDP2 on up to 64 of them."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fsdp_conformance.errors import ConfigError, RankRaised, RankTimedOut
from fsdp_conformance.harness.simulated_ranks.ranks import run_ranks
from fsdp_conformance.simulator import checker
from fsdp_conformance.tests.simulator.simulator_collectives import PROGRAMS, Values, all_gather_into_tensor, differences
from fsdp_conformance.tests.simulator.simulator_process import compiled, in_process_of_its_own
from fsdp_conformance.tests.torch_versions import not_on_old

pytestmark = [compiled, pytest.mark.slow]

#: Generous: everything below takes seconds on a free machine.
TIMEOUT_S = 600.0

_gather_single: Any = getattr(dist, "gather_single", None)


def on_own_device(*numbers: float) -> Tensor:
    return torch.tensor(numbers, device=f"sim:{dist.get_rank()}")


# --- collectives ---


@pytest.mark.daily(2)
@pytest.mark.parametrize("name", PROGRAMS)
@in_process_of_its_own
def test_programs(name: str) -> None:
    """Every collective gives on the device what it gives on the CPU, and makes no hazard."""

    def rank_body(rank: int) -> list[str]:
        expected = PROGRAMS[name](Values("cpu"))
        got = PROGRAMS[name](Values("sim"))
        with checker.suspended():
            return differences(expected, got)

    assert [[], [], []] == run_ranks(3, rank_body, timeout_s=TIMEOUT_S)
    assert 0 == checker.num_hazards()


@pytest.mark.skipif(_gather_single is None, reason="torch has gather_single since 2.14")
@in_process_of_its_own
def test_gather_into_one_tensor() -> None:
    """The root has a part of each rank, flat or stacked; elsewhere an output does not count. Sizes are checked."""

    def rank_body(rank: int) -> list[float]:
        mine, root = on_own_device(float(rank), 10.0 + rank), rank == 1
        gathered = [torch.zeros(*shape, device=f"sim:{rank}") for shape in ((6,), (3, 2))]
        for one in gathered:
            _gather_single(mine, one if root else None, dst=1)
        short = torch.zeros(5, device=f"sim:{rank}")
        if root:
            with pytest.raises(ValueError, match="must be equal to world_size times input tensor size"):
                _gather_single(mine, short, dst=1)
        return [value for one in gathered for value in one.flatten().tolist()]

    parts = [0.0, 10.0, 1.0, 11.0, 2.0, 12.0]
    assert [[0.0] * 12, parts * 2, [0.0] * 12] == run_ranks(3, rank_body, timeout_s=TIMEOUT_S)
    assert 0 == checker.num_hazards()


@in_process_of_its_own
def test_sums_are_in_the_order_of_ranks() -> None:
    """((r0 + r1) + r2) + r3, whoever comes first; each rank has the same."""
    given = [torch.randn(1000, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]

    def rank_body(rank: int) -> tuple[Tensor, Tensor]:
        mine = given[rank].to(f"sim:{rank}")
        dist.all_reduce(mine)
        average = given[rank].to(f"sim:{rank}")
        dist.all_reduce(average, op=dist.ReduceOp.AVG)
        return mine.cpu(), average.cpu()

    expected = given[0] + given[1] + given[2] + given[3]
    for total, average in run_ranks(4, rank_body, timeout_s=TIMEOUT_S):
        assert torch.equal(expected, total)
        assert torch.equal(expected / 4, average)


@in_process_of_its_own
def test_groups_of_one_name() -> None:
    """Threads count their groups apart: groups of different ranks do not meet, and a name may come again."""

    def rank_body(rank: int) -> list[float]:
        mesh = init_device_mesh("sim", (2, 2), mesh_dim_names=("outer", "inner"))
        mine = on_own_device(1.0 + rank)
        dist.all_reduce(mine, group=mesh.get_group("inner"))
        dist.all_reduce(mine, group=mesh.get_group("outer"))
        on_cpu = torch.tensor([float(rank)])
        dist.all_reduce(on_cpu, group=mesh.get_group("inner"))
        objects: list[Any] = [None] * 4
        dist.all_gather_object(objects, rank)
        store = dist.distributed_c10d._get_default_store()
        dist.destroy_process_group()
        dist.init_process_group("sim:simccl", store=PrefixStore("again", store), rank=rank, world_size=4)
        dist.all_reduce(mine)
        return [mine.item(), on_cpu.item(), float(sum(objects))]

    assert [[40.0, 1.0, 6.0]] * 2 + [[40.0, 5.0, 6.0]] * 2 == run_ranks(4, rank_body, timeout_s=TIMEOUT_S)


@in_process_of_its_own
def test_hosts_do_not_wait() -> None:
    """Ranks issue the collectives of two groups in opposite orders, and the host goes on in between."""
    issued = threading.Event()

    def rank_body(rank: int) -> list[float]:
        groups = [dist.new_group([0, 1]) for _ in range(2)]
        tensors = [on_own_device(1.0 + rank), on_own_device(10.0)]
        works = {}
        if rank == 1:
            assert issued.wait(TIMEOUT_S / 2), "rank 0 did not get past its calls"
        for index in (0, 1) if rank == 0 else (1, 0):
            works[index] = dist.all_reduce(tensors[index], group=groups[index], async_op=True)
        for work in works.values():
            assert work is not None
            work.wait()
        issued.set()
        return [tensor.item() for tensor in tensors]

    assert [[3.0, 20.0]] * 2 == run_ranks(2, rank_body, timeout_s=TIMEOUT_S)


@in_process_of_its_own
def test_a_missing_wait_is_found() -> None:
    """It is found between threads just as between processes."""

    def rank_body(rank: int) -> float:
        output = torch.empty(2, device=f"sim:{rank}")
        work = all_gather_into_tensor(output, on_own_device(1.0 + rank), async_op=True)
        early = output.sum()
        work.wait()
        with checker.suspended():
            return early.item()

    assert [3.0, 3.0] == run_ranks(2, rank_body, timeout_s=TIMEOUT_S)
    assert 2 == checker.num_hazards()
    assert "without waiting for it" in checker.hazards()[0].sentence()
    checker.clear()


# --- mistakes and ends ---


def result_of(rank: int, call: Any) -> str:
    """The error on a rank that calls a collective which the others did not call."""
    try:
        mine = call()
        mine.sum().item()
    except dist.DistBackendError as error:
        return str(error).splitlines()[0]
    return f"rank {rank} heard nothing"


@pytest.mark.daily(2)
@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ("size", "the sizes differ"),
        ("dtype", "the dtypes differ"),
        ("reduction", "the reductions differ"),
        ("operation", "the operations differ"),
    ],
)
@in_process_of_its_own
def test_ranks_that_call_different_things(other: str, reason: str) -> None:
    """Every rank hears of both calls."""

    def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        dist.all_reduce(tensor, op=op)
        return tensor

    def broadcast(tensor: Tensor) -> Tensor:
        dist.broadcast(tensor, 0)
        return tensor

    def rank_body(rank: int) -> str:
        device = f"sim:{rank}"
        if rank == 0:
            return result_of(rank, lambda: all_reduce(torch.ones(3, device=device)))
        calls = {
            "size": lambda: all_reduce(torch.ones(4, device=device)),
            "dtype": lambda: all_reduce(torch.ones(3, device=device, dtype=torch.int64)),
            "reduction": lambda: all_reduce(torch.ones(3, device=device), dist.ReduceOp.MAX),
            "operation": lambda: broadcast(torch.ones(3, device=device)),
        }
        return result_of(rank, calls[other])

    for text in run_ranks(2, rank_body, timeout_s=TIMEOUT_S):
        assert reason in text
        assert "all_reduce(SUM, 3 Float)" in text
        assert "rank 0" in text
        assert "rank 1" in text


@in_process_of_its_own
def test_an_exception_ends_the_others() -> None:
    """Ranks that wait for the one that failed end at once; its exception is the headline."""

    def rank_body(rank: int) -> None:
        if rank == 1:
            raise ValueError("no more")
        mine = on_own_device(1.0)
        dist.all_reduce(mine)
        mine.item()

    with pytest.raises(RankRaised, match=r"(?s)rank 1 of 3 raised.*ValueError: no more") as raised:
        run_ranks(3, rank_body, timeout_s=10_000.0)  # Who waited for the deadline would not end.

    assert 1 == raised.value.rank
    assert isinstance(raised.value.__cause__, ValueError)
    assert ["MainThread"] == [thread.name for thread in threading.enumerate()]
    assert [3, 5] == run_ranks(2, lambda rank: 3 + 2 * rank, timeout_s=TIMEOUT_S)


@not_on_old  # a barrier on the device
@in_process_of_its_own
def test_a_collective_that_a_rank_never_calls() -> None:
    """No deadline is waited for: who waits is told who is not there, and where that rank is."""

    def rank_body(rank: int) -> None:
        mine = on_own_device(1.0)
        dist.barrier(device_ids=[rank])
        if rank == 0:
            dist.all_reduce(mine)
            mine.item()

    with pytest.raises(RankRaised) as raised:
        run_ranks(2, rank_body, timeout_s=TIMEOUT_S)

    assert "rank 0 waits for all_reduce(SUM, 1 Float), collective 2 of group" in str(raised.value)
    assert "not there: rank 1 (at collective 1, barrier())" in str(raised.value)


@pytest.mark.nightly
@pytest.mark.slow
@in_process_of_its_own
def test_the_deadline_shows_all_stacks() -> None:
    """Ranks that do not end are shown where they are, and their next collective ends them."""

    def rank_body(rank: int) -> None:
        alone = [dist.new_group([0]), dist.new_group([1])][rank]
        mine = on_own_device(1.0)
        while True:
            dist.all_reduce(mine, group=alone)

    late = r"(?s)did not end within timeout_s=3.0.*rank 0:.*rank_body.*rank 1:.*live"
    with pytest.raises(RankTimedOut, match=late) as raised:
        run_ranks(2, rank_body, timeout_s=3.0)

    assert "Still running" not in str(raised.value)
    assert ["MainThread"] == [thread.name for thread in threading.enumerate()]


@in_process_of_its_own
def test_refusals() -> None:
    """Sizes out of range, a world within a world."""
    for size, timeout_s in ((0, 1.0), (128, 1.0), (2, 0.0)):
        with pytest.raises(ConfigError):
            run_ranks(size, lambda rank: rank, timeout_s=timeout_s)
    with pytest.raises(RankRaised, match="already running in this process"):
        run_ranks(2, lambda rank: run_ranks(2, lambda inner: inner, timeout_s=5.0), timeout_s=TIMEOUT_S)


@in_process_of_its_own
def test_nothing_is_left() -> None:
    """The caller's own groups, threads and generators are as they were."""
    store = HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    state = torch.get_rng_state()

    assert [(0, 3), (1, 3), (2, 3)] == run_ranks(
        3, lambda rank: (dist.get_rank(), dist.get_world_size()), timeout_s=TIMEOUT_S
    )

    assert (0, 1) == (dist.get_rank(), dist.get_world_size())
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    assert ["MainThread"] == [thread.name for thread in threading.enumerate()]
    assert torch.equal(state, torch.get_rng_state())


@in_process_of_its_own
def test_dropout_is_a_ranks_own() -> None:
    """Each rank draws from its device's generator: the same in every run, another on every rank."""

    def rank_body(rank: int) -> list[bool]:
        torch.get_device_module("sim").manual_seed(17 + rank)
        mine = torch.ones(64, device=f"sim:{rank}")
        masks = []
        for _ in range(5):
            dist.barrier(device_ids=[rank])
            masks += (nn.functional.dropout(mine, 0.5) > 0).tolist()
        return masks

    first = run_ranks(4, rank_body, timeout_s=TIMEOUT_S)

    assert first == run_ranks(4, rank_body, timeout_s=TIMEOUT_S)
    assert 4 == len({tuple(masks) for masks in first})


# --- training ---

WIDTH = 32
STEPS = 3


def network() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))


def batches(world_size: int) -> Tensor:
    return torch.randn(world_size, 4, WIDTH, generator=torch.Generator().manual_seed(7))


def reference_losses(world_size: int) -> list[list[float]]:
    """By rank and step, of one process that sees all batches."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(STEPS):
        each = [model(batch).square().mean() for batch in batches(world_size)]
        losses.append([loss.item() for loss in each])
        (sum(each) / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [list(by_rank) for by_rank in zip(*losses, strict=True)]


def trained(world_size: int, engine: str) -> list[list[float]]:
    """By rank and step, of ranks as threads."""
    initial, data = network(), batches(world_size)

    def rank_body(rank: int) -> list[float]:
        model: nn.Module = copy.deepcopy(initial).to(f"sim:{rank}")
        if engine == "fsdp2":
            mesh = init_device_mesh("sim", (world_size,))
            for layer in model.children():
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        else:
            model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        losses = []
        for _ in range(STEPS):
            loss = model(data[rank].to(f"sim:{rank}", non_blocking=True)).square().mean()
            losses.append(loss.detach())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with checker.suspended():
            return [loss.item() for loss in losses]

    return run_ranks(world_size, rank_body, timeout_s=TIMEOUT_S)


def assert_trains(world_size: int, engine: str) -> None:
    losses = trained(world_size, engine)

    torch.testing.assert_close(losses, reference_losses(world_size))
    assert 0 == checker.num_hazards(), [hazard.sentence() for hazard in checker.hazards()]
    assert checker.accesses() > 50 * world_size


@pytest.mark.daily(1)
@pytest.mark.parametrize("engine", ["fsdp2", "ddp"])
@pytest.mark.parametrize("world_size", [2, 4])
@in_process_of_its_own
def test_training(world_size: int, engine: str) -> None:
    """Losses are those of one process that sees all data; no hazard, and the positive control has some."""
    assert_trains(world_size, engine)

    with checker.without_waits():
        trained(world_size, engine)
        assert checker.num_hazards() > 0
    checker.clear()


@pytest.mark.nightly_params("16-fsdp2")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "engine"), [(16, "fsdp2"), (16, "ddp"), pytest.param(64, "fsdp2", marks=pytest.mark.nightly)]
)
@in_process_of_its_own
def test_training_of_many(world_size: int, engine: str) -> None:
    """The same on 16 and on 64 ranks."""
    assert_trains(world_size, engine)
