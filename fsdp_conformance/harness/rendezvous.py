"""Where ranks meet: at a store that the harness gives them, whatever address `init_process_group` is told."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch._C._distributed_c10d import Store

#: A scheme of our own, for who has no address.
SCHEME = "conformance"

Place = Callable[[], tuple[Store, int, int]]
"""The store, the rank of who asks, and the world size."""


def meet_at(place: Place) -> dict[str, Any]:
    """Let ranks meet at `place` from now on. Returns torch's handlers of before, by scheme, for `meet_as_before`."""
    handlers = _handlers()
    before = dict(handlers)

    def meet(url: str, **_: Any) -> Iterator[tuple[Store, int, int]]:
        yield place()

    handlers.update(dict.fromkeys((*before, SCHEME), meet))
    return before


def meet_as_before(before: dict[str, Any]) -> None:
    """Undo `meet_at`."""
    handlers = _handlers()
    handlers.clear()
    handlers.update(before)


@contextmanager
def meeting_at(place: Place) -> Iterator[None]:
    """Ranks meet at `place` inside."""
    before = meet_at(place)
    try:
        yield
    finally:
        meet_as_before(before)


def _handlers() -> dict[str, Any]:
    # The name `torch.distributed.rendezvous` is a function, which hides the module.
    handlers: dict[str, Any] = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    return handlers
