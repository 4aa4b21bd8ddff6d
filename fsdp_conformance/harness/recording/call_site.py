"""The line that called a collective: the innermost frame that is not plumbing."""

from __future__ import annotations

import os
import sys
from types import FrameType

from fsdp_conformance.frames import Owner, owner


def call_site() -> str:
    """
    "file.py:123 in function": the innermost frame outside torch, the standard library and this package's machinery.

    A thread started by C++ (autograd's, on an accelerator) may have no such frame: then the innermost frame of torch,
    or "".
    """
    frame: FrameType | None = sys._getframe(1)
    inner: FrameType | None = None
    while frame is not None:
        of = owner(frame.f_code.co_filename)
        if of is Owner.USER:
            return _describe(frame)
        if of is Owner.TORCH:
            inner = inner or frame
        frame = frame.f_back
    return _describe(inner) if inner is not None else ""


def _describe(frame: FrameType) -> str:
    code = frame.f_code
    return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}"
