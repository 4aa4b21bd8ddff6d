"""
Exceptions of the methods that an adapter inherits from this suite.

`TorchAdapter` does many things as stock torch does: it drops gradients, reads parameters, steps the optimizer. Where an
engine needs another way and the adapter does not override the method, our method breaks down, and not the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import CodeType

from fsdp_conformance.adapters import base
from fsdp_conformance.adapters.base import Adapter
from fsdp_conformance.adapters.torch_like import TorchAdapter
from fsdp_conformance.cases.refusal import BREAKDOWNS
from fsdp_conformance.errors import AdapterError, Unsupported

#: Breakdowns of Python. An error of torch's operations may come from the tensors that the engine has handed over.
_BREAKDOWNS = (*BREAKDOWNS, TypeError, NotImplementedError)

_DIRECTORY = str(Path(base.__file__).parent)


def as_adapter_error(error: BaseException, *, declares: Callable[[str], bool], adapter: str) -> AdapterError | None:
    """
    The exception as a problem of the adapter if a default method raised it; else None.

    If a default method raises Unsupported, that is the adapter's problem only for a flag that the adapter declares:
    otherwise the method refuses in place of the engine.
    """
    if not isinstance(error, _BREAKDOWNS) or (isinstance(error, Unsupported) and not declares(error.capability)):
        return None
    method = _default_method(error)
    if method is None:
        return None
    return AdapterError(
        f"{method}, the default of this suite, raised {type(error).__name__}: {error}. Override it in {adapter} if the "
        "engine does this in another way"
    )


def _default_method(error: BaseException) -> str | None:
    """The method of our base classes in which an exception began, such as "TorchAdapter.drop_grads"; None if none."""
    codes: list[CodeType] = []
    trace = error.__traceback__
    while trace is not None:
        codes.append(trace.tb_frame.f_code)
        trace = trace.tb_next
    # From the innermost frame outwards, through functions that only our methods call.
    for code in reversed(codes):
        if code in _METHODS:
            return code.co_qualname
        if str(Path(code.co_filename).parent) != _DIRECTORY:
            return None
    return None


_METHODS = frozenset(
    method.__code__
    for owner in (Adapter, TorchAdapter)
    for method in vars(owner).values()
    if hasattr(method, "__code__")
)
