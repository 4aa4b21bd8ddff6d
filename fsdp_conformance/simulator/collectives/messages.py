"""
Finds two ranks that exchange messages and can wait for each other's sends.

NCCL runs the unbatched messages of a pair in the order of their calls, on one stream of each rank, and a send may last
until its receive runs. Two ranks that both send first therefore hang once the message is larger than NCCL's buffers.
Messages of one batch (`batch_isend_irecv`) run together. Standard library only.
"""

from __future__ import annotations

from collections import deque

from fsdp_conformance.simulator.collectives.calls import Call

#: Messages that run together: those of a batch, or a single one.
_Together = list[Call]


class MessageOrder:
    """The messages between two ranks in one group, from the side of one of them."""

    def __init__(self) -> None:
        self._mine: deque[_Together] = deque()
        self._theirs: deque[_Together] = deque()
        self._is_known = False

    def add(self, call: Call, *, is_mine: bool) -> tuple[Call, Call] | None:
        """
        Add a message in the order of its rank's calls. Returns the two sends of which each waits for the other, mine
        first, once.
        """
        if self._is_known:
            return None
        queue = self._mine if is_mine else self._theirs
        if call.is_batched and queue and queue[-1][-1].is_batched:
            queue[-1].append(call)
        else:
            queue.append([call])
        while self._mine and self._theirs:
            mine, theirs = self._mine[0], self._theirs[0]
            met = next(((one, other) for one in mine for other in theirs if one.channel == other.channel), None)
            if met is None:
                return self._waiting(mine[0], theirs[0])
            for queue, one in zip((self._mine, self._theirs), met, strict=True):
                queue[0].remove(one)
                if not queue[0]:
                    queue.popleft()
        return None

    def _waiting(self, mine: Call, theirs: Call) -> tuple[Call, Call] | None:
        """The two messages, if both ranks send and neither is in a batch, which may still grow."""
        if mine.op != "send" or theirs.op != "send" or mine.is_batched or theirs.is_batched:
            return None
        self._is_known = True
        self._mine.clear()
        self._theirs.clear()
        return mine, theirs
