"""
A workload as source: the functions that a script calls, with what they were given, or else the call that made it.

Most of what makes a workload is for other cases: names, other optimizers, traits. A script needs four functions.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_conformance.repro.capture import Made
from fsdp_conformance.repro.sources import Sources
from fsdp_conformance.workload.definition import BatchKey, Workload

_CALLED = ("build", "batch", "loss")


@dataclass(frozen=True, slots=True)
class Written:
    """The functions of a workload that a script calls, each as an expression."""

    build: str
    batch: str
    loss: str
    optimizer: str
    before: tuple[str, ...] = ()
    """Statements that must come first."""


def written(workload: Workload, made: Made, optimizer: str, sources: Sources, name: str) -> Written:
    """The workload, under this name if it is made as a whole; what it needs is added to `sources`."""
    functions = [*(getattr(workload, each) for each in _CALLED), workload.optimizers[optimizer]]
    parts = [_expression(each, sources) for each in functions]
    if None in parts:
        sources.need(made.module, made.function)
        whole = f"{name}.optimizers[{optimizer!r}]"
        build, batch, loss = (f"{name}.{each}" for each in _CALLED)
        return Written(build, batch, loss, whole, (f"{name} = {made.expression}",))
    for function in functions:
        _need(function, sources)
    build, batch, loss, made_optimizer = map(str, parts)
    return Written(build, batch, loss, made_optimizer)


def is_its_own_reference(workload: Workload, reference: Workload, world_size: int) -> bool:
    """True if plain models of both have the same losses and gradients for a batch of each rank, bit for bit."""
    if reference is workload:
        return True
    ours, theirs = (
        [_passes(each, BatchKey(step=0, rank=rank, world_size=world_size)) for rank in range(world_size)]
        for each in (workload, reference)
    )
    try:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    except AssertionError:
        return False
    return True


def _passes(workload: Workload, key: BatchKey) -> dict[str, torch.Tensor | None]:
    """The loss and the gradients of a plain model after one backward."""
    model, batch = workload.build(key.rank), workload.batch(key)
    loss = workload.loss(model(*batch.args, **batch.kwargs), batch)
    torch.autograd.backward(loss)
    return {"": loss.detach(), **{name: parameter.grad for name, parameter in model.named_parameters()}}


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
