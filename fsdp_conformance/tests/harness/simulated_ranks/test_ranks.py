"""Simulated ranks: what they communicate, what is a rank's own, how they end, and engines on many of them."""

from __future__ import annotations

import copy
import os
import random
import re
import threading
import unittest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from fsdp_conformance.errors import ConfigError, RankRaised, RankTimedOut
from fsdp_conformance.harness.recording import process_group
from fsdp_conformance.harness.simulated_ranks import scheduler as rank_scheduler
from fsdp_conformance.harness.simulated_ranks.ranks import run_ranks
from fsdp_conformance.harness.testcase import ShardedTrainingTestCase
from fsdp_conformance.tests.harness.started_ranks import StartedRanks
from fsdp_conformance.tests.simulator.simulator_collectives import PROGRAMS, Outputs, Values, differences

#: Generous: everything below takes seconds on a free machine.
TIMEOUT_S = 600.0


class WholeValues(Values):
    """Small whole numbers: every order of adding them gives the same bits."""

    def given(self, *shape: int, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * seed + self.rank)
        return torch.randint(1, 5, shape, generator=generator).to(self.dtype).to(self.device)


class Collectives(StartedRanks):
    """Every program of collectives on three ranks, whose outputs go into files."""

    __test__ = False
    world_size = 3
    case_timeout_s = 120.0

    def run_programs(self) -> None:
        outputs = {name: program(WholeValues("cpu")) for name, program in PROGRAMS.items()}
        torch.save(outputs, Path(self.launch_payload) / f"{self.rank}.pt")


def _outputs(directory: Path, *, simulated: bool) -> list[dict[str, Outputs]]:
    """By rank."""
    directory.mkdir()
    case = Collectives("run_programs")
    case.simulated_ranks = simulated
    case.launch_payload = str(directory)
    result = unittest.TestResult()
    case.run(result)
    assert result.wasSuccessful(), [*result.errors, *result.failures]
    return [torch.load(directory / f"{rank}.pt", weights_only=True) for rank in range(3)]


@pytest.mark.nightly
@pytest.mark.slow
def test_collectives_give_what_they_give_between_processes(tmp_path: Path) -> None:
    """Every collective, on every rank, to the last bit, in groups and on meshes too."""
    between_processes = _outputs(tmp_path / "processes", simulated=False)
    between_threads = _outputs(tmp_path / "simulated", simulated=True)

    for expected, got in zip(between_processes, between_threads, strict=True):
        assert expected.keys() == got.keys()
        assert [] == [line for name in expected for line in differences(expected[name], got[name])]


# --- what is a rank's own ---


def test_random_numbers_are_a_ranks_own() -> None:
    """Torch's, numpy's and Python's; whatever the others draw meanwhile. Ranks begin alike, as processes do."""

    def body(rank: int) -> list[float]:
        first = [torch.rand(1).item(), float(np.random.rand()), random.random()]
        torch.manual_seed(rank)
        drawn = []
        for _ in range(3):
            drawn += [torch.rand(1).item(), float(np.random.rand()), random.random()]
            dist.barrier()
        return first + drawn

    state = torch.get_rng_state()
    torch.manual_seed(3)
    alone = [torch.rand(1).item(), float(np.random.rand()), random.random()]
    torch.manual_seed(3)
    first = run_ranks(3, body, timeout_s=TIMEOUT_S)
    torch.manual_seed(3)

    assert 1 == len({values[0] for values in first})
    assert first[0][0] == alone[0]
    assert [torch.Generator().manual_seed(rank).initial_seed() for rank in range(3)] == [0, 1, 2]
    for rank, values in enumerate(first):
        generator = torch.Generator().manual_seed(rank)
        assert values[3::3] == [torch.rand(1, generator=generator).item() for _ in range(3)]
        assert values[4::3] == first[0][4::3]
    torch.set_rng_state(state)


def test_the_process_is_as_it_was() -> None:
    """Random state, groups, threads and default dtype of the caller, also after a rank has failed."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    state, python = torch.get_rng_state(), random.getstate()

    def body(rank: int) -> None:
        torch.rand(3)
        random.random()
        torch.set_default_dtype(torch.float64)
        dist.barrier()
        if rank == 1:
            raise ValueError("no more")

    with pytest.raises(RankRaised, match=r"(?s)rank 1 of 2 raised.*ValueError: no more"):
        run_ranks(2, body, timeout_s=TIMEOUT_S)

    assert (0, 1) == (dist.get_rank(), dist.get_world_size())
    assert torch.get_default_dtype() is torch.float32
    dist.destroy_process_group()
    assert torch.equal(state, torch.get_rng_state())
    assert python == random.getstate()
    assert rank_scheduler.current() is None
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("rank ")]


def test_meshes_are_a_ranks_own() -> None:
    """Equal meshes of two ranks are two: DTensor's caches must not hand one rank what belongs to another."""

    def body(rank: int) -> list[float]:
        mesh = init_device_mesh("cpu", (4,))
        whole = torch.arange(10.0)
        part = distribute_tensor(whole, mesh, [Shard(0)])
        assert isinstance(part, DTensor)
        return [float(part.to_local().sum()), float(part.full_tensor().sum())]

    assert [[3.0, 45.0], [12.0, 45.0], [21.0, 45.0], [9.0, 45.0]] == run_ranks(4, body, timeout_s=TIMEOUT_S)


