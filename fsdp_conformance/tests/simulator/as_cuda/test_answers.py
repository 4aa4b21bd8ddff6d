"""Answers that would differ from CUDA's without a word: types, properties of a device, waits of the host, sharing."""

from __future__ import annotations

import functools
import multiprocessing.queues
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_conformance.simulated_cuda import simulated_cuda
from fsdp_conformance.simulator import checker
from fsdp_conformance.simulator.as_cuda.names import NotSimulated
from fsdp_conformance.tests.simulator.simulator_process import compiled, in_process_of_its_own

pytestmark = [compiled, pytest.mark.slow]

#: With the types of tensors, which torch adds in C++.
CPU: Any = torch
CUDA: Any = torch.cuda

SYNC = "called a synchronizing CUDA operation"


class TestTypes:
    """The types of tensors and storages."""

    @in_process_of_its_own
    def test_types_make_tensors(self) -> None:
        """Of a size, from a list, from an array, from a tensor and a storage, whose memory they share."""
        with simulated_cuda(1):
            kind: Any = CUDA.FloatTensor
            assert kind().shape == (0,)
            assert kind(2, 3).shape == kind(torch.Size([2, 3])).shape == (2, 3)
            made = kind([1, 2])
            assert (made.is_cuda, made.dtype, made.tolist()) == (True, torch.float32, [1, 2])
            assert kind(made).data_ptr() == kind(made.untyped_storage()).data_ptr() == made.data_ptr()
            assert CUDA.LongTensor([1.5]).tolist() == [1]
            with pytest.raises(TypeError, match=r"expected FloatTensor \(got torch.cuda.LongTensor\)"):
                kind(CUDA.LongTensor([1]))
            with pytest.raises(RuntimeError, match="expects device type: cuda but device type: cpu"):
                kind(2, device="cpu")

    @in_process_of_its_own
    def test_types_recognise_tensors(self) -> None:
        """By dtype, layout and device; `type` converts to them, and says their names."""
        with simulated_cuda(1):
            tensor = torch.ones(2, device="cuda")
            assert isinstance(tensor, CUDA.FloatTensor)
            assert isinstance(nn.Parameter(tensor), CUDA.FloatTensor)
            assert not isinstance(tensor, CUDA.HalfTensor)
            assert not isinstance(tensor.cpu(), CUDA.FloatTensor)
            assert not isinstance(tensor, CPU.FloatTensor)
            assert isinstance(tensor.to_sparse(), CUDA.sparse.FloatTensor)
            assert not isinstance(tensor.to_sparse(), CUDA.FloatTensor)
            assert isinstance(tensor.type(CUDA.HalfTensor), CUDA.HalfTensor)
            assert tensor.type() == "torch.cuda.FloatTensor"
            assert CUDA.FloatTensor.dtype == torch.float32
        assert not isinstance(tensor, CUDA.FloatTensor)

    @in_process_of_its_own
    def test_storages(self) -> None:
        """A storage is on CUDA if its tensor is, and is made by name; torch itself gets the truth."""
        with simulated_cuda(1), warnings.catch_warnings(action="ignore"):
            tensor = torch.ones(2, device="cuda")
            for storage in (tensor.storage(), tensor.untyped_storage()):
                assert storage.is_cuda
                assert not storage.cpu().is_cuda
            assert tensor.storage().type() == "torch.cuda.FloatStorage"
            assert isinstance(tensor.storage(), torch.cuda.FloatStorage)
            assert not isinstance(tensor.cpu().storage(), torch.cuda.FloatStorage)
            assert torch.UntypedStorage(4, device="cuda").is_cuda
            assert nn.utils.rnn.pack_sequence([tensor]).is_cuda
            assert pickle.loads(pickle.dumps(tensor)).is_cuda
            with pytest.raises(AttributeError, match="Use DLPack"):
                _ = tensor.__cuda_array_interface__
            assert not hasattr(tensor, "__cuda_array_interface__")


