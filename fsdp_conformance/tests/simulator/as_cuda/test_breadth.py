"""Attention by the name of its kernel, flex attention, DLPack, error messages, formats of tensors."""

from __future__ import annotations

import re
import traceback
import unittest
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]  # not in its __all__

from fsdp_conformance.simulated_cuda import simulated_cuda
from fsdp_conformance.simulator import checker
from fsdp_conformance.simulator.as_cuda.names import NotSimulated
from fsdp_conformance.simulator.checker.hazard import HazardKind
from fsdp_conformance.tests.simulator.simulator_process import compiled, in_process_of_its_own

pytestmark = [compiled, pytest.mark.slow]

FUSED = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)


def attention(qkv: Tensor, mask: Tensor | None = None, *, is_causal: bool = False) -> Tensor:
    query, key, value = qkv
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=is_causal)


def kinds() -> list[HazardKind]:
    """The hazards so far, which are then cleared."""
    hazard_kinds = [hazard.kind for hazard in checker.hazards()]
    checker.clear()
    return hazard_kinds


def as_torch_raises(error: Exception) -> None:
    """Raise an error as torch's Python code does."""
    code = compile("def fail(error):\n    raise error\n", nn.Module.__init__.__code__.co_filename, "exec")
    names: dict[str, Any] = {}
    exec(code, names)
    names["fail"](error)


def on_side_stream(write: Callable[[], object], *, waits: bool) -> None:
    """Write on a side stream, and let the current stream wait for it or not."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        write()
    if waits:
        torch.cuda.current_stream().wait_stream(side)


def inputs(dtype: torch.dtype, device: str = "cuda", length: int = 8) -> Tensor:
    """Queries, keys and values in one tensor: (3, batch, heads, length, channels)."""
    torch.manual_seed(0)
    return torch.randn(3, 2, 2, length, 16).to(device, dtype).requires_grad_()


class TestAttention:
    """`sdpa_kernel` with each of CUDA's kernels."""

    @in_process_of_its_own
    def test_each_kernel_computes(self) -> None:
        """The fused ones are the CPU's fused kernel, forward and backward."""
        with simulated_cuda(1):
            for dtype in (torch.float32, torch.bfloat16):
                for backend in (*FUSED, SDPBackend.MATH):
                    if dtype is torch.float32 and backend in (FUSED[0], FUSED[2]):
                        continue
                    results = []
                    for device in ("cpu", "cuda"):
                        qkv = inputs(dtype, device)
                        allowed = backend if device == "cuda" or backend not in FUSED else SDPBackend.FLASH_ATTENTION
                        with sdpa_kernel(allowed):
                            out = attention(qkv, is_causal=True)
                        out.sum().backward()
                        results.append((out.detach().cpu(), qkv.grad.cpu()))  # type: ignore[union-attr]
                    assert all(map(torch.equal, *results)), (dtype, backend)

    @in_process_of_its_own
    def test_what_cuda_has_no_kernel_for_is_refused(self) -> None:
        """The error has CUDA's words, unless another kernel that accepts it is allowed."""
        mask = torch.zeros(8, 8, dtype=torch.bfloat16)
        with simulated_cuda(1):
            cases = [
                (SDPBackend.FLASH_ATTENTION, torch.float32, None),
                (SDPBackend.FLASH_ATTENTION, torch.bfloat16, mask),
                (SDPBackend.CUDNN_ATTENTION, torch.float32, None),
                (SDPBackend.EFFICIENT_ATTENTION, torch.float64, None),
            ]
            for backend, dtype, given in cases:
                qkv = inputs(dtype)
                attn_mask = None if given is None else given.cuda()
                with sdpa_kernel(backend), pytest.raises(RuntimeError, match="No available kernel"):
                    attention(qkv, attn_mask)
                with sdpa_kernel([backend, SDPBackend.MATH]):
                    attention(qkv, attn_mask)
            masked = attention(inputs(torch.bfloat16), mask.cuda())
            assert masked.shape == (2, 2, 8, 16)

    @in_process_of_its_own
    def test_races(self) -> None:
        """Values that another stream writes; none with a wait."""
        with simulated_cuda(1, hazards="report"):
            for backend in (*FUSED, SDPBackend.MATH):
                for waits in (False, True):
                    qkv = inputs(torch.bfloat16).detach()
                    on_side_stream(lambda written=qkv: written[2].mul_(2), waits=waits)  # type: ignore[misc]
                    with sdpa_kernel(backend):
                        attention(qkv)
                    assert (HazardKind.READ_AFTER_WRITE in kinds()) == (not waits), backend


