"""The waits of the engine on the simulated accelerator: which are executed, and what happens without one of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import FrameType

from fsdp_conformance.simulator import checker
from fsdp_conformance.simulator.checker import Reuse, Wait

#: Modules of the engine that only pass a call on: who calls them is the site.
_HELPERS = ("chunk_streams.py", "streams.py")


@contextmanager
def watching_engine(sites: set[str], dropped: Collection[str]) -> Iterator[None]:
    """
    Note the engine's waits that are executed inside, and leave out those in `dropped`.

    New memory is taken to be any free block that the allocator might have given out: what is freed too early is found
    though nothing happens to use it again.
    """

    def keep(kind: Wait, _stream: int, _device: int) -> bool:
        site = _site(kind)
        if site is not None:
            sites.add(site)
        return site not in dropped

    with checker.wait_filter(keep), checker.reuse(Reuse.WORST_CASE):
        yield


def _site(kind: Wait) -> str | None:
    """The innermost function of the engine that asks for a wait; None if it is no one's, or in a collective."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        path, name = os.path.split(frame.f_code.co_filename)
        if os.path.basename(path) == "engine" and name not in _HELPERS:
            # The event that a collective records at its issue is its own.
            inside = name == "flat_collectives.py" and kind is Wait.EVENT_RECORD
            return None if inside else f"{kind} {name} {frame.f_code.co_name}"
        frame = frame.f_back
    return None
