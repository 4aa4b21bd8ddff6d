"""Memory of the simulated accelerator: exact counts, reuse, storages that resize, pinned memory, copies in flight."""

from __future__ import annotations

import ctypes
import faulthandler
import linecache
import os
import signal
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.simulator import checker
from fsdp_conformance.simulator.checker.hazard import HazardKind, Site
from fsdp_conformance.simulator.device import build, memory
from fsdp_conformance.simulator.device import torch_sim as sim
from fsdp_conformance.tests.simulator.simulator_process import compiled, in_process_of_its_own

pytestmark = compiled


def kinds() -> list[HazardKind]:
    """The kinds of the hazards so far, which are then cleared."""
    hazard_kinds = [hazard.kind for hazard in checker.hazards()]
    checker.clear_hazards()
    return hazard_kinds


def block_of(tensor: torch.Tensor) -> int:
    return int(build.load().block_of(tensor))


class PassingOn(TorchDispatchMode):
    """Python dispatches every operation, and carries it out."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Wrapped(torch.Tensor):
    """A tensor around another, as DTensor is."""

    wrapped: torch.Tensor

    @staticmethod
    def __new__(cls, wrapped: torch.Tensor) -> Wrapped:
        made: Wrapped = torch.Tensor._make_wrapper_subclass(cls, wrapped.shape, dtype=wrapped.dtype)
        made.wrapped = wrapped
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own is a static function
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*(given.wrapped if isinstance(given, Wrapped) else given for given in args), **(kwargs or {}))


class TestCounts:
    """Bytes as requested, per device."""

    @in_process_of_its_own
    def test_allocated_and_peak_are_exact(self) -> None:
        """13 floats are 52 bytes; the peak is the largest sum at one time; a view takes no memory."""
        a = torch.empty(13, device="sim")
        b = torch.empty(5, dtype=torch.int8, device="sim")
        view = a[3:]
        assert 57 == sim.memory_allocated()
        del a
        assert 57 == sim.memory_allocated()
        del view

        assert 5 == sim.memory_allocated()
        assert 57 == sim.max_memory_allocated()
        assert 57 == sim.memory_reserved()
        del b
        sim.reset_peak_memory_stats()
        assert 0 == sim.memory_allocated() == sim.max_memory_allocated()

    @in_process_of_its_own
    def test_an_operation_holds_its_result_and_nothing_else(self) -> None:
        """(3, 5) by (5, 7): 60 + 140 bytes of inputs, 84 of the result; the kernel's own memory is not the device's."""
        a, b = torch.ones(3, 5, device="sim"), torch.ones(5, 7, device="sim")
        assert 200 == sim.memory_allocated()

        c = a @ b

        assert 284 == sim.memory_allocated() == sim.max_memory_allocated()
        assert 84 == c.untyped_storage().nbytes()

    @in_process_of_its_own
    def test_devices_count_for_themselves(self) -> None:
        """Pinned memory belongs to no device."""
        held = [torch.empty(2, device="sim:0"), torch.empty(4, device="sim:3"), torch.empty(8).pin_memory()]

        assert [8, 0, 0, 16] == [sim.memory_allocated(i) for i in range(4)]
        assert 32 == sim.host_memory_stats()["allocated"]
        assert "sim:3" == str(held[1].device)

    @in_process_of_its_own
    def test_a_training_step_leaves_what_it_should(self) -> None:
        """5 x 7 + 7 parameters, as many gradients: 336 bytes; activations are gone."""
        model = nn.Linear(5, 7, device="sim")
        model(torch.ones(3, 5, device="sim")).sum().backward()

        assert 2 * 4 * (5 * 7 + 7) == sim.memory_allocated()

    @in_process_of_its_own
    def test_the_cache_is_given_back(self) -> None:
        """Freed memory stays reserved until the cache is emptied."""
        del_me = [torch.empty(100, device="sim") for _ in range(3)]
        del_me.clear()
        assert (0, 1200) == (sim.memory_allocated(), sim.memory_reserved())

        sim.empty_cache()

        assert 0 == sim.memory_reserved()
        assert 1200 == sim.max_memory_reserved()

    @in_process_of_its_own
    def test_what_an_onlooker_allocates_is_not_counted(self) -> None:
        """Work in `suspended()` changes neither the counts nor which block is reused next."""
        tensor = torch.ones(4, device="sim")
        block = block_of(torch.empty(6, device="sim"))  # freed at once

        with checker.suspended():
            copy = torch.empty(6, device="sim")

        assert block != block_of(copy)
        assert block == block_of(torch.empty(6, device="sim"))
        assert 16 == sim.memory_allocated()
        del copy, tensor
        assert 0 == sim.memory_allocated()

    @pytest.mark.skipif(
        not hasattr(torch.accelerator, "memory_allocated"),
        reason="torch.accelerator has no memory functions before torch 2.9",
    )
    @in_process_of_its_own
    def test_torch_accelerator_is_told_the_same(self) -> None:
        """If this version of torch has these functions."""
        tensor = torch.empty(13, device="sim")

        assert 52 == torch.accelerator.memory_allocated() == torch.accelerator.max_memory_allocated()
        assert sim.memory_stats()["allocated_bytes.all.current"] == torch.accelerator.memory_allocated()
        del tensor
        torch.accelerator.empty_cache()
        assert 0 == torch.accelerator.memory_reserved()


class TestContents:
    """The contents of uninitialized memory."""

    @in_process_of_its_own
    def test_fresh_memory_is_nan(self) -> None:
        """New or reused, empty or resized: NaN in every type that has it."""
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            torch.ones(7, dtype=dtype, device="sim")
            assert torch.empty(7, dtype=dtype, device="sim").isnan().all()
        assert [-1, -1] == torch.empty(2, dtype=torch.int32, device="sim").tolist()

    @in_process_of_its_own
    def test_storages_resize(self) -> None:
        """They shrink to nothing and grow back, and tensors over them stay; only a size of zero loses the contents."""
        tensor = torch.arange(4.0, device="sim")
        storage = tensor.untyped_storage()

        storage.resize_(0)
        assert (0, 0) == (storage.nbytes(), sim.memory_allocated())
        storage.resize_(16)
        assert tensor.isnan().all()
        tensor.copy_(torch.tensor([1.0, 2, 3, 4]))
        storage.resize_(32)
        assert 32 == sim.memory_allocated()
        assert [1.0, 2.0, 3.0, 4.0] == tensor.tolist()
        storage.resize_(8)
        assert [1.0, 2.0] == tensor[:2].tolist()

    @in_process_of_its_own
    def test_tensors_resize(self) -> None:
        """`resize_` grows the storage, never shrinks it; `set_` takes another's."""
        tensor = torch.arange(6.0, device="sim")
        tensor.resize_(2, 2)
        assert [[0.0, 1.0], [2.0, 3.0]] == tensor.tolist()
        assert 24 == tensor.untyped_storage().nbytes()
        tensor.resize_(3, 3)
        assert [0.0, 1.0, 2.0] == tensor[0].tolist()

        other = torch.arange(6.0, device="sim")
        tensor.set_(other.untyped_storage(), 1, (2, 2), (2, 1))

        assert [[1.0, 2.0], [3.0, 4.0]] == tensor.tolist()
        untyped: Any = tensor
        untyped.set_()
        assert (0,) == tensor.shape


