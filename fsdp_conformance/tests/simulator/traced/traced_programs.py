"""
Programs on the simulated accelerator that also tell torch's tracing hooks, as they would on CUDA.

So one run gives two answers: the simulated accelerator's own, and that of a trace of the hooks.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fsdp_conformance.simulator import checker
from fsdp_conformance.simulator.as_cuda.stream_handles import handle_of
from fsdp_conformance.simulator.checker import labels
from fsdp_conformance.simulator.checker.hazard import Access, Hazard, hazard_from_json
from fsdp_conformance.simulator.device import SIMULATED, build, torch_sim
from fsdp_conformance.simulator.replacements import Replacements
from fsdp_conformance.simulator.traced.devices import follow_objects
from fsdp_conformance.simulator.traced.hooks import tracing
from fsdp_conformance.simulator.traced.trace import Trace

#: The stream of a group, which the hooks do not name; the operation without a Work does not either.
_GROUP = re.compile(r"\bgroup \S+|\bgroup_\w+|\bNCCL_stream|or, if \S+ returned")


class SimulatedGpu:
    """The simulated accelerator in the place of CUDA."""

    type = SIMULATED

    def current(self) -> int:
        return torch_sim.current_device()

    def stream(self, index: int) -> int:
        return handle_of(torch_sim.current_stream(index))


def traced(program: Callable[[], object], *, mode: str = "record", waits: str = "all") -> Trace:
    """The trace of a program, whose checker has its findings."""
    own = build.active().Checker()
    own.mode, own.waits = mode, waits
    trace = Trace(own, SimulatedGpu())
    replaced = Replacements()
    names = labels.install()  # for the lines of backward passes
    follow_objects(
        trace,
        replaced,
        stream_type=torch_sim.Stream,
        event_type=torch_sim.Event,
        stream_number=handle_of,
        event_number=operator.attrgetter("event_id"),
    )
    try:
        with tracing(trace, handle_of):
            program()
    finally:
        replaced.undo()
        names.remove()
    return trace


def answers(program: Callable[[], object], *, waits: str = "all") -> tuple[list[Any], list[Any]]:
    """The findings of the simulated accelerator and of the hooks, each in a form that can be compared."""
    checker.clear()
    before = checker.set_waits(waits)
    try:
        trace = traced(program, waits=waits)
    finally:
        checker.set_waits(before)
    simulated = checker.hazards()
    checker.clear()
    return compared(simulated), compared(map(hazard_from_json, trace.checker.hazards()))


def compared(hazards: Iterable[Hazard]) -> list[Any]:
    """The parts of findings that a reader acts on: kind, both lines with streams and bytes, and the missing wait."""
    return sorted(
        (
            hazard.kind.value,
            _place(hazard.then),
            _place(hazard.now),
            hazard.nbytes if hazard.kind != "reuse_in_flight" else 0,
            [_GROUP.sub("nccl_stream", line) for line in hazard.missing() if not line.startswith("#")],
            [wait.why.value for wait in hazard.useless_waits],
        )
        for hazard in hazards
    )


def _place(access: Access) -> Any:
    frame = access.site.innermost()
    line = f"{Path(frame.file).name}:{frame.line}" if frame is not None else ""
    return line, access.kind, _GROUP.sub("NCCL", access.stream.assigned_to or access.stream.name), access.extent()