class TestFlexAttention:
    """`flex_attention` with a mask and a change of scores, eagerly."""

    @in_process_of_its_own
    def test_numbers_and_races(self) -> None:
        """Forward and backward as the other attention computes them; values that another stream writes are a race."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        with simulated_cuda(1, hazards="report"):
            mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 32, 32, device="cuda")
            got, expected = inputs(torch.float32, length=32), inputs(torch.float32, length=32)
            # The change of scores is 1 for all, which softmax does not see.
            flex = torch.compile(flex_attention)
            out = flex(got[0], got[1], got[2], score_mod=lambda score, b, h, q, k: score + 1, block_mask=mask)
            plain = attention(expected, is_causal=True)
            torch.testing.assert_close(out, plain)
            for result in (out, plain):
                result.square().sum().backward()
            torch.testing.assert_close(got.grad, expected.grad)
            assert kinds() == []
            for waits in (False, True):
                qkv = inputs(torch.float32, length=32).detach()
                on_side_stream(lambda written=qkv: written[2].mul_(2), waits=waits)  # type: ignore[misc]
                flex_attention(qkv[0], qkv[1], qkv[2], block_mask=mask)
                assert (HazardKind.READ_AFTER_WRITE in kinds()) == (not waits)


class Consumer:
    """Another library's view of a tensor: it asks for the tensor on its own stream."""

    def __init__(self, tensor: Tensor, stream: int) -> None:
        self.tensor = tensor
        self.stream = stream

    def take(self) -> Tensor:
        return from_dlpack(self.tensor.__dlpack__(stream=self.stream))


class TestDlpack:
    """Tensors that go to another library and come back."""

    @in_process_of_its_own
    def test_memory_is_shared(self) -> None:
        """The same memory, under the same device; torch's two functions; a copy where asked for."""
        with simulated_cuda(2):
            tensor = torch.ones(3, device="cuda")
            assert tuple(map(int, tensor.__dlpack_device__())) == (2, 0)
            back = from_dlpack(tensor)
            back.add_(1)
            assert (back.device, back.data_ptr()) == (tensor.device, tensor.data_ptr())
            assert tensor.tolist() == [2, 2, 2]
            capsule = to_dlpack(tensor)
            assert from_dlpack(capsule).data_ptr() == tensor.data_ptr()
            assert from_dlpack(tensor, device="cuda:0").data_ptr() == tensor.data_ptr()
            assert from_dlpack(tensor, copy=True).data_ptr() != tensor.data_ptr()
            assert from_dlpack(tensor, device="cpu").device.type == "cpu"
            with pytest.raises(BufferError, match="different CUDA device index"):
                torch.ones(2, device="cuda:1").__dlpack__()
            with pytest.raises(BufferError, match="require gradient"):
                torch.ones(2, device="cuda", requires_grad=True).__dlpack__()

    @in_process_of_its_own
    def test_numpy(self) -> None:
        """Tensors go from and to NumPy through the CPU; NumPy refuses tensors of the device, as on CUDA."""
        with simulated_cuda(1):
            array = np.arange(3.0)
            tensor = from_dlpack(array).cuda()
            assert from_dlpack(array, device="cuda").tolist() == [0, 1, 2]
            assert np.from_dlpack(tensor.cpu()).tolist() == [0, 1, 2]
            with pytest.raises((RuntimeError, BufferError), match="device"):
                np.from_dlpack(tensor)
            with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
                np.asarray(tensor)

    @in_process_of_its_own
    def test_a_consumers_stream_is_ordered(self) -> None:
        """Only the named stream is ordered: another one races, and so does -1, which requests no order."""
        with simulated_cuda(1, hazards="report"):
            side, other = torch.cuda.Stream(), torch.cuda.Stream()
            for stream, used, is_ordered in (
                (side.cuda_stream, side, True),
                (side.cuda_stream, other, False),
                (-1, side, False),
                (1, torch.cuda.default_stream(), True),
            ):
                tensor = torch.ones(3, device="cuda")
                taken = Consumer(tensor, stream).take()
                with torch.cuda.stream(used):
                    taken.add_(1)
                assert (kinds() == []) == is_ordered, (stream, is_ordered)
                torch.cuda.synchronize()

    @in_process_of_its_own
    def test_an_external_stream_is_the_stream_that_it_was_made_from(self) -> None:
        with simulated_cuda(1, hazards="report"):
            side, other = torch.cuda.Stream(), torch.cuda.Stream()
            for handle, is_ordered in ((side.cuda_stream, True), (other.cuda_stream, False)):
                tensor = torch.ones(3, device="cuda")
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    tensor.mul_(2)
                torch.cuda.current_stream().wait_stream(torch.cuda.ExternalStream(handle, device="cuda:0"))
                tensor.add_(1)
                assert (kinds() == []) == is_ordered
                torch.cuda.synchronize()
            assert torch.cuda.get_stream_from_external(side.cuda_stream, "cuda:0") == side
            assert torch.cuda.ExternalStream(0) == torch.cuda.default_stream()
            with pytest.raises(ValueError, match="per-thread default streams are not simulated"):
                torch.cuda.ExternalStream(2)
            with pytest.raises(ValueError, match="got 94023: no stream has it"):
                torch.cuda.ExternalStream(94023)

    @in_process_of_its_own
    def test_races_through_shared_memory(self) -> None:
        """A write through the other name races with a read through this one, unless it is waited for."""
        with simulated_cuda(1, hazards="report"):
            for waits in (False, True):
                tensor = torch.ones(3, device="cuda")
                shared = from_dlpack(tensor)
                on_side_stream(lambda written=shared: written.mul_(2), waits=waits)  # type: ignore[misc]
                tensor.add(1)
                assert kinds() == ([] if waits else [HazardKind.READ_AFTER_WRITE])

    @in_process_of_its_own
    def test_wrong_streams(self) -> None:
        """Wrong streams are refused as torch refuses them on CUDA."""
        with simulated_cuda(1):
            tensor = torch.ones(3, device="cuda")
            with pytest.raises(BufferError, match="per-thread default stream"):
                tensor.__dlpack__(stream=2)
            with pytest.raises(AssertionError, match="unsupported stream on CUDA: 0"):
                tensor.__dlpack__(stream=0)
            with pytest.raises(TypeError, match="stream must be"):
                tensor.__dlpack__(stream="1")
            with pytest.raises(ValueError, match="got 5: no stream has it"):
                tensor.__dlpack__(stream=5)


