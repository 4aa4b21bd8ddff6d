"""
A refusal is a deliberate error that names the refused feature, raised before anything was trained.

An engine that breaks down by itself also raises, but tells its user nothing: `'NoneType' object has no attribute
'size'` is a defect, not a refusal. torch's own engines refuse with ValueError, RuntimeError, NotImplementedError and
AssertionError, and TypeError for arguments of the wrong type.
"""

from __future__ import annotations

import dis
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_conformance.errors import Unsupported
from fsdp_conformance.outcome.records import RankError

#: Errors of Python itself that mean broken code. Classes of an engine that derive from them are deliberate.
BREAKDOWNS = (
    AttributeError, LookupError, NameError, ArithmeticError, ImportError, RecursionError, MemoryError, SystemError,
    StopIteration, OSError, BufferError, EOFError,
)  # fmt: skip


class ReportedError(Exception):
    """The base of a rank's exceptions as the referee rebuilds them, with their text and a second base class."""

    described: RankError
    is_explicit: bool

    def __str__(self) -> str:
        return self.described.message


@dataclass(slots=True)
class Refusal:
    """The outcome of a block that should raise."""

    error: Exception | None = None
    excused: bool = False
    """Set by the case if continuing correctly is as good as refusing."""


def why_no_refusal(error: Exception, names: Sequence[str]) -> str | None:
    """
    The reason why an error is not a refusal, or None if it is one.

    `names` are the words of which the message must contain one, in any case: the feature, or the argument.
    """
    if isinstance(error, Unsupported):
        return None
    what = f"{type(error).__name__}: {_first_line(error)}"
    if _is_breakdown(error):
        return f"the engine broke down ({what})"
    if not any(name.lower() in str(error).lower() for name in names):
        return f"the error names none of {', '.join(names)} ({what})"
    return None


def _is_breakdown(error: Exception) -> bool:
    """A builtin error that code raises when it is wrong; a TypeError only where no `raise` statement raised it."""
    if type(error).__module__ != "builtins":
        return False
    if isinstance(error, TypeError):
        return not is_raised_explicitly(error)
    return isinstance(error, BREAKDOWNS)


def is_raised_explicitly(error: BaseException) -> bool:
    """True if a `raise` statement raised the exception, rather than an operation."""
    if isinstance(error, ReportedError):
        return error.is_explicit
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    if innermost is None:
        return False
    return dis.opname[innermost.tb_frame.f_code.co_code[innermost.tb_lasti]] == "RAISE_VARARGS"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "without a message")
