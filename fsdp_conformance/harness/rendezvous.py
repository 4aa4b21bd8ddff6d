"""Makes ranks meet at a store of ours, whatever address `init_process_group` is given."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch._C._distributed_c10d import Store

#: Our own scheme, for callers without an address.
SCHEME = "conformance"

Place = Callable[[], tuple[Store, int, int]]
"""Returns the store, the caller's rank, and the world size."""


def meet_at(place: Place) -> None:
    """Make ranks meet at `place` from now on."""

    def meet(url: str, **_: Any) -> Iterator[tuple[Store, int, int]]:
        yield place()

    handlers = _handlers()
    handlers.update(dict.fromkeys((*handlers, SCHEME), meet))


@contextmanager
def meeting_at(place: Place) -> Iterator[None]:
    """Make ranks meet at `place` inside."""
    handlers = _handlers()
    before = dict(handlers)
    meet_at(place)
    try:
        yield
    finally:
        handlers.clear()
        handlers.update(before)


def _handlers() -> dict[str, Any]:
    """Torch's rendezvous handlers, by scheme."""
    # `torch.distributed.rendezvous` is also the name of a function, which hides the module.
    handlers: dict[str, Any] = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    return handlers
