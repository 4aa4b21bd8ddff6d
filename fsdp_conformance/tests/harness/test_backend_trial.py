"""The try of a backend before a case: whatever goes wrong there is the environment's fault."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_conformance.errors import EnvironmentUnavailable
from fsdp_conformance.harness import backend_trial, devices
from fsdp_conformance.harness.backend_trial import try_backend

CPU = torch.device("cpu")


class Collective:
    """An all-reduce of rank 1 of 3, as a backend carries it out."""

    def __init__(self, total: float = 6.0, *, polls: int | None = 0, error: Exception | None = None) -> None:
        self.total, self.polls, self.error = total, polls, error

    def __call__(self, tensor: torch.Tensor, *, async_op: bool) -> Collective:
        if self.error is not None:
            raise self.error
        assert tensor.tolist() == [2.0] * 4
        tensor.fill_(self.total)
        return self

    def is_completed(self) -> bool:
        if self.polls is None:
            return False
        self.polls -= 1
        return self.polls < 0

    def wait(self) -> None:
        assert self.polls is not None, "a wait for a collective that hangs would block forever"


@pytest.fixture(autouse=True)
def rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 of 3, on a device of which each rank has its own."""
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(devices, "is_scarce", lambda device_type: True)
    monkeypatch.setattr(backend_trial, "_LOOK_S", 0.0)


def tried(monkeypatch: pytest.MonkeyPatch, **how: Any) -> None:
    collective = Collective(**how)
    monkeypatch.setattr(dist, "all_reduce", collective)
    # However busy this machine is, one that ends has ended in time.
    try_backend(CPU, timeout_s=0.05 if collective.polls is None else 600.0)


def test_a_backend_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum is right, at once or after a while."""
    tried(monkeypatch)
    tried(monkeypatch, polls=3)


def test_a_backend_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report has the backend's own words and advice, as for NCCL in a container with little shared memory."""
    error = dist.DistBackendError("NCCL error: unhandled system error, No space left on device /dev/shm/nccl-a1b2")

    with pytest.raises(EnvironmentUnavailable, match=r"of rank 1 of 3, .* raised DistBackendError: .*/dev/shm.*doctor"):
        tried(monkeypatch, error=error)


def test_a_backend_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host does not wait for the device: it looks until the time is over."""
    with pytest.raises(EnvironmentUnavailable, match=r"did not finish within 0 s.*NCCL_P2P_DISABLE=1"):
        tried(monkeypatch, polls=None)


def test_a_backend_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken link between GPUs may lose data without a word."""
    with pytest.raises(EnvironmentUnavailable, match=r"gave \[4.0, 4.0, 4.0, 4.0\], expected \[6.0, .* is wrong"):
        tried(monkeypatch, total=4.0)
