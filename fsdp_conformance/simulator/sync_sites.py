"""
Synchronisation call sites: the places of a program that make a stream, or the host, wait.

`SiteWatch` counts which sites a run executes, and drops the waits of some of them. A run without one wait that shows a
hazard says that the checker guards that wait; a run without one that shows none asks for a reason.

A site is the innermost Python frame that calls for the wait, without the wrappers that only pass the call on, but with
the caller of a helper that does nothing else than wait. Waits that C++ calls for without Python are named by the C++
function that does.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

import torch

from fsdp_conformance.simulator import build, checker
from fsdp_conformance.simulator.checker import Wait

__all__ = ["SiteWatch", "SyncSite", "site_from_id", "watching"]

_TORCH = os.path.dirname(torch.__file__) + os.sep
_SIMULATOR = str(Path(__file__).resolve().parent) + os.sep

#: Files of torch whose frames pass a call on: streams and events, dispatch, decorators, logging, autograd's entries.
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

#: Functions of torch that do nothing else than wait, or that end in a wait whoever calls them: the site has their
#: caller in it. All functions of a file where the name is "".
_HELPERS = {
    ("distributed/fsdp/_common_utils.py", "_no_dispatch_record_stream"),
    ("distributed/fsdp/_fully_shard/_fsdp_param_group.py", "_wait_all_gather_streams_on_event"),
    ("distributed/fsdp/_runtime_utils.py", "_wait_for_computation_stream"),
    ("distributed/distributed_c10d.py", ""),
    ("distributed/_functional_collectives.py", ""),
}

#: C++ functions that pass a call on, or run whatever they are given.
_CPP_WRAPPERS = re.compile(
    r"^(c10::(impl|detail|Dispatcher|KernelFunction|BoxedKernel|OperatorHandle)\b|at::_ops\b|c10d::(ops|Work|ProcessGroup)\b|"
    r"torch::(jit|detail|CapturedTraceback|unwind)\b|c10::\w*Guard\b|(c10|torch)::\w*(Event|Stream)\b|at::(Tensor|_ops|native)\b)"
)

#: A function of torch's, in the form in which the linker knows it, after templates and anonymous namespaces are gone.
_CPP_FUNCTION = re.compile(r"(?:^|[\s&*])((?:c10d|torch|at|c10)(?:::~?\w+)+)\(")

#: Who ends in a wait whoever calls it: the site has the caller in it.
_CPP_HELPERS = re.compile(r"^c10::ivalue::Future::|^torch::autograd::GraphTask::exec_post_processing$")

#: The simulator's own process group, which waits as NCCL's does.
_GROUP = "process group"


@dataclass(frozen=True, slots=True, order=True)
class SyncSite:
    """One place that calls for a wait."""

    kind: Wait
    file: str
    """Below the directory of torch, or of the program; empty where C++ calls for the wait without Python."""
    function: str
    line: int
    """0 in C++."""
    caller: str = ""
    """Who called, where `function` is a helper: "file:line function", in C++ a function."""

    @property
    def id(self) -> str:
        """One line of text; `site_from_id` is its inverse."""
        where = f"{self.file}:{self.line} {self.function}" if self.file else f"C++ {self.function}"
        return f"{self.kind} {where}" + (f" < {self.caller}" if self.caller else "")

    @property
    def engine(self) -> str:
        """
        Whose wait it is: "fsdp2", "fsdp1", "ddp", "torch" for what they share, "group" for the process group that
        stands for NCCL's, "program" for everything else.
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
    """The site of that `id`."""
    match = re.fullmatch(r"(\w+) (?:C\+\+ (\S.*?)|(\S+):(\d+) (\S+))(?: < (.*))?", text)
    if match is None:
        raise ValueError(f"site={text!r}, but should be the id of a site")
    kind, cpp, file, line, function, caller = match.groups()
    return SyncSite(Wait(kind), file or "", cpp or function, int(line or 0), caller or "")


