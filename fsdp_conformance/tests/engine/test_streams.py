"""Work that is issued from several streams is in order."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fsdp_conformance.engine.streams import Streams


class _FakeStream:
    """A stream that notes which streams it waits for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.waited: list[str] = []

    def wait_stream(self, other: _FakeStream) -> None:
        self.waited.append(other.name)


def test_order_between_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current stream waits for every other one, but not for itself; on the CPU there is nothing to wait for."""
    here, there = _FakeStream("here"), _FakeStream("there")
    fake = SimpleNamespace(current_stream=lambda device: here)
    monkeypatch.setattr(torch, "get_device_module", lambda device_type: fake)
    streams = Streams(torch.device("cuda", 0))
    streams.follow([here, there, None])

    assert streams.exist
    assert here.waited == ["there"]
    assert Streams(torch.device("cpu")).current() is None