class TestReuse:
    """Blocks are cached per stream and size, last in first out."""

    @in_process_of_its_own
    def test_the_last_block_freed_is_the_first_used(self) -> None:
        """This holds for the same size on the same stream, and for no other."""
        a, b = torch.empty(6, device="sim"), torch.empty(6, device="sim")
        blocks = block_of(a), block_of(b)
        address = b.data_ptr()
        del a, b

        with sim.stream(sim.Stream()):
            assert block_of(torch.empty(6, device="sim")) not in blocks
        assert block_of(torch.empty(7, device="sim")) not in blocks
        again = torch.empty(6, device="sim")
        assert (blocks[1], address) == (block_of(again), again.data_ptr())
        result = again + 1
        assert blocks[0] == block_of(result)

    @in_process_of_its_own
    def test_memory_that_is_used_on_another_stream_is_freed_too_early(self) -> None:
        """Reuse meets what the other stream may still do; `record_stream` or a wait forbid that."""

        def use_and_free(record: bool, wait: bool) -> None:
            side = sim.Stream()
            tensor = torch.ones(6, device="sim")
            side.wait_stream(sim.current_stream())
            with sim.stream(side):
                tensor + 1
            if record:
                tensor.record_stream(side)
            if wait:
                sim.current_stream().wait_stream(side)
            del tensor
            torch.zeros(6, device="sim")

        use_and_free(record=True, wait=False)
        use_and_free(record=False, wait=True)
        assert [] == kinds()
        use_and_free(record=False, wait=False)
        assert [HazardKind.REUSE_IN_FLIGHT] == kinds()

    @in_process_of_its_own
    def test_another_size_is_found_in_the_worst_case(self) -> None:
        """A caching allocator could have given out the block of 6 for 5."""

        def use_and_free() -> None:
            side = sim.Stream()
            tensor = torch.ones(6, device="sim")
            side.wait_stream(sim.current_stream())
            with sim.stream(side):
                tensor + 1
            del tensor
            torch.zeros(5, device="sim")

        with checker.reuse("exact"):
            use_and_free()
            assert [] == kinds()
        checker.clear()
        with checker.reuse("worst_case"):
            use_and_free()
            assert [HazardKind.REUSE_IN_FLIGHT] == kinds()


class TestPinned:
    """Pinned memory, and copies that the host has not waited for."""

    @in_process_of_its_own
    def test_memory_is_pinned_where_asked(self) -> None:
        """`pin_memory()`, factories and `to(non_blocking=True)` to the CPU pin; views are pinned, copies are not."""
        pinned = torch.ones(3).pin_memory()

        assert pinned.is_pinned()
        assert pinned[1:].is_pinned()
        assert torch.empty(2, pin_memory=True).is_pinned()
        assert torch.ones(3, device="sim").to("cpu", non_blocking=True).is_pinned()
        assert not pinned.clone().is_pinned()
        assert not torch.ones(3).is_pinned()

    @pytest.mark.parametrize("synchronize", ["device", "stream", "event", "query", "item", "blocking copy"])
    @in_process_of_its_own
    def test_a_copy_to_the_host_arrives_when_the_host_has_waited(self, synchronize: str) -> None:
        """Before that it finds NaN; the wait must cover the copy."""
        target = torch.zeros(3).pin_memory()
        other = sim.Stream()
        source = torch.tensor([1.0, 2.0, 3.0]).to("sim")
        scalar = torch.ones((), device="sim")
        before = sim.Event()
        before.record()
        target.copy_(source, non_blocking=True)
        after = sim.Event()
        after.record()
        other.synchronize()
        before.synchronize()
        assert np.isnan(target.numpy()).all()
        assert [HazardKind.HOST_READ_IN_FLIGHT] == kinds()

        match synchronize:
            case "device":
                sim.synchronize()
            case "stream":
                sim.current_stream().synchronize()
            case "event":
                after.synchronize()
            case "query":
                assert after.query()
            case "item":
                scalar.item()
            case "blocking copy":
                scalar.cpu()

        assert [1.0, 2.0, 3.0] == target.tolist()

    @in_process_of_its_own
    def test_the_host_must_not_read_before(self) -> None:
        """A kernel of the CPU on the target is a hazard, of any part of it; on other memory it is none."""
        target = torch.zeros(6).pin_memory()
        target[:3].copy_(torch.ones(3, device="sim"), non_blocking=True)

        target[3:].sum()
        assert [] == kinds()
        target[2:4].sum()
        assert [HazardKind.HOST_READ_IN_FLIGHT] == kinds()

        sim.synchronize()
        assert 3.0 == target[:3].sum().item()
        assert [] == kinds()

    @in_process_of_its_own
    def test_an_optimizer_on_the_host_must_not_step_before(self) -> None:
        """Lists of tensors, in-place: the gradients of an offloaded model are read, in a thread of autograd too."""
        parameter = nn.Parameter(torch.ones(4))
        parameter.grad = torch.zeros(4).pin_memory()
        parameter.grad.copy_(torch.ones(4, device="sim"), non_blocking=True)
        torch.optim.SGD([parameter], lr=0.5, foreach=True).step()
        assert [HazardKind.HOST_READ_IN_FLIGHT] == kinds()

    @in_process_of_its_own
    def test_no_thread_of_the_host_may_read_before(self) -> None:
        """Gradients are copied by autograd's thread, and the optimizer that steps too early runs in another."""
        weight = nn.Parameter(torch.ones(4))
        there = weight.detach().to("sim").requires_grad_()

        def offload(grad: torch.Tensor) -> None:
            weight.grad = grad.to("cpu", non_blocking=True)

        there.register_hook(offload)
        (there * 2).sum().backward()
        torch.optim.SGD([weight], lr=0.5, foreach=True).step()

        assert [HazardKind.HOST_READ_IN_FLIGHT] == kinds()
        assert weight.isnan().all()

    @in_process_of_its_own
    def test_what_python_dispatches_is_looked_at(self) -> None:
        """Operations in a dispatch mode, and on the tensors that a tensor subclass wraps, such as a DTensor's."""
        target = torch.zeros(4).pin_memory()
        wrapped = Wrapped(target)
        target.copy_(torch.ones(4, device="sim"), non_blocking=True)

        with PassingOn():
            torch.add(target, 1)
        wrapped.mul_(2)

        assert ["aten::add.Tensor", "aten::mul_.Tensor", "aten::mul_.Tensor"] == [
            hazard.now.site.op for hazard in checker.hazards()
        ]
        assert [HazardKind.HOST_READ_IN_FLIGHT] * 2 + [HazardKind.HOST_WRITE_IN_FLIGHT] == kinds()

    @in_process_of_its_own
    def test_another_thread_raises_with_its_next_operation(self) -> None:
        """In the mode "raise": the first operation of a thread is looked at by an observer, which cannot."""
        weight = nn.Parameter(torch.ones(4))
        there = weight.detach().to("sim").requires_grad_()
        there.register_hook(lambda grad: setattr(weight, "grad", grad.to("cpu", non_blocking=True)))
        (there * 2).sum().backward()
        gradient = weight.grad
        assert gradient is not None

        def looked_at_by_the_next_operation() -> None:
            torch.add(gradient, 1)
            torch.ones(3).add(1)

        with (
            checker.mode("raise"),
            pytest.raises(RuntimeError, match=r"host read in flight: aten::add\.Tensor on host"),
        ):
            looked_at_by_the_next_operation()

        assert [HazardKind.HOST_READ_IN_FLIGHT] == kinds()

    @in_process_of_its_own
    def test_the_host_must_not_write_the_source_of_a_copy(self) -> None:
        """The device gets what was there at issue; the write is found at once, or when the host waits."""
        source = torch.ones(3).pin_memory()
        target = torch.empty(3, device="sim")

        target.copy_(source, non_blocking=True)
        source.fill_(5)
        assert [HazardKind.HOST_WRITE_IN_FLIGHT] == kinds()
        sim.synchronize()
        assert [1.0, 1.0, 1.0] == target.tolist()

        target.copy_(source, non_blocking=True)
        source.numpy()[1] = 7
        assert [] == kinds()
        sim.synchronize()
        assert [HazardKind.HOST_WRITE_IN_FLIGHT] == kinds()
        assert [5.0, 5.0, 5.0] == target.tolist()

        target.copy_(source, non_blocking=True)
        sim.synchronize()
        source.fill_(9)
        assert [5.0, 7.0, 5.0] == target.tolist()

    @in_process_of_its_own
    def test_copies_follow_one_another_through_pinned_memory(self) -> None:
        """The stream orders copies to the host and back, although the host waits for nothing."""
        through = torch.zeros(3).pin_memory()
        through.copy_(torch.full((3,), 4.0, device="sim"), non_blocking=True)
        back = torch.empty(3, device="sim")
        back.copy_(through, non_blocking=True)

        assert [4.0, 4.0, 4.0] == back.tolist()
        assert [4.0, 4.0, 4.0] == through.tolist()

    @in_process_of_its_own
    def test_memory_that_is_not_pinned_is_there_at_once(self) -> None:
        """`non_blocking` or not."""
        target = torch.zeros(3)

        target.copy_(torch.ones(3, device="sim"), non_blocking=True)

        assert [1.0, 1.0, 1.0] == target.tolist()

    @in_process_of_its_own
    def test_pinned_memory_may_be_freed_while_it_is_copied(self) -> None:
        """torch's allocator keeps it until the copy has been made."""
        torch.zeros(3).pin_memory().copy_(torch.ones(3, device="sim"), non_blocking=True)
        torch.empty(3, device="sim").copy_(torch.ones(3).pin_memory(), non_blocking=True)
        torch.zeros(3).pin_memory().fill_(7)
        sim.synchronize()

        assert 0 == sim.host_memory_stats()["allocated"]
        assert not build.load().pinned_copies_in_flight()

    @in_process_of_its_own
    def test_an_onlooker_finds_the_contents(self) -> None:
        """In `suspended()` all copies have arrived; afterwards they are in flight again."""
        target = torch.zeros(2, 3).pin_memory()
        target[:, 1:].copy_(torch.ones(2, 2, device="sim"), non_blocking=True)

        with checker.suspended():
            assert [[0.0, 1.0, 1.0], [0.0, 1.0, 1.0]] == target.tolist()

        assert np.isnan(target.numpy()[:, 1:]).all()
        sim.synchronize()
        assert 4.0 == target.sum().item()


