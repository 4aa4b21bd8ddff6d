"""
Error messages of torch under CUDA's names: they say "cuda:0" to any reader.

C++ knows the device as "sim:0", and raises its errors in hundreds of places. So the text is translated where it is
read, in `str()` of an exception: that costs nothing until an exception is shown. `args` keep the original text.

torch's Python code asks for the type of a device in some of its messages, and gets "sim", and our own code says "sim"
for the device. Both are translated too. An exception that other Python code has raised keeps its text: it says "cuda"
already, and "sim:0" may mean something else.
"""

from __future__ import annotations

import dis
import functools
import re
import unittest
from collections.abc import Callable
from types import TracebackType
from typing import Any

from fsdp_conformance.simulator.as_cuda.names import CUDA
from fsdp_conformance.simulator.device import SIMULATED
from fsdp_conformance.simulator.frames import Owner, owner
from fsdp_conformance.simulator.replacements import Replacements

#: The types of torch's errors; other types are derived from these.
_TYPES = (RuntimeError, TypeError, ValueError, IndexError)

#: The device with its number, or after words that come before a device. Not in quotes: that may be the program's text.
_BEFORE = ("on ", "device=", "device type ")
_DEVICE = re.compile(
    rf"(?<!['\"\w.-]){SIMULATED}(?=:\d)|(?:{'|'.join(rf'(?<={before})' for before in _BEFORE)}){SIMULATED}\b"
)

#: A type of device where torch's Python code compares two: "got cpu for DTensor and sim for FSDP".
_TYPE = re.compile(rf"\b(got|and|expected) {SIMULATED}\b(?! *[:=.])")

#: The device in messages of this package, which also say "torch.sim".
_OURS = re.compile(rf"(?<![\w/-]){SIMULATED}(?![\w/-])")

#: How messages name the keys that operations are dispatched by, and types of tensors: 'simFloatType'.
_BACKEND = re.compile(
    rf"\b(Sparse|Quantized|NestedTensor|Autograd|Autocast)?{SIMULATED}(?=' backend|[A-Z][A-Za-z0-9]*Type\b)"
)

_RAISE = dis.opmap["RAISE_VARARGS"]
_CPP = "C++"

#: Where an exception keeps its `_raiser` if its traceback is taken away.
_RAISER = "_fsdp_conformance_raiser"


def install(replaced: Replacements) -> None:
    """Replace `__str__` of the types of torch's errors, which ours are or are derived from."""
    for kind in _TYPES:
        replaced.set_on_class(kind, __str__=_translating(kind.__str__))
    asserting: Any = unittest.case._AssertRaisesContext
    replaced.set(asserting, __exit__=_remembering(asserting.__exit__))


def _translating(text_of: Callable[[BaseException], str]) -> Callable[[BaseException], str]:
    def text(self: BaseException) -> str:
        message = text_of(self)
        if SIMULATED not in message:
            return message
        who = _raiser(self.__traceback__) if self.__traceback__ is not None else vars(self).get(_RAISER)
        if who is Owner.MACHINERY:
            return _OURS.sub(CUDA, message)
        if who not in (Owner.TORCH, _CPP):
            return message
        message = _BACKEND.sub(lambda match: (match[1] or "") + CUDA.upper(), _DEVICE.sub(CUDA, message))
        return message if who is _CPP else _TYPE.sub(rf"\1 {CUDA}", message)

    return text


def _remembering(leave: Callable[..., Any]) -> Callable[..., Any]:
    """`assertRaises` takes the traceback away, so the exception has to remember who raised it."""

    @functools.wraps(leave)
    def remember(self: Any, kind: Any, error: Any, trace: Any) -> Any:
        if isinstance(error, _TYPES):
            vars(error)[_RAISER] = _raiser(trace)
        return leave(self, kind, error, trace)

    return remember


def _raiser(trace: TracebackType | None) -> Owner | str | None:
    """Whose Python code raised an exception; `_CPP` if C++ did."""
    if trace is None:
        return None
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    return owner(code.co_filename) if code.co_code[trace.tb_lasti] == _RAISE else _CPP