# --- mistakes and ends ---


def _told(world_size: int, body: Any) -> list[str]:
    """The backend's error on each rank; empty for a rank that ended normally."""

    def guarded(rank: int) -> str:
        try:
            body(rank)
        except (dist.DistBackendError, RankTimedOut) as error:
            return str(error)
        return ""

    return run_ranks(world_size, guarded, timeout_s=TIMEOUT_S)


def all_reduce_on(rank: int, guilty: int) -> None:
    if rank == guilty:
        dist.all_gather([torch.empty(3) for _ in range(3)], torch.ones(3))
    else:
        dist.all_reduce(torch.ones(3))


def test_different_collectives_are_named() -> None:
    """Every rank hears of both calls, with their lines, and no deadline is waited for."""
    for text in _told(3, lambda rank: all_reduce_on(rank, guilty=2)):
        assert "rank 2 called all_gather(3 float32) at test_ranks.py" in text
        assert "rank 0 called all_reduce(SUM, 3 float32) at test_ranks.py" in text
        assert "the operations differ" in text


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (lambda: dist.all_reduce(torch.ones(4)), "the sizes differ"),
        (lambda: dist.all_reduce(torch.ones(3, dtype=torch.int64)), "the dtypes differ"),
        (lambda: dist.all_reduce(torch.ones(3), op=dist.ReduceOp.MAX), "the reductions differ"),
        (lambda: dist.broadcast(torch.ones(3), 0), "the operations differ"),
    ],
)
def test_different_arguments_are_named(other: Any, reason: str) -> None:
    """Whatever the ranks of a collective must agree on."""
    for text in _told(2, lambda rank: other() if rank else dist.all_reduce(torch.ones(3))):
        assert reason in text


def test_ranks_that_wait_for_each_other_are_told_at_once() -> None:
    """Two groups in opposite orders: each rank is told what all of them wait for."""

    def body(rank: int) -> None:
        groups = [dist.new_group([0, 1]) for _ in range(2)]
        for index in (0, 1) if rank == 0 else (1, 0):
            dist.all_reduce(torch.ones(3 + index), group=groups[index])

    for text in _told(2, body):
        assert text.startswith("no rank can go on: rank 0 waits for all_reduce(SUM, 3 float32)")
        assert "rank 1 waits for all_reduce(SUM, 4 float32)" in text


def test_a_key_that_nobody_sets() -> None:
    """Stores are waited at as collectives are."""
    for text in _told(2, lambda rank: dist.distributed_c10d._get_default_store().get("missing")):
        assert "the keys default_pg/0//missing of the store" in text


@pytest.mark.nightly
@pytest.mark.slow
def test_a_rank_that_computes_for_ever() -> None:
    """Its deadline is the others' too, and the stacks say where it is."""
    over = threading.Event()

    def body(rank: int) -> None:
        if rank == 1:
            over.wait(30.0)
        dist.barrier()

    timer = threading.Timer(4.0, over.set)
    timer.start()
    with pytest.raises(RankTimedOut, match=r"(?s)did not end within timeout_s=3.0.*rank 1:.*over.wait"):
        run_ranks(2, body, timeout_s=3.0)
    timer.join()


def test_refusals() -> None:
    """Sizes out of range, a world within a world, reductions that no backend has."""
    for size, timeout_s in ((0, 1.0), (2, 0.0)):
        with pytest.raises(ConfigError):
            run_ranks(size, lambda rank: rank, timeout_s=timeout_s)
    with pytest.raises(RankRaised, match="already running in this process"):
        run_ranks(2, lambda rank: run_ranks(2, lambda inner: inner, timeout_s=5.0), timeout_s=TIMEOUT_S)
    with pytest.raises(RankRaised, match="reduce_op=BAND requires integer tensors"):
        run_ranks(2, lambda rank: dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BAND), timeout_s=TIMEOUT_S)


