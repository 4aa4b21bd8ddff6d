"""
The table of torch's public names about CUDA and distribution: what becomes of each under CUDA's names.

It is in `surface.toml`. The refusals are installed from it; a test compares the rest with torch, and fails for a name
that the table does not have.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from pathlib import Path

__all__ = ["Entry", "Status", "left_out", "refused", "table"]

_FILE = Path(__file__).with_suffix(".toml")
_LEFT_OUT = "left out"


class Status(StrEnum):
    """The fate of a name."""

    OWN = "own"
    """It has a behaviour of its own on the simulated device."""
    TORCH = "torch"
    """It is torch's, unchanged: data, an error, or code on top of other names."""
    REFUSED = "refused"
    """Using it raises NotSimulated, with the reason."""
    LISTED = "listed"
    """It means nothing here: the reason says why."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The names of a module, in a version of torch or another."""

    statuses: Mapping[str, Status]
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Why names are refused or listed."""


@cache
def table() -> Mapping[str, Entry]:
    """By module."""
    return {module: _entry(described) for module, described in _content().items() if module != _LEFT_OUT}


def left_out() -> Mapping[str, str]:
    """Modules that are not in the table with all that is below them, and why."""
    return {module: why for why, modules in _content()[_LEFT_OUT].items() for module in modules.split()}


@cache
def refused() -> Mapping[str, Mapping[str, str]]:
    """By module, the names that raise NotSimulated, and why."""
    return {
        module: {name: entry.reasons[name] for name, status in entry.statuses.items() if status is Status.REFUSED}
        for module, entry in table().items()
    }


@cache
def _content() -> Mapping[str, Mapping[str, str]]:
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))


def _entry(described: Mapping[str, str | Mapping[str, str]]) -> Entry:
    statuses: dict[str, Status] = {}
    reasons: dict[str, str] = {}
    for status in Status:
        names = described.get(status, {})
        for why, group in names.items() if isinstance(names, Mapping) else [("", names)]:
            for name in group.split():
                statuses[name] = status
                reasons[name] = why
    return Entry(statuses, {name: why for name, why in reasons.items() if why})
