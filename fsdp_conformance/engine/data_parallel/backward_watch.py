"""
The backward that is under way: have something called when it ends, and tell that it raised before it did.

A backward that raises calls nothing. Autograd alone holds what it will call, and lets go of it then, so that a weak
reference shows whether the end is still to come.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch.autograd import Variable


class _EndOfBackward:
    """What autograd calls when a backward has ended well."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def __call__(self) -> None:
        self._then()


class BackwardWatch:
    """Over one backward after the other."""

    def __init__(self) -> None:
        self._end: weakref.ref[_EndOfBackward] | None = None

    def begin(self, then: Callable[[], None]) -> None:
        """Called in a backward: have `then` called when it is over, on the stream that called it; not if it raises."""
        end = _EndOfBackward(then)
        self._end = weakref.ref(end)
        Variable._execution_engine.queue_callback(end)

    def end(self) -> None:
        """The backward is over, or does not count any more."""
        self._end = None

    @property
    def is_open(self) -> bool:
        """Whether a backward was begun and not ended: it is under way, or has raised."""
        return self._end is not None

    @property
    def is_under_way(self) -> bool:
        """Whether a backward is under way at whose end something is called."""
        return self._end is not None and self._end() is not None

    @property
    def is_inside(self) -> bool:
        """Whether the caller runs inside of it: a forward that is computed again."""
        return self.is_under_way and torch._C._current_graph_task_id() != -1
