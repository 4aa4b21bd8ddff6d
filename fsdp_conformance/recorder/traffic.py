"""
The collectives that a process calls, counted by kind until they are taken.

Seen are the methods of torch's process groups that Python calls. What C++ calls by itself is not: DDP's reducer, and
functional collectives.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fsdp_conformance.harness.recording.collective_calls import METHODS, traffic_of
from fsdp_conformance.history.collective import Op
from fsdp_conformance.recorder.guard import Guard
from fsdp_conformance.recordings.events import Collectives

Key = tuple[str, str, str, tuple[int, ...]]


class TrafficCount:
    """Counts of collectives, by op, reduce op, dtype and group."""

    def __init__(self, guard: Guard, note_gather: Callable[[str], object]) -> None:
        """`note_gather` gets the name of a collective that gathers tensors that need gradients, and gives them none."""
        self._guard = guard
        self._note_gather = note_gather
        self._lock = threading.Lock()
        self._counts: dict[Key, tuple[int, int]] = {}
        self._is_inside = threading.local()

    def take(self) -> tuple[Collectives, ...]:
        """The counts since the last call, in an order that does not depend on that of the calls."""
        with self._lock:
            counts, self._counts = self._counts, {}
        return tuple(
            Collectives(op=op, reduce_op=reduce_op, dtype=dtype, group=group, calls=calls, nbytes=nbytes)
            for (op, reduce_op, dtype, group), (calls, nbytes) in sorted(counts.items())
        )

    def watch(self, replace: Callable[[Any, str, Callable[[Any], Any]], None]) -> None:
        """Count the calls of all methods that communicate; `replace` puts a function in the place of another."""
        for name in METHODS:
            if hasattr(dist.ProcessGroup, name):
                replace(dist.ProcessGroup, name, functools.partial(self._counted, name))

    def _counted(self, name: str, original: Any) -> Any:
        @functools.wraps(original)
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            # A method of one name may call the one of another.
            if getattr(self._is_inside, "value", False) or torch.compiler.is_compiling():
                return original(group, *args, **kwargs)
            self._is_inside.value = True
            try:
                self._guard.run(self._add, name, group, args, kwargs)
                return original(group, *args, **kwargs)
            finally:
                self._is_inside.value = False

        return call

    def _add(self, name: str, group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        traffic = traffic_of(name, args, kwargs, group.size())
        # Engines gather under `no_grad`, and so do autograd functions that have their own backward.
        if (
            traffic.op is Op.ALL_GATHER
            and torch.is_grad_enabled()
            and any(each.requires_grad for each in traffic.inputs)
        ):
            self._note_gather(traffic.op.value)
        key = (traffic.op.value, traffic.reduce_op, traffic.dtype, _ranks_of(group))
        with self._lock:
            calls, nbytes = self._counts.get(key, (0, 0))
            self._counts[key] = calls + 1, nbytes + traffic.nbytes


def _ranks_of(group: Any) -> tuple[int, ...]:
    try:
        return tuple(dist.get_process_group_ranks(group))
    except (KeyError, RuntimeError, ValueError):
        # torch is still making it.
        return tuple(range(group.size()))
