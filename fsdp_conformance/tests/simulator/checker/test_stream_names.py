"""Tests for the names of streams, which are read from the line that made each of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fsdp_conformance.simulator import checker
from fsdp_conformance.simulator.checker.hazard import Stream, hazard_from_json
from fsdp_conformance.simulator.checker.stream_names import assigned_to
from fsdp_conformance.simulator.device import torch_sim as sim
from fsdp_conformance.simulator.frames import Frame
from fsdp_conformance.tests.simulator.simulator_process import compiled, in_process_of_its_own


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("side = torch.cuda.Stream()", "side"),
        ("self.copies = Stream(priority=-1)", "self.copies"),
        ("streams['copy'] = handle.Stream()", "streams['copy']"),
        ("side: Stream = torch.Stream(device='cuda')", "side"),
        ("self.side = given or torch.cuda.Stream()", "self.side"),
        ("side = torch.cuda.Stream() if cuda else None", "side"),
        ("use(side := torch.cuda.Stream())", "side"),
        ("first = second = torch.cuda.Stream()", "first"),
        ("side, n = torch.cuda.Stream(), 3", "side"),
        ("with torch.cuda.Stream() as side: pass", "side"),
        ("side = torch.cuda.ExternalStream(pointer)", "side"),
        # Which of them it is cannot be told from the line.
        ("a, b = torch.cuda.Stream(), torch.cuda.Stream()", ""),
        ("side = Stream() if high else Stream(priority=-1)", ""),
        ("streams = [torch.cuda.Stream() for _ in range(2)]", ""),
        # What is assigned is not the stream.
        ("loader = Prefetcher(torch.cuda.Stream())", ""),
        ("with torch.cuda.stream(torch.cuda.Stream()): pass", ""),
        ("side = make_stream()", ""),
        ("this is not Python", ""),
    ],
)
def test_names(tmp_path: Path, source: str, name: str) -> None:
    """The first frame of the program or of torch counts; without the source there is no name."""
    path = tmp_path / "train.py"
    path.write_text(f"import torch\n{source}\n", encoding="utf-8")
    inner = Frame(file=checker.__file__, line=1, function="__new__")
    made = Frame(file=str(path), line=2, function="<module>")
    assert name == assigned_to([inner, made])
    assert "" == assigned_to([inner, Frame(file=str(path), line=1, function="<module>")])
    assert "" == assigned_to([Frame(file=str(tmp_path / "gone.py"), line=2, function="<module>")])
    assert "" == assigned_to([])


def test_a_call_over_several_lines(tmp_path: Path) -> None:
    """The frame is at the line where the call begins."""
    path = tmp_path / "train.py"
    path.write_text("side = torch.cuda.Stream(\n    device,\n    priority=-1,\n)\n", encoding="utf-8")
    assert "side" == assigned_to([Frame(file=str(path), line=1, function="<module>")])


class Copies:
    """As data loaders keep a stream."""

    def __init__(self, stream: torch.Stream | None = None) -> None:
        self.stream = stream or sim.Stream()


def streams_of_hazard(first: torch.Stream, second: torch.Stream) -> tuple[Stream, Stream, list[str]]:
    """The streams of a race between two streams, and the code that is missing."""
    tensor = torch.zeros(4, device="sim")
    sim.synchronize()
    for each in (first, second):
        with sim.stream(each):
            tensor.add_(1)
    (hazard,) = checker.hazards()
    assert hazard == hazard_from_json(hazard.to_json())
    checker.clear()
    return hazard.then.stream, hazard.now.stream, hazard.missing()


@compiled
@in_process_of_its_own
def test_a_hazard_names_its_streams() -> None:
    """A stream has the name of its variable, if that is known and tells the streams apart."""
    side, copies = torch.Stream(device="sim", priority=-1), Copies()
    first, second, missing = streams_of_hazard(side, copies.stream)
    # Two values on one line, but only one of them is a stream.
    assert ["stream 1 (side)", "stream 2 (self.stream)"] == [str(first), str(second)]
    assert "self.stream.wait_stream(side)" == missing[1]

    made = []
    for _ in range(2):
        each = sim.Stream()
        made.append(each)
    first, second, missing = streams_of_hazard(*made)
    assert ["stream 3 (each)", "stream 4 (each)"] == [str(first), str(second)]
    assert "stream_4.wait_stream(stream_3)" == missing[1]

    first, second, missing = streams_of_hazard(sim.Stream(), sim.default_stream())
    assert ["stream 5", "the default stream"] == [str(first), str(second)]
    assert "default_stream.wait_stream(stream_5)" == missing[1]


@compiled
@in_process_of_its_own
def test_a_stream_of_two_names_has_none() -> None:
    """The pool has 32 streams: the 33rd is the first again. A name that may be wrong is not given."""
    side = sim.Stream()
    for _ in range(31):
        sim.Stream()
    other = sim.Stream()
    assert other == side
    first, second, missing = streams_of_hazard(side, sim.default_stream())
    assert ["stream 1", "the default stream"] == [str(first), str(second)]
    assert "default_stream.wait_stream(stream_1)" == missing[1]