class TestBackends:
    """A group says which backend the program asked for, and does what that one does with sparse tensors."""

    @in_process_of_its_own
    def test_gloo_and_nccl(self) -> None:
        """A new group has the default group's backend unless one is given; NCCL refuses what gloo reduces."""
        with simulated_cuda(1):
            for backend, other in (("nccl", "gloo"), ("gloo", "nccl")):
                dist.init_process_group(backend, rank=0, world_size=1, store=HashStore())
                groups = {None: backend, dist.new_group(): backend, dist.new_group(backend=other): other}
                for group, name in groups.items():
                    assert dist.get_backend(group) == name
                    process_group = group or dist.distributed_c10d._get_default_group()
                    assert process_group.name() == name
                    process_group.barrier().wait()
                    gradient = torch.eye(3, device="cuda").to_sparse()
                    if name == "gloo":
                        dist.all_reduce(gradient, group=group)
                        assert gradient.to_dense().trace().item() == 3
                    else:
                        with pytest.raises(RuntimeError, match="NCCL does not support all_reduce with sparse"):
                            dist.all_reduce(gradient, group=group)
                dist.destroy_process_group()


class TestMessages:
    """Errors of torch's C++ name the device as the program does."""

    @in_process_of_its_own
    def test_devices_in_messages(self) -> None:
        """str(), tracebacks and errors from backward's threads name cuda; args keep C++'s text."""
        with simulated_cuda(2):
            one, other = torch.ones(2, device="cuda:0"), torch.ones(2, device="cuda:1")
            with pytest.raises(RuntimeError, match="at least two devices, cuda:0 and cuda:1!") as caught:
                one + other
            assert "cuda:0 and cuda:1" in "".join(traceback.format_exception(caught.value))
            assert "sim:0" in caught.value.args[0]
            with pytest.raises(TypeError, match="can't convert cuda:1 device type tensor"):
                other.numpy()
            with pytest.raises(RuntimeError, match="cannot pin 'CUDAFloatType' only dense CPU tensors"):
                one.pin_memory()
            with pytest.raises(RuntimeError, match="pin_memory must be False on cuda"):
                torch.empty(2, device="cuda", pin_memory=True)
            leaf = torch.ones(2, device="cuda:0", requires_grad=True)
            leaf.register_hook(lambda grad: grad + other)
            with pytest.raises(RuntimeError, match="cuda:0 and cuda:1"):
                leaf.sum().backward()
        assert "sim:0" in str(caught.value)
        assert "__str__" not in vars(RuntimeError)

    @in_process_of_its_own
    def test_texts_of_the_program_stay(self) -> None:
        """Texts are left alone where Python raises, and where a text is quoted."""
        with simulated_cuda(1):
            for raised in (RuntimeError("robot sim:0 is stuck"), ValueError("on sim")):
                with pytest.raises(type(raised)) as caught:
                    raise raised
                assert str(caught.value) == raised.args[0]
            assert str(RuntimeError("sim:0")) == "sim:0"
            with pytest.raises(ValueError, match="'sim:0'"):
                int("sim:0")

    @in_process_of_its_own
    def test_our_own_messages(self) -> None:
        """They name the device as the program does; so do streams and events when they are printed."""
        with simulated_cuda(1):
            with pytest.raises(NotImplementedError) as caught:
                torch.cuda.Event(interprocess=True)
            assert "cannot share memory of cuda" in str(caught.value)
            assert "sim" not in str(caught.value)
            assert repr(torch.cuda.Stream()).startswith("<torch.cuda.Stream device=cuda:0 ")
            assert repr(torch.cuda.Event()) == "<torch.cuda.Event device=cuda>"

    @in_process_of_its_own
    def test_unittest_reads_messages(self) -> None:
        """It takes the traceback away first. Torch's Python code and descriptions of tensors name the type alone."""
        reads = unittest.TestCase().assertRaisesRegex
        with simulated_cuda(2):
            with reads(RuntimeError, "cuda:0 and cuda:1!"):
                torch.ones(2, device="cuda:0") + torch.ones(2, device="cuda:1")
            with unittest.TestCase().assertRaises(RuntimeError) as caught:
                torch.ones(2, device="cuda:0") + torch.ones(2, device="cuda:1")
            assert "cuda:0 and cuda:1!" in str(caught.exception)
            with reads(RuntimeError, "on sim"):
                raise RuntimeError("on sim")
            for text, message in (
                ("TensorOptions(device=sim, layout=Strided)", "device=cuda, "),
                ("got cpu for DTensor and sim for FSDP", "cpu for DTensor and cuda for"),
                ("unsupported device type sim", "type cuda"),
                ("got sim: 4, and sim.py", "got sim: 4, and sim.py"),
            ):
                with reads(ValueError, re.escape(message)):
                    as_torch_raises(ValueError(text))


