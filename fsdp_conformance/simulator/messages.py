"""
Error messages of torch under CUDA's names: they say "cuda:0" to whoever reads them.

C++ knows the device as "sim:0", and raises its errors in hundreds of places. So the text is translated where it is
read, in `str()` of an exception: that costs nothing until an exception is shown. `args` keep the original text.

torch's Python code asks for a device's type in some of its messages, and gets "sim". Those are translated too. An
exception that other Python code has raised keeps its text: it says "cuda" already, and "sim:0" may mean something else.
"""

from __future__ import annotations

import dis
import re
import sys
from collections.abc import Callable
from types import TracebackType

from fsdp_conformance.config import SIMULATED
from fsdp_conformance.frames import Owner, owner
from fsdp_conformance.simulator.cuda_names import CUDA, Replacements

#: The types of torch's errors; other types are derived from these.
_TYPES = (RuntimeError, TypeError, ValueError, IndexError)

#: The device with its number, or after words that come before a device. Not in quotes: that may be the program's text.
_BEFORE = ("on ", "device=", "device type ")
_DEVICE = re.compile(
    rf"(?<!['\"\w.-]){SIMULATED}(?=:\d)|(?:{'|'.join(rf'(?<={before})' for before in _BEFORE)}){SIMULATED}\b"
)

#: A type of device where torch's Python code compares two: "got cpu for DTensor and sim for FSDP".
_TYPE = re.compile(rf"\b(got|and|expected) {SIMULATED}\b(?! *[:=.])")

#: How messages name the keys that operations are dispatched by.
_BACKEND = re.compile(rf"\b(Sparse|Quantized|NestedTensor|Autograd|Autocast)?{SIMULATED}(?=' backend)")

_RAISE = dis.opmap["RAISE_VARARGS"]


def install(replaced: Replacements) -> None:
    """Replace `__str__` of the types of torch's errors."""
    for kind in _TYPES:
        replaced.set_on_class(kind, __str__=_translating(kind.__str__))


def _translating(text_of: Callable[[BaseException], str]) -> Callable[[BaseException], str]:
    def text(self: BaseException) -> str:
        said = text_of(self)
        if SIMULATED not in said:
            return said
        frame = _innermost(self.__traceback__ or _taken_by_unittest())
        if frame is None:
            return said
        raised_by_c = frame.tb_frame.f_code.co_code[frame.tb_lasti] != _RAISE
        by_torch = owner(frame.tb_frame.f_code.co_filename) is Owner.TORCH
        if not raised_by_c and not by_torch:
            return said
        said = _BACKEND.sub(lambda found: (found[1] or "") + CUDA.upper(), _DEVICE.sub(CUDA, said))
        return said if raised_by_c else _TYPE.sub(rf"\1 {CUDA}", said)

    return text


def _taken_by_unittest() -> TracebackType | None:
    """`assertRaisesRegex` takes the traceback away before it reads the message: it is an argument of its `__exit__`."""
    frame = sys._getframe(2)
    if frame.f_code.co_name != "__exit__" or frame.f_globals.get("__name__") != "unittest.case":
        return None
    found: TracebackType | None = frame.f_locals.get("tb")
    return found


def _innermost(trace: TracebackType | None) -> TracebackType | None:
    """The frame of Python that raised, or called what did."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace
