"""The line that called a collective: the innermost frame that is not plumbing."""

from __future__ import annotations

import os
import sys
import sysconfig
from functools import lru_cache
from types import FrameType

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_STDLIB = sysconfig.get_path("stdlib") + os.sep
_HARNESS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def call_site() -> str:
    """
    "file.py:123 in function": the innermost frame outside torch, the standard library and this package's harness.

    A thread started by C++ (autograd's, on an accelerator) may have no such frame: then the innermost frame of torch,
    or "".
    """
    frame: FrameType | None = sys._getframe(1)
    inner: FrameType | None = None
    while frame is not None:
        owner = _owner(frame.f_code.co_filename)
        if owner == "user":
            return _describe(frame)
        if owner == "torch":
            inner = inner or frame
        frame = frame.f_back
    return _describe(inner) if inner is not None else ""


def _describe(frame: FrameType) -> str:
    code = frame.f_code
    return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}"


@lru_cache(maxsize=4096)
def _owner(filename: str) -> str:
    """Who wrote a file: "harness", "torch", "stdlib" or "user"."""
    if filename.startswith(_HARNESS):
        return "harness"
    if filename.startswith(_TORCH):
        return "torch"
    # The wrapper around deprecated functions, which torch uses.
    if os.path.basename(filename) == "typing_extensions.py":
        return "stdlib"
    # site-packages may be inside the standard library's folder; "<string>" and the like have no file to point to.
    if filename.startswith("<") or (filename.startswith(_STDLIB) and "site-packages" not in filename):
        return "stdlib"
    return "user"
