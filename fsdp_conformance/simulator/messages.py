"""
Error messages of torch's C++ under CUDA's names: they say "cuda:0" to whoever reads them.

C++ knows the device as "sim:0", and raises its errors in hundreds of places. So the text is translated where it is
read, in `str()` of an exception: that costs nothing until an exception is shown. `args` keep the original text.

An exception that Python code has raised keeps its text: Python's own messages about devices say "cuda" already, and
"sim:0" may mean something else there.
"""

from __future__ import annotations

import dis
import re
from collections.abc import Callable
from types import TracebackType

from fsdp_conformance.config import SIMULATED
from fsdp_conformance.simulator.cuda_names import CUDA, Replacements

#: The types of torch's errors; other types are derived from these.
_TYPES = (RuntimeError, TypeError, ValueError, IndexError)

#: The device with its number, or a place. Not in quotes: that may be the program's text.
_DEVICE = re.compile(rf"(?<!['\"\w.-]){SIMULATED}(?=:\d)|(?<=\bon ){SIMULATED}\b")

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
        if SIMULATED not in said or not _raised_by_c(self.__traceback__):
            return said
        return _BACKEND.sub(lambda found: (found[1] or "") + CUDA.upper(), _DEVICE.sub(CUDA, said))

    return text


def _raised_by_c(trace: TracebackType | None) -> bool:
    """Whether the innermost frame of Python called what raised, and did not raise itself."""
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_code[trace.tb_lasti] != _RAISE
