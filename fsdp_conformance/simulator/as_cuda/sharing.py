"""
Tensors that a process hands to another: on CUDA both then have the same memory. Here they raise NotSimulated.

A queue pickles in a thread, whose error would reach nothing but the terminal while the other process waits for its
tensor. So `put` looks for tensors of the device first, in lists, tuples and dictionaries.
"""

from __future__ import annotations

import functools
import multiprocessing.queues
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree

from fsdp_conformance.simulator.as_cuda.names import NotSimulated
from fsdp_conformance.simulator.device import SIMULATED
from fsdp_conformance.simulator.device.streams import Event
from fsdp_conformance.simulator.replacements import Replacements

__all__ = ["install"]

_WHAT = "a CUDA tensor that is sent to another process"
_WHY = "processes do not share its memory. Send tensor.cpu()"


def install(replaced: Replacements) -> None:
    """Replace the methods with which torch shares a storage or an event, and the queue's `put`."""
    for name in ("_share_fd_cpu_", "_share_filename_cpu_", "_share_cuda_"):
        replaced.set(torch.UntypedStorage, **{name: _without_sharing(getattr(torch.UntypedStorage, name))})
    replaced.set(Event, ipc_handle=_refuse_event, from_ipc_handle=_refuse_event)
    queue: Any = multiprocessing.queues.Queue
    replaced.set(queue, put=_looking_first(queue.put))


def _without_sharing(share: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(share)
    def checking(self: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        if self.device.type == SIMULATED:
            raise NotSimulated(_WHAT, _WHY)
        return share(self, *args, **kwargs)

    return checking


def _looking_first(put: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(put)
    def looking(self: Any, obj: Any, *args: Any, **kwargs: Any) -> None:
        for leaf in _pytree.tree_leaves(obj):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == SIMULATED and leaf.numel():
                raise NotSimulated(_WHAT, _WHY)
        put(self, obj, *args, **kwargs)

    return looking


def _refuse_event(*args: Any, **kwargs: Any) -> Any:
    raise NotSimulated("a CUDA event that is sent to another process", "processes do not share events")
