"""Lists of names in sentences."""

from __future__ import annotations

from collections.abc import Sequence


def some(names: Sequence[str], most: int, *, separator: str = ", ") -> str:
    """The first names, at most that many, and how many more there are: "a, b, c and 3 more"."""
    more = len(names) - most
    return separator.join(names[:most]) + (f" and {more} more" if more > 0 else "")