class TestLimit:
    """A device with as much memory as it is given."""

    @in_process_of_its_own
    def test_what_does_not_fit_is_refused(self) -> None:
        """The error has CUDA's words and both sizes; the cache is freed first, and counts are those of CUDA."""
        memory.set_memory_limit(1 << 20)
        held = torch.ones(150_000, device="sim")
        assert (1 << 20) == sim.mem_get_info()[1] == sim.get_device_properties().total_memory
        assert sim.mem_get_info()[0] == (1 << 20) - 600_000
        cached = torch.ones(100_000, device="sim")
        del cached

        with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory\. Tried to allocate 585\.94 KiB"):
            torch.ones(150_000, device="sim")
        assert 600_000 == sim.memory_reserved()  # the cache was freed, but that was not enough
        stats = sim.memory_stats()
        assert (1, 1) == (stats["num_alloc_retries"], stats["num_ooms"])
        torch.ones(100_000, device="sim")
        torch.ones(200_000, device="sim:1")  # each device has its own
        del held
        memory.set_memory_limit(None)
        torch.ones(1_000_000, device="sim")

    @in_process_of_its_own
    def test_sixteen_gibibytes_take_no_time_and_no_space(self) -> None:
        """NaN wherever one looks, new or reused; only what is written takes up memory of the host."""
        big = torch.empty(16 << 30, dtype=torch.uint8, device="sim")
        assert (16 << 30) == sim.memory_allocated()
        for place in (0, 1 << 30, (16 << 30) - 1):
            assert 255 == big[place].item()
        big[1 << 30] = 7
        assert [255, 7, 255] == big[(1 << 30) - 1 : (1 << 30) + 2].tolist()
        del big
        again = torch.empty(16 << 30, dtype=torch.uint8, device="sim")
        assert 255 == again[1 << 30].item()
        assert resident() < 1 << 30

    @pytest.mark.parametrize("nbytes", [0, -1])
    def test_a_limit_is_positive(self, nbytes: int) -> None:
        """Said before anything is loaded."""
        with pytest.raises(ConfigError, match="nbytes must be positive"):
            memory.set_memory_limit(nbytes)