class Ends(StartedRanks):
    """Three simulated ranks, one of which ends badly. Not collected: the tests below run its methods one by one."""

    __test__ = False
    simulated_ranks = True
    world_size = 3
    case_timeout_s = 40.0

    def test_clean(self) -> None:
        self.assertEqual(str(self.rank), os.environ["RANK"])
        dist.barrier()
        self.report.measurements["rank"] = self.rank

    def test_raises(self) -> None:
        if self.rank == 1:
            raise ValueError("shard 1 has 3 elements")
        dist.barrier()

    def test_leaves_one_out(self) -> None:
        if self.rank != 1:
            dist.barrier()

    def test_skips(self) -> None:
        self.skipTest("not today")

    def test_dies(self) -> None:
        dist.barrier()
        if self.rank == 1:
            os.kill(os.getpid(), 9)
        dist.barrier()


def _end(name: str) -> tuple[Ends, unittest.TestResult]:
    case, result = Ends(name), unittest.TestResult()
    case.run(result)
    return case, result


@pytest.mark.slow
def test_a_case_on_simulated_ranks() -> None:
    """Each rank reports for itself."""
    case, result = _end("test_clean")

    assert result.wasSuccessful(), result.errors
    reports, exits = case.seen
    assert [0, 1, 2] == [report.measurements["rank"] for report in reports]
    assert [0, 0, 0] == [end.exitcode for end in exits]


@pytest.mark.parametrize(
    ("name", "headline"),
    [
        ("test_raises", "rank 1 raised ValueError: shard 1 has 3 elements\n  then rank 0 lost a peer"),
        ("test_leaves_one_out", "timed out in a collective: DistBackendError: no rank can go on: rank 0 waits for"),
        ("test_dies", "rank 1 was killed by SIGKILL before it reported"),
    ],
)
def test_bad_ends(name: str, headline: str) -> None:
    """The first rank to fail is the headline, as it is with processes."""
    _, result = _end(name)

    assert 1 == len(result.errors) + len(result.failures)
    assert headline in [*result.errors, *result.failures][0][1]


def test_a_skip() -> None:
    """A skip works as it does between processes."""
    _, result = _end("test_skips")

    assert ["not today"] == [reason for _, reason in result.skipped]


class Mismatched(StartedRanks):
    """Two ranks that call different collectives. Not collected: the test below runs it on both kinds of ranks."""

    __test__ = False
    world_size = 2
    case_timeout_s = 12.0

    def init_rank(self) -> None:
        ShardedTrainingTestCase.init_rank(self)
        process_group.register_recording_backend()
        self.start_process_group(process_group.BACKEND)

    def step(self) -> None:
        if self.rank == 0:
            dist.all_reduce(torch.ones(3))
        else:
            dist.all_gather([torch.empty(30), torch.empty(30)], torch.ones(30))


@pytest.mark.nightly_params("False")
@pytest.mark.slow
@pytest.mark.parametrize("simulated", [False, True])
def test_a_mismatch_is_diagnosed_on_both_kinds_of_ranks(simulated: bool) -> None:
    """A hang whose text names both calls with their lines."""
    case, result = Mismatched("step"), unittest.TestResult()
    case.simulated_ranks = simulated
    case.run(result)

    (text,) = [text for _, text in [*result.errors, *result.failures]]
    assert "timed out in a collective" in text or "did not report in time and was terminated" in text
    assert re.search(r"rank 0 called all_reduce\S* .*at test_ranks.py:\d+ in step", text), text
    assert re.search(r"rank 1 called all_gather\S* .*at test_ranks.py:\d+ in step", text), text


# --- engines ---

WIDTH = 16


def network() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))


def reference_losses(world_size: int, batches: Tensor) -> list[list[float]]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(3):
        each = [model(batch).square().mean() for batch in batches]
        losses.append([loss.item() for loss in each])
        (torch.stack(each).sum() / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [list(by_rank) for by_rank in zip(*losses, strict=True)]


@pytest.mark.daily(2)
@pytest.mark.parametrize("world_size", [2, 8])
@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2"])
def test_engines_train_as_unsharded(engine: str, world_size: int) -> None:
    """Each rank has the losses of its part of the batch in one process that sees all of it."""
    batches = torch.randn(world_size, 4, WIDTH, generator=torch.Generator().manual_seed(7))
    initial = network()

    def body(rank: int) -> list[float]:
        model: nn.Module = copy.deepcopy(initial)
        if engine == "fsdp2":
            mesh = init_device_mesh("cpu", (world_size,))
            for layer in model.children():
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        elif engine == "fsdp1":
            model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        else:
            model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        losses = []
        for _ in range(3):
            loss = model(batches[rank]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    got = run_ranks(world_size, body, timeout_s=TIMEOUT_S)

    torch.testing.assert_close(
        torch.tensor(got), torch.tensor(reference_losses(world_size, batches)), rtol=1e-5, atol=1e-6
    )
