"""
The frames of a Python stack that belong to the engine: where to look when it raised or hung.

Stacks come as text, from the ranks or from a run file of another machine, so files are told apart by their paths alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

#: A line of a traceback, or of a stack that faulthandler wrote.
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<function>\S+)')

_TORCH = re.compile(r"[/\\](site|dist)-packages[/\\]torch[/\\]")
#: The parts of torch that are themselves engines.
_TORCH_ENGINE = re.compile(r"[/\\]torch[/\\](distributed[/\\](fsdp|_composable|optim|tensor)|nn[/\\]parallel)[/\\]")
#: Python's own library; packages are installed below it.
_STANDARD = re.compile(r"^<|[/\\](lib[/\\]python3[^/\\]*|multiprocessing)[/\\](?!.*(site|dist)-packages)")
#: What runs tests.
_TOOLS = re.compile(r"[/\\](site|dist)-packages[/\\](_?pytest|pluggy|parameterized|xdist|execnet|hypothesis)[/\\]")
#: This package, except for the engines that it brings with it.
_OURS = re.compile(r"[/\\]fsdp_conformance[/\\](?!(engine|mutants)[/\\])|[/\\](suites|fixtures)[/\\][a-z0-9_]+\.py$")


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame."""

    file: str
    line: str
    function: str

    @property
    def is_of_engine(self) -> bool:
        """Whether it is neither torch's, nor Python's, nor a test framework's, nor ours."""
        return not any(pattern.search(self.file) for pattern in (_TORCH, _STANDARD, _TOOLS, _OURS))

    @property
    def name(self) -> str:
        """The file without its directories."""
        return re.split(r"[/\\]", self.file)[-1]

    def __str__(self) -> str:
        """ "acme_fsdp/unit.py:212 in unshard"; paths begin below site-packages or the working directory."""
        file = re.split(r"[/\\](?:site|dist)-packages[/\\]", self.file)[-1]
        return f"{file.removeprefix(f'{Path.cwd()}/')}:{self.line} in {self.function}"


def engine_frames(frames: Sequence[Frame]) -> list[Frame]:
    """The frames of the engine's own code; if there are none, those of torch's sharding code."""
    own = [frame for frame in frames if frame.is_of_engine]
    return own or [frame for frame in frames if _TORCH_ENGINE.search(frame.file)]


def frames_of_traceback(text: str) -> list[Frame]:
    """The frames of the last exception in a traceback, innermost first."""
    return frames_of_stack(text.rpartition("Traceback (most recent call last):")[2])[::-1]


def frames_of_stack(text: str) -> list[Frame]:
    """All frames of a text, in its order: innermost first if faulthandler wrote it."""
    return [Frame(**found.groupdict()) for found in _FRAME.finditer(text)]