def resident() -> int:
    """Bytes of this process that are in the host's memory and its own."""
    with open("/proc/self/smaps_rollup") as file:
        lines = dict(line.split(":", 1) for line in file.read().splitlines()[1:])
    return sum(int(lines[name].split()[0]) for name in ("Private_Dirty", "Private_Clean")) * 1024


class TestTouches:
    """Accesses of the host that bypass torch, while a copy is in flight."""

    @in_process_of_its_own
    def test_numpy_is_seen_where_it_reads(self) -> None:
        """The line, once; a view that was made before will do; what it reads is NaN."""
        target = torch.zeros(100, pin_memory=True)
        view = target.numpy()
        target.copy_(torch.ones(100, device="sim"), non_blocking=True)
        seen = float(view[50])
        assert np.isnan(seen)
        assert np.isnan(view.sum())
        (one,) = checker.hazards()
        assert one.kind is HazardKind.HOST_READ_IN_FLIGHT
        assert one.now.site.op == "code outside torch"
        assert "float(view[50])" in line_of(one.now.site)
        checker.clear_hazards()
        sim.synchronize()
        assert 100.0 == view.sum()
        assert kinds() == []

    @in_process_of_its_own
    def test_a_write_is_told_from_a_read(self) -> None:
        """Into memory that a copy is about to fill."""
        target = torch.zeros(100, pin_memory=True)
        view = target.numpy()
        target.copy_(torch.ones(100, device="sim"), non_blocking=True)
        view[3] = 5.0
        assert [HazardKind.HOST_WRITE_IN_FLIGHT] == kinds()
        sim.synchronize()
        assert kinds() == []

    @in_process_of_its_own
    def test_bytes_beside_the_copy_are_free(self) -> None:
        """On the same pages or on others, in the same block, and of blocks that are no longer in flight."""
        target = torch.zeros(4 * 4096, pin_memory=True)
        view = target.numpy()
        copied = target[1000:3000]
        copied.copy_(torch.ones(2000, device="sim"), non_blocking=True)
        assert 0.0 == view[:1000].sum() == view[3000:].sum()
        assert kinds() == []
        sim.synchronize()
        assert 2000.0 == view.sum()
        # Every second element: none of its pages is in flight as a whole, so nothing is guarded.
        target[::2].copy_(torch.ones(2 * 4096, device="sim"), non_blocking=True)
        assert 0.0 == view[1::2][2000:].sum()
        sim.synchronize()
        assert kinds() == []

    @in_process_of_its_own
    def test_several_copies_and_waits(self) -> None:
        """Each ends when the host has waited for it; one into the bytes of another guards them again."""
        side = sim.Stream()
        target = torch.zeros(2048, pin_memory=True)
        view = target.numpy()
        value = torch.ones(2048, device="sim")
        side.wait_stream(sim.current_stream())
        for _ in range(50):
            target.copy_(value, non_blocking=True)
            sim.current_stream().synchronize()
            assert 2048.0 == view.sum()
        target.copy_(value, non_blocking=True)
        with checker.suspended():
            assert 2048.0 == view.sum()
        assert kinds() == []
        float(view[0])
        assert [HazardKind.HOST_READ_IN_FLIGHT] == kinds()

    @in_process_of_its_own
    def test_threads_are_seen(self) -> None:
        """A thread that reads through NumPy."""
        target = torch.zeros(2048, pin_memory=True)
        view = target.numpy()
        target.copy_(torch.ones(2048, device="sim"), non_blocking=True)
        thread = threading.Thread(target=lambda: float(view[7]))
        thread.start()
        thread.join()
        assert [HazardKind.HOST_READ_IN_FLIGHT] == kinds()

    @in_process_of_its_own
    def test_real_faults_still_end_the_process(self) -> None:
        """A child that touches memory which is not ours dies of it."""
        target = torch.zeros(2048, pin_memory=True)
        target.copy_(torch.ones(2048, device="sim"), non_blocking=True)
        child = os.fork()
        if child == 0:
            faulthandler.enable(open(os.devnull, "w"))  # noqa: SIM115 - it needs the file to the end
            ctypes.string_at(8)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status)
        assert os.WTERMSIG(status) == signal.SIGSEGV
        sim.synchronize()

    @in_process_of_its_own
    def test_guarded_memory_may_be_freed(self) -> None:
        """Its addresses belong to another tensor by then."""
        for _ in range(20):
            target = torch.zeros(2048, pin_memory=True)
            target.copy_(torch.ones(2048, device="sim"), non_blocking=True)
            del target
        fresh = torch.zeros(2048, pin_memory=True)
        assert 0.0 == fresh.numpy().sum()
        sim.synchronize()
        checker.clear_hazards()


