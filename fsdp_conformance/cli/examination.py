"""The findings of `examine`, as they come: the parent's side of the child in which `doctor` launches ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from fsdp_conformance.cli.answers import answers

#: A machine that takes longer to launch four ranks is too slow for cases with a deadline of a minute.
TIMEOUT_S = 120.0


@contextlib.contextmanager
def examined(device: str, *, timeout_s: float = TIMEOUT_S) -> Iterator[Iterator[dict[str, Any]]]:
    """The child's findings; when the block is left, the child and all its descendants are ended."""
    with answers("fsdp_conformance.cli.examine", [device], timeout_s=timeout_s) as found:
        yield found
