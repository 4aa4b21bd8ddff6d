"""CUDA's streams and events that do nothing: what engines that use them on the CPU expect of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsdp_conformance.adapters.vendors import stub_cuda
from fsdp_conformance.errors import RankRaised, Unsupported
from fsdp_conformance.harness.simulated_ranks.ranks import run_ranks
from fsdp_conformance.plan import Plan

REPLACED = (
    "Stream", "Event", "current_stream", "default_stream", "stream", "device", "current_device", "memory_allocated",
    "max_memory_allocated", "memory_reserved", "synchronize", "empty_cache", "set_device",
    "is_current_stream_capturing",
)  # fmt: skip


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torch.cuda with the stubs, which are taken out again after the test."""
    owners: list[tuple[Any, tuple[str, ...]]] = [
        (torch.cuda, REPLACED),
        (torch.cuda.nvtx, ("range_push", "range_pop")),
        (torch.Tensor, ("record_stream", "cuda")),
    ]
    for owner, names in owners:
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))
    stub_cuda.install(Plan(), "some engine")
    return torch.cuda


def test_streams_and_events(cuda: Any) -> None:
    """Work on any stream is done; all streams are one, so that an engine's assertions on them hold."""
    stream = cuda.Stream()
    with cuda.stream(stream), cuda.device(0), stream:
        event = stream.record_event()
        stream.wait_event(event)
        stream.wait_stream(cuda.current_stream())
        cuda.synchronize()

    assert stream == cuda.current_stream() == cuda.default_stream()
    assert len({stream, cuda.current_stream()}) == 1
    assert event.query()
    assert stream.query()


def test_tensors_stay_where_they_are(cuda: Any) -> None:
    """The same tensors are returned, not copies: an engine writes into its inputs."""
    tensor = torch.ones(2)
    tensor.record_stream(cuda.current_stream())

    assert tensor.cuda() is tensor
    assert cuda.current_device() == 0


def test_cuda_stays_unavailable(cuda: Any) -> None:
    """Otherwise torch itself would use it."""
    assert not cuda.is_available() or torch.version.cuda


def test_one_method_finds_cuda_available() -> None:
    """That method alone, however often it is asked for, with its arguments and result, and not after an exception."""

    class Engine:
        def sees(self, is_available: bool) -> tuple[bool, bool]:
            if not is_available:
                raise ValueError("not wanted")
            return is_available, torch.cuda.is_available()

    before = torch.cuda.is_available()
    for _ in range(2):
        stub_cuda.seems_available_in(Engine, "sees")
        once = Engine.sees

    assert Engine.sees is once
    assert Engine().sees(True) == (True, True)
    with pytest.raises(ValueError, match="not wanted"):
        Engine().sees(False)
    assert torch.cuda.is_available() is before


def test_each_stub_is_a_function_of_its_own(cuda: Any) -> None:
    """torch._dynamo rejects a function that it finds under two names."""
    stubs = [getattr(cuda, name) for name in REPLACED if name not in ("Stream", "Event")]

    assert len({id(stub) for stub in stubs}) == len(stubs)


def test_refusals() -> None:
    """Another device needs the real functions, and simulated ranks would share the stubs."""
    with pytest.raises(
        Unsupported, match="supports some engine on the CPU and on the simulated accelerator, not on cuda"
    ):
        stub_cuda.install(Plan(device="cuda"), "some engine")
    with pytest.raises(RankRaised, match=r"which simulated ranks share\. Use --ranks processes"):
        run_ranks(1, lambda rank: stub_cuda.install(Plan(), "some engine"), timeout_s=30)