class TestFormats:
    """Tensors in formats that the device has not."""

    @in_process_of_its_own
    def test_they_are_refused_by_name(self) -> None:
        """The error names the function that was called; on the CPU they still work."""
        with simulated_cuda(1):
            refused: dict[str, Callable[[], object]] = {
                "torch.sparse_csr_tensor": lambda: torch.sparse_csr_tensor([0, 1], [0], [1.0], device="cuda"),
                "torch.Tensor.to_sparse_csr": lambda: torch.eye(2, device="cuda").to_sparse_csr(),
                "torch.quantize_per_tensor": lambda: torch.quantize_per_tensor(
                    torch.ones(2, device="cuda"), 1.0, 0, torch.qint8
                ),
            }
            for name, act in refused.items():
                with pytest.raises(NotSimulated, match=f"{name} on a GPU has no counterpart"):
                    act()
            with warnings.catch_warnings(action="ignore"):  # torch: "support is in beta state"
                assert torch.eye(2).to_sparse_csr().layout == torch.sparse_csr
            assert isinstance(nn.Embedding(2, 2, sparse=True).cuda().weight, nn.Parameter)


@in_process_of_its_own
def test_workspaces_are_freed() -> None:
    """Programs that measure memory do this first. Builds for the CPU have no such function."""
    before = hasattr(torch._C, "_cuda_clearCublasWorkspaces")
    with simulated_cuda(1):
        used = torch.cuda.memory_allocated()
        torch._C._cuda_clearCublasWorkspaces()
        assert used == torch.cuda.memory_allocated()
    assert before == hasattr(torch._C, "_cuda_clearCublasWorkspaces")
