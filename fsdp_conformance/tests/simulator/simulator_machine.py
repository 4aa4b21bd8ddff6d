"""A separate checker with three streams, for programs without tensors; and extents as sets of bytes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from fsdp_conformance.simulator.device import build

HOST = 0
BYTES = 64
MIB = 1 << 20

#: How long a program of several threads may take; it takes milliseconds, and a deadlock is forever.
DEADLINE_S = 240

compiled = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))

Repeats = list[tuple[int, int]]


class Machine:
    """A separate checker, with three streams on one device."""

    def __init__(self, *, reuse: str = "exact", waits: str = "all") -> None:
        self.extension = build.load()
        self.checker = self.extension.Checker()
        self.checker.mode = "record"
        self.checker.reuse = reuse
        self.checker.waits = waits
        self.a, self.b, self.c = (self.checker.add_lane(name, 0) for name in "abc")
        self._numbers = itertools.count()

    def site(self, op: str, **fields: Any) -> Any:
        return self.extension.Site(op, **fields)

    def allocate(self, lane: int | None = None, nbytes: int = BYTES, *, pinned: bool = False, op: str = "empty") -> int:
        """A new block with a first tenant."""
        block: int = self.checker.add_block(nbytes, 0, pinned)
        self.checker.allocated(block, HOST if pinned else lane or self.a, self.site(op))
        return block

    def reuse(self, block: int, lane: int) -> None:
        """Free a block, and give it to a new tenant."""
        self.checker.freed(block, self.site("free"))
        self.checker.allocated(block, lane, self.site("empty"))

    def run(
        self,
        lane: int,
        kind: str,
        block: int,
        offset: int = 0,
        nbytes: int = BYTES,
        repeats: Repeats | None = None,
        *,
        finished: bool = False,
        **site: Any,
    ) -> str | None:
        """
        Submit an operation with one access; returns the kind of its hazard, if there is one.

        `finished`: the host goes on when the access is done.
        """
        if lane != HOST:
            self.checker.submit(lane)
        site.setdefault("op", f"op{next(self._numbers)}")
        reported = self.checker.access(
            block, kind, lane, offset, nbytes, repeats or [], self.extension.Site(**site), finished
        )
        return None if reported is None else str(reported["kind"])

    def write(self, lane: int, block: int, *args: Any, **site: Any) -> str | None:
        return self.run(lane, "write", block, *args, **site)

    def read(self, lane: int, block: int, *args: Any, **site: Any) -> str | None:
        return self.run(lane, "read", block, *args, **site)

    def item(self, lane: int, block: int, op: str = "aten::item") -> str | None:
        """The host reads a value from the device, and waits for its stream to do so."""
        kind = self.run(lane, "read", block, op=op, finished=True)
        self.checker.host_wait_lane(lane, self.site(op))
        return kind

    def wait_stream(self, waiting: int, waited_for: int) -> bool:
        return bool(self.checker.wait(waiting, self.checker.snapshot(waited_for)))


def bytes_of(offset: int, run: int, repeats: Repeats) -> set[int]:
    """Every byte, one by one."""
    starts = {offset}
    for count, stride in repeats:
        starts = {start + i * stride for start in starts for i in range(count)}
    return {byte for start in starts for byte in range(start, start + run)}
