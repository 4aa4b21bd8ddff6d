"""
A workload as source: the functions that a script calls, with what they were given, or else the call that made it.

Most of what makes a workload is for other cases: names, other optimizers, traits. A script needs four functions.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any

import torch

from fsdp_conformance.repro.capture import Made
from fsdp_conformance.repro.sources import Sources
from fsdp_conformance.workload.definition import Workload

_CALLED = ("build", "batch", "loss")


def written(workload: Workload, made: Made, optimizer: str, sources: Sources) -> str:
    """The workload as an expression; what it needs is added to `sources`."""
    functions = [getattr(workload, name) for name in _CALLED]
    parts = [_expression(function, sources) for function in (*functions, workload.optimizers[optimizer])]
    if None in parts:
        sources.need(made.module, made.function)
        return made.expression
    sources.imports["from types import SimpleNamespace"] = None
    for function in (*functions, workload.optimizers[optimizer]):
        _need(function, sources)
    given = ", ".join(f"{name}={part}" for name, part in zip(_CALLED, parts, strict=False))
    return f"SimpleNamespace(\n    {given},\n    optimizers={{{optimizer!r}: {parts[-1]}}},\n)"


def _expression(value: Any, sources: Sources) -> str | None:
    """A function at the top of a module, an optimizer of torch's, a `partial` of such, a literal; None for others."""
    if isinstance(value, functools.partial):
        given = [_expression(each, sources) for each in (value.func, *value.args)]
        named = {name: _expression(each, sources) for name, each in value.keywords.items()}
        if None in given or None in named.values():
            return None
        return f"partial({', '.join([*map(str, given), *(f'{name}={each}' for name, each in named.items())])})"
    if isinstance(value, tuple):
        parts = [_expression(each, sources) for each in value]
        return None if None in parts else f"({''.join(f'{part}, ' for part in parts)})"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    module, name = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
    if getattr(torch.optim, name or "?", None) is value:
        return f"torch.optim.{name}"
    is_defined = module in sys.modules and getattr(sys.modules[module], name, None) is value
    return name if is_defined and sources.definition(module, name) is not None else None


def _need(value: Any, sources: Sources) -> None:
    """Add what an expression names."""
    if isinstance(value, functools.partial):
        sources.imports["from functools import partial"] = None
        values: Mapping[str, Any] = value.keywords
        for each in (value.func, *value.args, *values.values()):
            _need(each, sources)
    elif isinstance(value, tuple):
        for each in value:
            _need(each, sources)
    elif callable(value) and value.__module__.partition(".")[0] != "torch":
        sources.need(value.__module__, value.__qualname__)
