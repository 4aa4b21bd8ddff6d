"""Tests for the visible parts of NCCL other than its results: gradients, profilers, messages of a rank to itself."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn
from torch._C._distributed_c10d import HashStore, PrefixStore

from fsdp_conformance.simulated_cuda import simulated_cuda
from fsdp_conformance.tests.simulator.simulator_process import compiled, in_process_of_its_own

pytestmark = [compiled, pytest.mark.slow]


@contextmanager
def group_of_one(backend: str = "nccl", **options: Any) -> Iterator[None]:
    """One GPU, and a group with one rank."""
    with simulated_cuda(1):
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, **options)
        try:
            yield
        finally:
            dist.destroy_process_group()


@contextmanager
def written_to_stderr() -> Iterator[list[str]]:
    """The lines that the process writes there, C++ included; complete after the block."""
    lines: list[str] = []
    original = os.dup(2)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(original, 2)
            os.close(original)
        file.seek(0)
        lines += file.read().splitlines()


@in_process_of_its_own
def test_gradients_of_collectives() -> None:
    """torch.distributed.nn has them for NCCL, or does otherwise with NCCL."""
    with group_of_one():
        part = torch.arange(4.0, device="cuda").requires_grad_()
        whole = dist.nn.functional._all_gather_base(torch.empty(4, device="cuda"), part)
        (whole * torch.arange(4.0, device="cuda")).sum().backward()
        assert part.grad is not None
        assert [0.0, 1.0, 2.0, 3.0] == part.grad.tolist()
        with warnings.catch_warnings(action="ignore"):  # torch: there are newer names
            (copy,) = dist.nn.functional.all_gather(part)
        copy.sum().backward()
        assert [1.0, 2.0, 3.0, 4.0] == part.grad.tolist()


@pytest.mark.daily(1)
@in_process_of_its_own
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_profilers_see_collectives(backend: str) -> None:
    """Each collective, asynchronous or not, appears once, under its own name and with the shapes of its inputs."""
    with group_of_one(backend):
        tensor, whole = torch.ones(2, 3, device="cuda"), torch.ones(2, 3, device="cuda")
        calls = {
            "all_reduce": lambda wait: dist.all_reduce(tensor, async_op=wait),
            "broadcast": lambda wait: dist.broadcast(tensor, 0, async_op=wait),
            "_all_gather_base": lambda wait: dist.all_gather_into_tensor(whole, tensor, async_op=wait),
            "_reduce_scatter_base": lambda wait: dist.reduce_scatter_tensor(whole, tensor, async_op=wait),
            "all_to_all": lambda wait: dist.all_to_all_single(whole, tensor, async_op=wait),
        }
        for name, call in calls.items():
            for asynchronous in (False, True):
                with torch.autograd.profiler.profile(record_shapes=True) as profiler:
                    work = call(asynchronous)
                    if work is not None:
                        work.wait()
                events = [event for event in profiler.function_events if event.name == f"{backend}:{name}"]
                assert [(True, [[2, 3]])] == [(event.is_async, event.input_shapes) for event in events], name


@in_process_of_its_own
def test_a_rank_sends_to_itself() -> None:
    """A batch may contain such messages, as in an all-to-all exchange; they are matched in order."""
    with group_of_one():
        gives = [torch.full((2,), float(number), device="cuda") for number in range(3)]
        takes = [torch.zeros(2, device="cuda") for _ in gives]
        batch = []
        for give, take in zip(gives, takes, strict=True):
            batch += [dist.P2POp(dist.irecv, take, 0), dist.P2POp(dist.isend, give, 0)]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        assert [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]] == [take.tolist() for take in takes]


@in_process_of_its_own
def test_a_rank_waits_for_itself() -> None:
    """The error explains a receive without a send, and one of another size."""
    with group_of_one(timeout=timedelta(seconds=0.2)):
        take = torch.zeros(2, device="cuda")
        (work,) = dist.batch_isend_irecv([dist.P2POp(dist.irecv, take, 0)])
        work.wait()
        with pytest.raises(RuntimeError, match=r"recv.* from rank 0.* timed out after 200 ms: .*the other end"):
            take.tolist()
    with group_of_one():
        take = torch.zeros(2, device="cuda")
        pair = [dist.P2POp(dist.irecv, take, 0), dist.P2POp(dist.isend, torch.zeros(3, device="cuda"), 0)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()
        with pytest.raises(RuntimeError, match="expected 8 bytes, got 12"):
            take.tolist()


@pytest.mark.daily(1)
@in_process_of_its_own
@pytest.mark.parametrize("asks", [lambda take: take.tolist(), lambda take: torch.cuda.synchronize()])
def test_a_failure_that_the_next_call_sees(asks: Callable[[torch.Tensor], None]) -> None:
    """It is raised where the bytes are needed, or where the device is waited for, and once."""
    with group_of_one():
        take = torch.zeros(2, device="cuda")
        works = dist.irecv(take, 0), dist.isend(torch.zeros(3, device="cuda"), 0)
        for work in works:
            assert work is not None
            work.wait()
        with pytest.raises(RuntimeError, match="expected 8 bytes, got 12"):
            asks(take)
        asks(take)


@pytest.mark.daily(1)
@in_process_of_its_own
@pytest.mark.parametrize("waits", [True, False], ids=["asked", "not asked"])
def test_a_failure_is_reported_once(waits: bool) -> None:
    """Destroying the group prints a failure only if it has not been reported yet, and without C++ frames."""
    with written_to_stderr() as lines, group_of_one():
        take = torch.zeros(2, device="cuda")
        for work in (dist.irecv(take, 0), dist.isend(torch.zeros(3, device="cuda"), 0)):
            assert work is not None
            work.wait()
        if waits:
            with pytest.raises(RuntimeError, match="expected 8 bytes, got 12"):
                take.tolist()
    matching = [line for line in lines if "expected 8 bytes, got 12" in line]
    assert len(matching) == (0 if waits else 1), lines
    assert not [line for line in lines if "frame #" in line], lines


@pytest.mark.daily(1)
@in_process_of_its_own
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_timeouts_change(backend: str) -> None:
    """torch sets them by the class of the group; a program shortens them once it has started."""
    with group_of_one(backend, timeout=timedelta(seconds=100)), warnings.catch_warnings(action="error"):
        group = dist.distributed_c10d._get_default_group()
        set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout  # since torch 2.14
        set_timeout(timedelta(seconds=7))
        kinds = ["cuda"] if backend == "nccl" else ["cuda", "cpu"]
        timeouts = [group._get_backend(torch.device(kind)).options._timeout for kind in kinds]
        assert [timedelta(seconds=7)] * len(kinds) == timeouts


@in_process_of_its_own
def test_monitored_barriers() -> None:
    """Groups with gloo have them, and groups with NCCL have not."""
    with group_of_one("gloo"):
        dist.monitored_barrier(timeout=timedelta(seconds=60))
    with group_of_one(), pytest.raises(ValueError, match=r"only implemented for GLOO|CPU-capable backend"):
        dist.monitored_barrier()


@pytest.mark.daily(1)
@in_process_of_its_own
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_sequence_numbers(backend: str) -> None:
    """A group counts its collectives on GPUs."""
    with group_of_one(backend):
        group: Any = dist.distributed_c10d._get_default_group()
        if hasattr(group, "_set_sequence_number_for_group"):  # until torch 2.13
            group._set_sequence_number_for_group()
        before = group._get_sequence_number_for_group()
        dist.all_reduce(torch.ones(1, device="cuda"))
        assert before + 1 == group._get_sequence_number_for_group()


@in_process_of_its_own
def test_a_group_of_gloos_that_a_program_makes_itself() -> None:
    """It takes tensors on the CPU and on GPUs, whose streams wait as for any group; torch itself gets the real ones."""
    with simulated_cuda(1, hazards="report") as cuda:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(interface="lo")]
        options._timeout = timedelta(seconds=30)
        store = HashStore()
        group = gloo(PrefixStore("with options", store), 0, 1, options)
        assert isinstance(group, gloo)
        assert dist.ProcessGroupGloo is dist.distributed_c10d.ProcessGroupGloo
        for device in ("cpu", "cuda"):
            tensor = torch.full((2,), 3.0, device=device)
            takes = [[torch.zeros(2, device=device)]]
            group.allreduce([tensor]).wait()
            group.broadcast(tensor, root=0).wait()
            group.allgather(takes, [tensor]).wait()
            assert takes[0][0].tolist() == tensor.tolist() == [3.0, 3.0], device
            if hasattr(group, "all_gather_single"):  # since torch 2.14
                group.all_gather_single(takes[0][0], tensor + 1).wait()
                assert takes[0][0].tolist() == [4.0, 4.0]
        assert cuda.take_hazards() == ()

        group = gloo(PrefixStore("alone", store), 0, 1, timeout=timedelta(seconds=30))
        tensor = torch.full((2,), 3.0, device="cuda")
        work = group.allreduce(tensor)
        tensor.add_(1.0)
        work.wait()
        (hazard,) = cuda.take_hazards()
        assert "all_reduce" in hazard.explain()
        with pytest.raises(RuntimeError, match="Expecting one tensor only"):
            group.allreduce([tensor, tensor])
        with pytest.raises(RuntimeError, match="ProcessGroupGloo::allreduce_coalesced"):
            group.allreduce_coalesced([tensor])

        dist.init_process_group("gloo", store=PrefixStore("torch's own", store), rank=0, world_size=1)
        backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
        assert type(backend) is torch._C._distributed_c10d.ProcessGroupGloo
        dist.destroy_process_group()
    assert dist.ProcessGroupGloo is torch._C._distributed_c10d.ProcessGroupGloo
