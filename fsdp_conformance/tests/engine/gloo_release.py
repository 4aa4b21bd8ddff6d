"""Wait until gloo has released the tensors of collectives that are done."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo, Store
from torch.distributed import distributed_c10d


class _OneThread(ProcessGroupGloo):
    """The backend that torch makes instead of its usual one inside `one_gloo_thread`."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, **more: Any) -> None:
        if any(more.values()):  # torch 2.14 names what it leaves out, too
            raise TypeError(f"options of a group that {type(self).__name__} does not know: {more}")
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices, options._threads = [ProcessGroupGloo.create_default_device()], 1
        options._timeout = timeout
        super().__init__(store, rank, size, options)


@contextlib.contextmanager
def one_gloo_thread() -> Iterator[None]:
    """Give every gloo group that is created inside a single worker thread, as `wait_for_release` requires."""
    with mock.patch.object(distributed_c10d, "ProcessGroupGloo", _OneThread):
        yield


def wait_for_release() -> None:
    """
    Return when no earlier collective of the default group holds a tensor any more. Collective.

    A worker thread wakes the caller of a collective before it drops the collective's tensors, and how long they stay
    alive after that is up to the scheduler. A single worker drops them before it takes the next collective from its
    queue, so one more collective is enough. A barrier is not: it keeps weak references to the work that it finds
    unfinished, and C++ frees the members of such work only with its last weak reference.
    """
    dist.all_reduce(_kept())


@functools.cache
def _kept() -> Tensor:
    """The tensor of the collective that is waited for: alive before and after, so that counts do not differ by it."""
    return torch.zeros(1)
