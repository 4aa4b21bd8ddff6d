"""Work that is issued from several streams is in order."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fsdp_conformance.engine.communication import Streams


class _FakeStream:
    """A stream that notes which streams it waits for, and compares with None as torch.Stream does."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.waited: list[str] = []

    def wait_stream(self, other: _FakeStream) -> None:
        self.waited.append(other.name)

    def __ne__(self, other: object) -> bool:
        return other is not None and self is not other


class _FakeTensor:
    """A tensor that notes the streams that use it."""

    def __init__(self) -> None:
        self.used_on: list[str] = []

    def record_stream(self, stream: _FakeStream) -> None:
        self.used_on.append(stream.name)


def test_order_between_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current stream waits for every other one, but not for itself; on the CPU there is nothing to wait for."""
    here, there = _FakeStream("here"), _FakeStream("there")
    fake = SimpleNamespace(current_stream=lambda device: here)
    monkeypatch.setattr(torch, "get_device_module", lambda device_type: fake)
    streams = Streams(torch.device("cuda", 0))
    streams.follow([here, there, None])  # type: ignore[list-item]

    assert streams.exist
    assert here.waited == ["there"]
    assert Streams(torch.device("cpu")).current() is None


@pytest.mark.parametrize(("allocated_on", "users"), [("here", []), ("there", ["here"]), (None, ["here"])])
def test_memory_is_kept_unless_the_current_stream_allocated_it(
    allocated_on: str | None, users: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is kept, too, if it is unknown which stream allocated it."""
    streams = {name: _FakeStream(name) for name in ("here", "there")}
    fake = SimpleNamespace(current_stream=lambda device: streams["here"])
    monkeypatch.setattr(torch, "get_device_module", lambda device_type: fake)
    tensor = _FakeTensor()
    Streams(torch.device("cuda", 0)).keep(tensor, streams.get(allocated_on or ""))  # type: ignore[arg-type]

    assert tensor.used_on == users
