"""
What backends say when a peer is gone or did not come, told apart from errors of a rank's own.

Backends raise RuntimeError and its subclasses for everything, so the text has to tell.
"""

from __future__ import annotations

import re

#: Of gloo's TCP transport, of NCCL, of the stores, and of ranks that are simulated.
_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused)|closed by peer|reset by peer|broken pipe|remote process exited"
    r"|ncclRemoteError|communicator was aborted|recvValue failed|sendBytes failed|connection was likely closed",
    re.IGNORECASE,
)

_TIMED_OUT = re.compile(
    r"timed out waiting|application timeout caused pair closure|timed out connecting|wait timeout after"
    r"|timeout waiting for key|timed out after \d+|caught collective operation timeout|socket timeout"
    r"|monitoredBarrier.*(timeout|within|in \d+ ms)|no rank can go on|mismatch in collective",
    re.IGNORECASE | re.DOTALL,
)

#: Only these classes come from a backend; a ValueError about a broken pipe is the rank's own.
_CLASSES = frozenset(
    {"RuntimeError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError", "RankTimedOut"}
)


def is_timeout(kind: str, message: str) -> bool:
    """Whether an exception, by the qualified name of its class and its text, says that a peer did not come."""
    return _comes_from_backend(kind) and bool(_TIMED_OUT.search(message))


def is_lost_peer(kind: str, message: str) -> bool:
    """Whether an exception says that a peer has gone, and not merely that it did not come."""
    return _comes_from_backend(kind) and not is_timeout(kind, message) and bool(_LOST_PEER.search(message))


def _comes_from_backend(kind: str) -> bool:
    return kind.rsplit(".", 1)[-1] in _CLASSES
