"""
Synchronisation call sites: the places in a program that make a stream or the host wait.

`SiteWatch` counts the sites that a run executes, and can drop their waits. If dropping a wait produces a hazard, the
checker guards that wait; if not, there must be a reason.

A site is the innermost Python frame that requests the wait, ignoring wrappers that only pass the call on. For a helper
that only waits, the site includes its caller. Waits requested by C++ alone are named after the C++ function.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType

import torch

from fsdp_conformance.simulator import checker
from fsdp_conformance.simulator.checker import Wait
from fsdp_conformance.simulator.device import build
from fsdp_conformance.simulator.frames import Owner, below_torch, owner

__all__ = ["SiteWatch", "SyncSite", "site_from_id", "watching"]

#: Files of torch whose frames only pass a call on: streams and events, dispatch, decorators, logging, autograd.
_WRAPPERS = (
    "_ops.py",
    "_streambase.py",
    "_tensor.py",
    "_utils.py",
    "accelerator/",
    "autograd/",
    "distributed/c10d_logger.py",
    "utils/_contextlib.py",
    "utils/_device.py",
    "utils/hooks.py",
)

#: Functions of torch that only wait, or that always end in a wait: the site includes their caller. "" means all
#: functions of the file.
_HELPERS = {
    ("distributed/fsdp/_common_utils.py", "_no_dispatch_record_stream"),
    ("distributed/fsdp/_fully_shard/_fsdp_param_group.py", "_wait_all_gather_streams_on_event"),
    ("distributed/fsdp/_runtime_utils.py", "_wait_for_computation_stream"),
    ("distributed/distributed_c10d.py", ""),
    ("distributed/_functional_collectives.py", ""),
}

#: C++ functions that pass a call on, or run any function they are given.
_CPP_WRAPPERS = re.compile(
    r"^(c10::(impl|detail|Dispatcher|KernelFunction|BoxedKernel|OperatorHandle)\b|at::_ops\b|c10d::(ops|Work|ProcessGroup)\b|"
    r"torch::(jit|detail|CapturedTraceback|unwind)\b|c10::\w*Guard\b|(c10|torch)::\w*(Event|Stream)\b|at::(Tensor|_ops|native)\b)"
)

#: A function of torch's, as demangled, after templates and anonymous namespaces have been removed.
_CPP_FUNCTION = re.compile(r"(?:^|[\s&*])((?:c10d|torch|at|c10)(?:::~?\w+)+)\(")

#: C++ functions that always end in a wait: the site includes their caller.
_CPP_HELPERS = re.compile(r"^c10::ivalue::Future::|^torch::autograd::GraphTask::exec_post_processing$")

#: The simulator's process group, which waits where NCCL's does.
_GROUP = "process group"


@dataclass(frozen=True, slots=True, order=True)
class SyncSite:
    """A place that requests a wait."""

    kind: Wait
    file: str
    """Relative to the directory of torch or of the program; empty if C++ requests the wait without Python."""
    function: str
    line: int
    """0 in C++."""
    caller: str = ""
    """The caller, if `function` is a helper: "file:line function", in C++ a function."""

    @property
    def id(self) -> str:
        """One line of text; `site_from_id` is the inverse."""
        where = f"{self.file}:{self.line} {self.function}" if self.file else f"C++ {self.function}"
        return f"{self.kind} {where}" + (f" < {self.caller}" if self.caller else "")

    @property
    def engine(self) -> str:
        """
        Whose wait it is: "fsdp2", "fsdp1", "ddp", "torch" for code that they share, "group" for the process group that
        replaces NCCL's, "program" for everything else.
        """
        place = f"{self.file} {self.function} {self.caller}"
        for pattern, engine in (
            (r"distributed/fsdp/_fully_shard/|_composable/replicate", "fsdp2"),
            (r"distributed/fsdp/|algorithms/_comm_hooks/", "fsdp1"),
            (
                r"nn/parallel/|algorithms/ddp_comm_hooks/|algorithms/join|c10d::(Reducer|Logger|\w*Hook|GradBucket)",
                "ddp",
            ),
            (rf"^ {_GROUP} $", "group"),
        ):
            if re.search(pattern, place):
                return engine
        return "torch" if not self.file or self.file.startswith("torch/") else "program"


def site_from_id(text: str) -> SyncSite:
    """The site with this `id`."""
    match = re.fullmatch(r"(\w+) (?:C\+\+ (\S.*?)|(\S+):(\d+) (\S+))(?: < (.*))?", text)
    if match is None:
        raise ValueError(f"site must be the id of a site, got {text!r}")
    kind, cpp, file, line, function, caller = match.groups()
    return SyncSite(Wait(kind), file or "", cpp or function, int(line or 0), caller or "")


class SiteWatch:
    """Counts the sites that are executed, and drops the waits of those whose ids are in `dropped`."""

    def __init__(self, dropped: Collection[str] = ()) -> None:
        self.dropped = frozenset(dropped)
        self.counts: Counter[str] = Counter()
        """How often each site was executed, dropped or not."""
        self._ids: dict[tuple[object, ...], str] = {}
        self._is_suspended = build.load().Checker.suspended

    def keep(self, kind: Wait, stream: int, device: int) -> bool:
        """The wait filter, called in the thread that waits."""
        if self._is_suspended():  # waits of suspended threads order nothing
            return True
        site = self._id(kind)
        self.counts[site] += 1
        return site not in self.dropped

    def _id(self, kind: Wait) -> str:
        """Computed once per place in Python code; the C++ stack is examined each time."""
        frames = _telling_frames(sys._getframe(2))
        if not frames or _is_autograd(frames[0]):
            function, caller = _cpp_place()
            return SyncSite(kind, "", function, 0, caller).id
        key = (kind, *((frame.f_code, frame.f_lineno) for frame in frames))
        if key not in self._ids:
            function, _ = _cpp_place()
            in_group = function == _GROUP
            self._ids[key] = (SyncSite(kind, "", function, 0) if in_group else _python_site(kind, frames)).id
        return self._ids[key]


@contextmanager
def watching(dropped: Collection[str] = ()) -> Iterator[SiteWatch]:
    """Watch the sites executed inside; those in `dropped` do not wait."""
    watch = SiteWatch(dropped)
    with checker.wait_filter(watch.keep):
        yield watch


def _telling_frames(frame: FrameType | None) -> list[FrameType]:
    """The innermost frame that identifies the wait, and its callers up to the first that is not a helper."""
    frames: list[FrameType] = []
    while frame is not None:
        if not _is_wrapper(frame.f_code):
            frames.append(frame)
            if not _is_helper(frame.f_code):
                break
        elif _is_autograd(frame):
            # Its callers are the program's backward(), which does not identify the wait.
            if not frames:
                frames.append(frame)
            break
        frame = frame.f_back
    return frames


def _is_wrapper(code: CodeType) -> bool:
    below = below_torch(code.co_filename)
    return below.startswith(_WRAPPERS) if below is not None else owner(code.co_filename) is Owner.MACHINERY


def _is_autograd(frame: FrameType) -> bool:
    """True if this is the call into autograd's engine, so that C++ waits."""
    return below_torch(frame.f_code.co_filename) == "autograd/graph.py"