class SiteWatch:
    """Counts the sites that are executed, and drops the waits of `dropped` ones, given by their ids."""

    def __init__(self, dropped: Collection[str] = ()) -> None:
        self.dropped = frozenset(dropped)
        self.counts: Counter[str] = Counter()
        """How often each site was executed, whether dropped or not."""
        self._ids: dict[tuple[object, ...], str] = {}
        self._is_suspended = build.load().Checker.suspended

    def keep(self, kind: Wait, stream: int, device: int) -> bool:
        """The filter: called in the thread that waits, with the stack of the call."""
        if self._is_suspended():  # who only looks on waits for nothing
            return True
        site = self._id(kind)
        self.counts[site] += 1
        return site not in self.dropped

    def _id(self, kind: Wait) -> str:
        """Made once per place of the Python code; C++ is followed each time."""
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
    """Watch the sites that are executed inside; those in `dropped` do not wait."""
    watch = SiteWatch(dropped)
    with checker.wait_filter(watch.keep):
        yield watch


def _telling_frames(frame: FrameType | None) -> list[FrameType]:
    """The innermost frame that says who waits, with its callers as far as it is a helper."""
    found: list[FrameType] = []
    while frame is not None:
        if not _is_wrapper(frame.f_code):
            found.append(frame)
            if not _is_helper(frame.f_code):
                break
        elif _is_autograd(frame):
            # What stands above it in the stack is the program's backward(): it does not say who waits.
            if not found:
                found.append(frame)
            break
        frame = frame.f_back
    return found


def _is_wrapper(code: CodeType) -> bool:
    file = code.co_filename
    if file.startswith(_SIMULATOR):
        return True
    return file.startswith(_TORCH) and file[len(_TORCH) :].startswith(_WRAPPERS)


def _is_autograd(frame: FrameType) -> bool:
    """Whether it is the call into autograd's engine, so that C++ waits."""
    return frame.f_code.co_filename == _TORCH + "autograd/graph.py"


def _is_helper(code: CodeType) -> bool:
    file = code.co_filename
    if not file.startswith(_TORCH):
        return False
    below = file[len(_TORCH) :]
    return (below, code.co_name) in _HELPERS or (below, "") in _HELPERS


def _python_site(kind: Wait, frames: list[FrameType]) -> SyncSite:
    first, *callers = frames
    # Of a chain of helpers the innermost and the first that is none tell enough.
    caller = f"{_place(callers[-1])} {callers[-1].f_code.co_name}" if callers else ""
    return SyncSite(kind, _file(first.f_code), first.f_code.co_name, first.f_lineno, caller)


def _place(frame: FrameType) -> str:
    return f"{_file(frame.f_code)}:{frame.f_lineno}"


def _file(code: CodeType) -> str:
    """Below the directory that torch is in; of the program the file's name."""
    if code.co_filename.startswith(_TORCH):
        return f"torch/{code.co_filename[len(_TORCH) :]}"
    return os.path.basename(code.co_filename)


def _cpp_place() -> tuple[str, str]:
    """
    The C++ function that calls for a wait, and the caller of a helper; as far as the libraries export names.

    Within a collective it is the process group.
    """
    # Private; in torch since 2.0. It asks addr2line, which comes with every compiler that could build the extension.
    gathered = torch._C._profiler.gather_traceback(python=False, script=False, cpp=True)
    (frames,) = torch._C._profiler.symbolize_tracebacks([gathered])
    names = [str(frame["name"]) for frame in frames]
    own = [index for index, name in enumerate(names) if name.startswith("sim::")]
    if any("::SimGroup::" in names[index] or "::SimWork::complete" in names[index] for index in own):
        return _GROUP, ""
    found: list[str] = []
    for name in names[max(own, default=-1) + 1 :]:
        match = _CPP_FUNCTION.search(_without_templates(name))
        if match and not _CPP_WRAPPERS.match(match.group(1)):
            found.append(match.group(1))
            if not _CPP_HELPERS.match(match.group(1)):
                break
    return (found[0] if found else "without a name"), (found[-1] if len(found) > 1 else "")


def _without_templates(name: str) -> str:
    """A demangled name without what stands in <> and without anonymous namespaces."""
    name = name.replace("(anonymous namespace)::", "")
    while (shorter := re.sub(r"<[^<>]*>", "", name)) != name:
        name = shorter
    return name
