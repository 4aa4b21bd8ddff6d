"""Why a case or an adapter cannot be written as a script."""

from __future__ import annotations

from fsdp_conformance.errors import UsageError


class NoScript(UsageError):
    """The case cannot be written as a script; the message has the reason and what to do instead."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"no script can be written: {reason}. "
            "Use `fsdp-conformance debug CASE` to stop in it, and `replay CASE` to run it again."
        )
