"""
A stack frame, and whose code it runs, decided by its file.

Used for the stacks of a hazard, the call site of a collective, the sites of waits, and to tell a script that asks torch
about "cuda" from torch itself. Standard library only: torch's directory is looked up when it is first needed, without
importing torch.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, lru_cache
from types import FrameType


class Owner(StrEnum):
    """Who wrote the code of a frame."""

    TORCH = "torch"
    PYTHON = "python"
    """The standard library, typing_extensions, whose wrappers call deprecated functions, and NumPy's own files."""
    NO_FILE = "no file"
    """Code without a file to point to: "<string>", "<frozen runpy>"."""
    MACHINERY = "machinery"
    """The simulator, and the parts of fsdp_conformance that run code for others, if they are installed."""
    RUNNER = "runner"
    """pytest, its plugins for workers, and what these stand on."""
    USER = "user"
    """Everything else: scripts, engines, and other libraries; also the rest of this package."""


#: The directory of fsdp_conformance, with a separator at the end, like the others here.
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_MACHINERY = tuple(f"{_PACKAGE}{part}{os.sep}" for part in ("harness", "script_ranks", "simulator"))
#: Directories of packages, and the programs that start pytest.
_RUNNERS = tuple(f"{os.sep}{name}{os.sep}" for name in ("_pytest", "pluggy", "pytest", "xdist", "execnet"))
_RUNNER_PROGRAMS = tuple(f"{os.sep}bin{os.sep}{name}" for name in ("pytest", "py.test"))
_SITE_PACKAGES = f"{os.sep}site-packages{os.sep}"
_NUMPY = f"{_SITE_PACKAGES}numpy{os.sep}"
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


def is_installed(file: str) -> bool:
    """True for a file of an installed library."""
    return _SITE_PACKAGES in file


def shown(file: str) -> str:
    """A path for people: from "torch/", "fsdp_conformance/" or a library on, or relative to the current directory."""
    for root in (_torch_directory(), _PACKAGE):
        if root and file.startswith(root):
            return os.path.join(os.path.basename(root.rstrip(os.sep)), file[len(root) :])
    if is_installed(file):
        return file.rpartition(_SITE_PACKAGES)[2]
    return file.removeprefix(os.getcwd() + os.sep)


def calling_frame() -> Frame | None:
    """
    Return the innermost frame outside torch, the standard library and this package's machinery.

    A thread started by C++ (autograd's, on an accelerator) may have no such frame: then the innermost frame of torch,
    or None.
    """
    frame: FrameType | None = sys._getframe(1)
    inner: FrameType | None = None
    while frame is not None:
        wrote = owner(frame.f_code.co_filename)
        if wrote is Owner.USER:
            return _described(frame)
        if wrote is Owner.TORCH:
            inner = inner or frame
        frame = frame.f_back
    return _described(inner) if inner is not None else None


def _described(frame: FrameType) -> Frame:
    return Frame(file=frame.f_code.co_filename, line=frame.f_lineno, function=frame.f_code.co_name)


@cache
def _torch_directory() -> str:
    """Where torch is installed; empty if it is not."""
    spec = importlib.util.find_spec("torch")
    return os.path.dirname(spec.origin) + os.sep if spec is not None and spec.origin else ""
