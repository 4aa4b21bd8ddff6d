"""
A stack frame, and whose code it runs, decided by its file.

Everything that picks frames out of a stack asks here: the call site of a collective, the stacks of a hazard, the sites
of waits, and scripts that ask torch about "cuda". Standard library only: torch's directory is looked up when it is
first needed, without importing torch.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, lru_cache
from pathlib import Path


class Owner(StrEnum):
    """Who wrote the code of a frame."""

    TORCH = "torch"
    PYTHON = "python"
    """The standard library, typing_extensions, whose wrappers call deprecated functions, and NumPy's own files."""
    NO_FILE = "no file"
    """Code without a file to point to: "<string>", "<frozen runpy>"."""
    MACHINERY = "machinery"
    """The part of this package that runs code for others: the harness and the simulator."""
    RUNNER = "runner"
    """pytest, its plugins for workers, and what these stand on."""
    USER = "user"
    """Everything else: scripts, engines, and other libraries; also the rest of this package."""


#: Directory of this package, with a separator at the end, as the others here.
_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_MACHINERY = tuple(f"{_PACKAGE}{part}{os.sep}" for part in ("harness", "script_ranks", "simulator"))
#: Directories of packages, and the programs that start pytest.
_RUNNERS = tuple(f"{os.sep}{name}{os.sep}" for name in ("_pytest", "pluggy", "pytest", "xdist", "execnet"))
_RUNNER_PROGRAMS = tuple(f"{os.sep}bin{os.sep}{name}" for name in ("pytest", "py.test"))
_NUMPY = f"{os.sep}site-packages{os.sep}numpy{os.sep}"
_STDLIB = sysconfig.get_path("stdlib") + os.sep


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """One frame of a Python stack."""

    file: str
    """As in `co_filename`."""
    line: int
    function: str

    def __str__(self) -> str:
        return f"{shown(self.file)}:{self.line} in {self.function}"


@lru_cache(maxsize=4096)
def owner(file: str) -> Owner:
    """Who wrote a file, named as in `co_filename`."""
    if below_torch(file) is not None:
        return Owner.TORCH
    if file.startswith(_MACHINERY):
        return Owner.MACHINERY
    if file.startswith("<"):
        return Owner.NO_FILE
    if file.endswith(_RUNNER_PROGRAMS) or ("site-packages" in file and any(part in file for part in _RUNNERS)):
        return Owner.RUNNER
    # site-packages may be inside the standard library's directory.
    in_stdlib = file.startswith(_STDLIB) and "site-packages" not in file
    if _NUMPY in file:
        return Owner.PYTHON
    return Owner.PYTHON if in_stdlib or os.path.basename(file) == "typing_extensions.py" else Owner.USER


def below_torch(file: str) -> str | None:
    """The path of a file of torch's, relative to torch's directory; None for other files."""
    directory = _torch_directory()
    return file[len(directory) :] if directory and file.startswith(directory) else None


def shown(file: str) -> str:
    """A path for people: from "torch/" or "fsdp_conformance/" on, or relative to the current directory."""
    for root in (_torch_directory(), _PACKAGE):
        if root and file.startswith(root):
            return os.path.join(os.path.basename(root.rstrip(os.sep)), file[len(root) :])
    return file.removeprefix(os.getcwd() + os.sep)


@cache
def _torch_directory() -> str:
    """Where torch is installed; empty if it is not."""
    spec = importlib.util.find_spec("torch")
    return os.path.dirname(spec.origin) + os.sep if spec is not None and spec.origin else ""


# Stacks that come as text, from the ranks or from a run file of another machine: only the paths say whose code it is.

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
class WrittenFrame:
    """One frame."""

    file: str
    line: str
    function: str

    @property
    def is_of_engine(self) -> bool:
        """True if it is neither torch's, nor Python's, nor a test framework's, nor ours."""
        return not any(pattern.search(self.file) for pattern in (_TORCH, _STANDARD, _TOOLS, _OURS))

    @property
    def name(self) -> str:
        """The file without its directories."""
        return re.split(r"[/\\]", self.file)[-1]

    def __str__(self) -> str:
        """ "acme_fsdp/unit.py:212 in unshard"; paths begin below site-packages or the working directory."""
        file = re.split(r"[/\\](?:site|dist)-packages[/\\]", self.file)[-1]
        return f"{file.removeprefix(f'{Path.cwd()}/')}:{self.line} in {self.function}"


def engine_frames(frames: Sequence[WrittenFrame]) -> list[WrittenFrame]:
    """The frames of the engine's own code; if there are none, those of torch's sharding code."""
    own = [frame for frame in frames if frame.is_of_engine]
    return own or [frame for frame in frames if _TORCH_ENGINE.search(frame.file)]


def frames_of_traceback(text: str) -> list[WrittenFrame]:
    """The frames of the last exception in a traceback, innermost first."""
    return frames_of_stack(text.rpartition("Traceback (most recent call last):")[2])[::-1]


def frames_of_stack(text: str) -> list[WrittenFrame]:
    """All frames of a text, in its order: innermost first if faulthandler wrote it."""
    return [WrittenFrame(**match.groupdict()) for match in _FRAME.finditer(text)]