def line_of(site: Site) -> str:
    """The line of this file that a site is at."""
    frame = site.innermost()
    assert frame is not None
    return linecache.getline(frame.file, frame.line)


class TestFrees:
    """Where memory is freed."""

    @pytest.mark.skipif(sys.version_info >= (3, 13), reason="the layout of frames is known up to Python 3.12")
    @in_process_of_its_own
    def test_the_line_that_drops_the_last_reference(self) -> None:
        """A del, a function that returns, an assignment: not the next operation."""
        side = sim.Stream()

        def used() -> torch.Tensor:
            tensor = torch.ones(64, device="sim")
            side.wait_stream(sim.current_stream())
            with sim.stream(side):
                tensor.mul(2)
            return tensor

        def leaves() -> None:
            result = used()
            assert result.is_contiguous()

        tensor = used()
        del tensor  # here
        torch.ones(64, device="sim")
        (one,) = checker.hazards()
        assert one.freed is not None
        assert one.freed.op == "free"
        assert "del tensor  # here" in line_of(one.freed)
        checker.clear_hazards()

        replaced = used()
        replaced = torch.zeros(1)  # here
        torch.ones(64, device="sim")
        (one,) = checker.hazards()
        assert one.freed is not None
        assert "replaced = torch.zeros(1)  # here" in line_of(one.freed)
        checker.clear_hazards()

        leaves()  # here
        torch.ones(64, device="sim")
        (one,) = checker.hazards()
        assert one.freed is not None
        assert any("leaves()  # here" in linecache.getline(frame.file, frame.line) for frame in one.freed.stack)
        checker.clear_hazards()
        del replaced