class TestDevices:
    """The properties of a device, and torch.backends."""

    @in_process_of_its_own
    def test_properties(self) -> None:
        """Each device has an identity of its own, and the sizes that a program finds in several places agree."""
        with simulated_cuda(2):
            one, other = map(CUDA.get_device_properties, (0, torch.device("cuda", 1)))
            for name in ("uuid", "pci_bus_id"):
                assert getattr(one, name) != getattr(other, name)
            assert one.uuid == torch.cuda.get_device_properties("cuda").uuid
            assert len(one.uuid.bytes) == 16
            assert one.clock_rate == 1000 * torch.cuda.clock_rate()
            assert (one.major, one.minor) == torch.cuda.get_device_capability()
            assert repr(one).startswith("_CudaDeviceProperties(name='simulated accelerator', major=9, minor=0, total")
            held = torch.ones(1 << 20, device="cuda")
            for total in (one.total_memory, 4 << 30):
                torch.cuda.set_per_process_memory_fraction(total / one.total_memory)
                free, said = torch.cuda.mem_get_info()
                assert said == one.total_memory
                assert free == said - torch.cuda.memory_reserved() <= said - held.nbytes
            with pytest.raises(AssertionError, match="Invalid device id"):
                torch.cuda.get_device_properties(2)

    @in_process_of_its_own
    def test_statistics(self) -> None:
        """Nested and flat, of the device and of pinned memory."""
        with simulated_cuda(1):
            held = torch.ones(1000, device="cuda"), torch.ones(1000).pin_memory()
            nested = torch.cuda.memory_stats_as_nested_dict()
            assert nested["allocated_bytes"]["all"]["current"] == torch.cuda.memory_allocated() >= held[0].nbytes
            assert torch.cuda.device_memory_used() == torch.cuda.memory_reserved()
            if hasattr(torch.cuda, "host_memory_stats"):  # not in every version
                assert torch.cuda.host_memory_stats()["allocated_bytes.current"] >= held[1].nbytes
            assert len(torch.cuda.default_generators) == 1

    @in_process_of_its_own
    def test_backends(self) -> None:
        """A program finds CUDA and cuDNN, and the kernels that attention may use; torch does not."""
        before = torch.backends.cudnn.version()
        with simulated_cuda(1):
            assert torch.backends.cuda.is_built()
            assert torch.backends.cudnn.is_available()
            assert torch.backends.cudnn.version() >= 90000
            image = torch.ones(2, device="cuda")
            assert torch.backends.cudnn.is_acceptable(image)
            assert not torch.backends.cudnn.is_acceptable(image.long())
            for dtype, flash in ((torch.bfloat16, True), (torch.float32, False)):
                qkv = torch.ones(1, 1, 8, 64, dtype=dtype, device="cuda")
                params = torch.backends.cuda.SDPAParams(qkv, qkv, qkv, None, 0.0, True, False)
                assert torch.backends.cuda.can_use_flash_attention(params) == flash
                assert torch.backends.cuda.can_use_efficient_attention(params)
        assert torch.backends.cudnn.version() == before


def message(call: Callable[[], object]) -> str:
    """Of the error that a call raises; empty if it raises none."""
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def waiting() -> dict[str, Callable[[Tensor], object]]:
    """Calls for which the host waits on CUDA."""
    return {
        "item": lambda x: x.sum().item(),
        "copy to the host": lambda x: x.cpu(),
        "copy to pinned memory": lambda x: torch.empty(4).pin_memory().copy_(x),
        "copy to the device": lambda x: torch.ones(4).cuda(),
        "nonzero": torch.nonzero,
        "mask": lambda x: x[x > 2],
        "mask on the CPU": lambda x: x[torch.tensor([True, False, True, False])],
        "indices on the CPU": lambda x: x[torch.tensor([0, 1])],
        "values for a mask": lambda x: x.index_put((x < 2,), x[2:]),
        "stream": lambda x: torch.cuda.current_stream().synchronize(),
    }