def _is_helper(code: CodeType) -> bool:
    below = below_torch(code.co_filename)
    return (below, code.co_name) in _HELPERS or (below, "") in _HELPERS


def _python_site(kind: Wait, frames: list[FrameType]) -> SyncSite:
    first, *callers = frames
    # Of a chain of helpers, the innermost and the first frame that is not one suffice.
    caller = f"{_place(callers[-1])} {callers[-1].f_code.co_name}" if callers else ""
    return SyncSite(kind, _file(first.f_code), first.f_code.co_name, first.f_lineno, caller)


def _place(frame: FrameType) -> str:
    return f"{_file(frame.f_code)}:{frame.f_lineno}"


def _file(code: CodeType) -> str:
    """The path from "torch/" on; for the program's files, the name."""
    below = below_torch(code.co_filename)
    return os.path.basename(code.co_filename) if below is None else f"torch/{below}"


def _cpp_place() -> tuple[str, str]:
    """
    The C++ function that requests a wait, and the caller if it is a helper, as far as the libraries export names.

    For waits inside a collective, the process group.
    """
    # Private, in torch since 2.0. It uses addr2line, which comes with any compiler that could build the extension.
    gathered = torch._C._profiler.gather_traceback(python=False, script=False, cpp=True)
    (frames,) = torch._C._profiler.symbolize_tracebacks([gathered])
    names = [str(frame["name"]) for frame in frames]
    own = [index for index, name in enumerate(names) if name.startswith("sim::")]
    if any("::SimGroup::" in names[index] or "::SimWork::complete" in names[index] for index in own):
        return _GROUP, ""
    symbols: list[str] = []
    for name in names[max(own, default=-1) + 1 :]:
        match = _CPP_FUNCTION.search(_without_templates(name))
        if match and not _CPP_WRAPPERS.match(match.group(1)):
            symbols.append(match.group(1))
            if not _CPP_HELPERS.match(match.group(1)):
                break
    return (symbols[0] if symbols else "without a name"), (symbols[-1] if len(symbols) > 1 else "")


def _without_templates(name: str) -> str:
    """A demangled name without template arguments and anonymous namespaces."""
    name = name.replace("(anonymous namespace)::", "")
    while (shorter := re.sub(r"<[^<>]*>", "", name)) != name:
        name = shorter
    return name
