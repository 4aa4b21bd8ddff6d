"""The accelerator of a machine that has none."""

from __future__ import annotations

from typing import NoReturn

import pytest
import torch

from fsdp_conformance.engine.accelerator import present_accelerator
from fsdp_conformance.harness import devices


def _raise() -> NoReturn:
    raise RuntimeError("Cannot access accelerator device when none is available.")


@pytest.mark.parametrize("of_torch", [_raise, lambda: torch.device("cuda")], ids=["2.6", "a build for CUDA"])
def test_without_one(of_torch: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers of torch 2.6, and of a later build for CUDA."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", of_torch)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)

    assert present_accelerator() is None
    assert devices.present_accelerator() is None


def test_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The accelerator is its type, without an index."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)

    assert present_accelerator() == torch.device("cuda")
    assert devices.present_accelerator() == torch.device("cuda")
