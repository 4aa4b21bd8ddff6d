"""
Functions and classes of CUDA that raise NotSimulated when a program uses them, and why.

The reasons are in the table of names (`surface.toml`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any

from fsdp_conformance.simulator.as_cuda import surface
from fsdp_conformance.simulator.as_cuda.names import NotSimulated
from fsdp_conformance.simulator.import_hook import when_imported
from fsdp_conformance.simulator.replacements import Replacements

__all__ = ["install", "refusal"]


_PACKAGES = ("torch.cuda", "torch.distributed", "torch.nn.parallel")


def install(replaced: Replacements) -> None:
    """Replace them in each module of torch as soon as it is imported."""
    for module, names in surface.refused().items():
        replaced.on_undo(when_imported(module, functools.partial(_refuse, replaced, module, names)))


def _refuse(replaced: Replacements, name: str, reasons: Mapping[str, str]) -> None:
    module = sys.modules[name]
    for attribute, why in reasons.items():
        value = getattr(module, attribute, None)
        if value is None or value.__module__ == __name__:  # not in every version; refused already
            continue
        replaced.set_in_all((name, *_PACKAGES), **{attribute: refusal(f"{name}.{attribute}", value, why)})


def refusal(name: str, value: Any, why: str) -> Any:
    """The replacement of a function or a class: it raises when it is used."""

    # Looks like the original: torch's compiler unwraps decorators when it is imported.
    @functools.wraps(value)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotSimulated(name, why)

    if isinstance(value, type):
        return type(value.__name__, (), {"__new__": refuse, "__module__": value.__module__})
    return refuse
