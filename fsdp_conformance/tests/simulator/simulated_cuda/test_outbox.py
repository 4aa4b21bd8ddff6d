"""Tests for the results that a child process saves for its parent."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsdp_conformance.simulator.simulated_cuda.outbox import Outbox


class Counting:
    """Observes one access after the other."""

    def __init__(self) -> None:
        self.accesses = 0
        self.end: Callable[[], object] = lambda: None

    def progress(self) -> tuple[int, int]:
        return 0, self.accesses

    def observed(self) -> dict[str, Any]:
        return {"accesses": self.accesses}

    def at_exit(self, action: Callable[[], object]) -> None:
        self.end = action


def saved(directory: Path) -> list[tuple[int, bool]]:
    """The accesses in each file of the directory, and whether the process has ended."""
    contents = [json.loads(path.read_text(encoding="utf-8")) for path in directory.iterdir()]
    return [(each["accesses"], each["ended"]) for each in contents]


def test_the_last_save_says_that_it_was_the_last(tmp_path: Path) -> None:
    """The thread that looks for hazards may have been about to save when the process ended."""
    source, outbox = Counting(), Outbox(tmp_path)
    outbox.open(source)
    source.accesses = 1
    outbox.save()
    assert saved(tmp_path) == [(1, False)]
    source.accesses = 2
    source.end()
    assert saved(tmp_path) == [(2, True)]
    source.accesses = 3
    outbox.save()
    assert saved(tmp_path) == [(2, True)]


def test_what_comes_while_it_ends_is_saved(tmp_path: Path) -> None:
    """os._exit and Python's own shutdown may both report the end."""
    source, outbox = Counting(), Outbox(tmp_path)
    outbox.open(source)
    source.end()
    source.accesses = 1
    source.end()
    assert saved(tmp_path) == [(1, True)]
