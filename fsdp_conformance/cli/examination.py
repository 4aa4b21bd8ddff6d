"""The findings of `examine`, as they come: the parent's side of the child in which `doctor` launches ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from fsdp_conformance.cli.answers import answers

#: Tells the child that ranks share devices.
SHARED = "shared"

#: A machine that takes longer to launch four ranks is too slow for cases with a deadline of a minute.
TIMEOUT_S = 120.0


@contextlib.contextmanager
def examined(device: str, *, shared: bool = False, timeout_s: float = TIMEOUT_S) -> Iterator[Iterator[dict[str, Any]]]:
    """
    The child's findings, with `shared` for ranks that share devices.

    When the block is left, the child and all its descendants are ended.
    """
    words = [device, *([SHARED] if shared else [])]
    with answers("fsdp_conformance.cli.examine", words, timeout_s=timeout_s) as found:
        yield found
