"""The line that called a collective: the innermost frame that is not plumbing."""

from __future__ import annotations

import os
import sys
from types import FrameType

from fsdp_conformance.stack import Frame, Owner, owner


def calling_frame() -> Frame | None:
    """
    The innermost frame outside torch, the standard library and this package's machinery.

    A thread started by C++ (autograd's, on an accelerator) may have no such frame: then the innermost frame of torch,
    or None.
    """
    frame: FrameType | None = sys._getframe(1)
    inner: FrameType | None = None
    while frame is not None:
        code_owner = owner(frame.f_code.co_filename)
        if code_owner is Owner.USER:
            return _place(frame)
        if code_owner is Owner.TORCH:
            inner = inner or frame
        frame = frame.f_back
    return _place(inner) if inner is not None else None


def call_site() -> str:
    """The place of `calling_frame` as text: "file.py:123 in function"; "" if there is none."""
    place = calling_frame()
    return f"{os.path.basename(place.file)}:{place.line} in {place.function}" if place is not None else ""


def _place(frame: FrameType) -> Frame:
    return Frame(file=frame.f_code.co_filename, line=frame.f_lineno, function=frame.f_code.co_name)