def running_ahead(x: Tensor) -> dict[str, Callable[[], object]]:
    """Calls for which it does not."""
    index, mask, side, pinned = torch.tensor([0, 1]).cuda(), x > 2, torch.cuda.Stream(), torch.ones(4).pin_memory()
    return {
        "arithmetic": lambda: x + x,
        "factory": lambda: torch.ones(3, device="cuda"),
        "index": lambda: x[index],
        "index of values": lambda: x.index_put((index,), x[:2]),
        "fill a mask": lambda: x.clone().__setitem__(mask, 1.0),
        "non-blocking copies": lambda: (pinned.to("cuda", non_blocking=True), pinned.copy_(x, non_blocking=True)),
        "a wait of a stream": functools.partial(side.wait_stream, torch.cuda.current_stream()),
        "a question": side.query,
        "clipping": lambda: nn.utils.clip_grad_norm_([nn.Parameter(x)], 1.0),
        # Of all streams, and of an event: CUDA does not count them.
        "device": torch.cuda.synchronize,
        "event": lambda: torch.cuda.current_stream().record_event().synchronize(),
    }


class TestSyncDebugMode:
    """`torch.cuda.set_sync_debug_mode`."""

    @in_process_of_its_own
    def test_waits_are_errors(self) -> None:
        """Where CUDA's host waits, and nowhere else."""
        with simulated_cuda(1):
            x = torch.arange(4.0).cuda()
            torch.cuda.set_sync_debug_mode("error")
            assert torch.cuda.get_sync_debug_mode() == 2
            for name, call in waiting().items():
                assert SYNC in message(functools.partial(call, x)), name
            torch.cuda.set_sync_debug_mode("default")
            ahead = running_ahead(x)
            torch.cuda.set_sync_debug_mode("error")
            for call_ahead in ahead.values():
                call_ahead()
            torch.cuda.set_sync_debug_mode(0)
            assert x.sum().item() == 6

    @in_process_of_its_own
    def test_waits_are_warnings(self) -> None:
        """Each time; and the mode ends with the GPUs."""
        with simulated_cuda(1):
            x = torch.arange(4.0).cuda()
            torch.cuda.set_sync_debug_mode("warn")
            for _ in range(2):
                with pytest.warns(UserWarning, match=SYNC):
                    assert x.sum().item() == 6
            with pytest.raises(RuntimeError, match="invalid value of debug_mode"):
                torch.cuda.set_sync_debug_mode("loud")
        with simulated_cuda(1):
            assert torch.cuda.get_sync_debug_mode() == 0

    @in_process_of_its_own
    def test_an_index_does_not_order_the_host(self) -> None:
        """A mask does: its values are counted. So the missing wait shows after an index, and is hidden by a mask."""
        with simulated_cuda(1, hazards="report"):
            for is_mask in (False, True):
                x, side = torch.arange(4.0).cuda(), torch.cuda.Stream()
                chosen = torch.tensor([True, False, True, False] if is_mask else [0, 2]).cuda()
                torch.cuda.synchronize()
                x.mul_(2)
                x[chosen]
                with torch.cuda.stream(side):
                    x.add(1)
                assert (checker.num_hazards() > 0) != is_mask
                checker.clear()


class TestSharing:
    """Tensors for other processes."""

    @in_process_of_its_own
    def test_tensors_are_refused(self) -> None:
        """By the queue in the line that puts them there, and by whatever pickles them for a process; the CPU's go."""
        put = multiprocessing.queues.Queue.put
        with simulated_cuda(1):
            tensor = torch.ones(2, device="cuda")
            context = torch.multiprocessing.get_context("spawn")
            queue, simple, (_, sender) = context.Queue(), context.SimpleQueue(), context.Pipe()
            sends = (lambda: queue.put({"batch": [tensor]}), lambda: simple.put(tensor), lambda: sender.send(tensor))
            for send in sends:
                with pytest.raises(
                    NotSimulated, match=r"sent to another process has no counterpart .* Send tensor.cpu"
                ):
                    send()
            queue.put(tensor.cpu())
            assert queue.get().tolist() == [1, 1]
            queue.close()
            queue.join_thread()
            with pytest.raises(NotSimulated, match="processes do not share events"):
                torch.cuda.Event().ipc_handle()
        assert multiprocessing.queues.Queue.put is put
