"""
Process groups without a hurry, for a script of which one rank is debugged: the others wait for it as long as it takes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from fsdp_conformance.simulator.replacements import Replacements

__all__ = ["wait_patiently"]

#: Functions of torch.distributed that take the timeout of a group.
_WITH_TIMEOUT = ("init_process_group", "new_group", "new_subgroups", "split_group")


def wait_patiently(replaced: Replacements) -> None:
    """Let groups have the default timeout, whatever timeout the script asks for."""
    for name in _WITH_TIMEOUT:
        patient = _without_timeout(getattr(dist, name))
        replaced.set(dist, **{name: patient})
        replaced.set(distributed_c10d, **{name: patient})


def _without_timeout(function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def patient(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.arguments.pop("timeout", None)
        return function(*bound.args, **bound.kwargs)

    return patient
