"""
A process that a script forks from its rank, such as a worker of a data loader: it reports for itself.

The fork has the rank's memory but not its threads, and it is not a rank: its accesses are checked from scratch, and its
collectives are not compared with those of other ranks. What it observes is saved when it ends by `os._exit`, as
multiprocessing's processes do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from fsdp_conformance.simulator import checker
from fsdp_conformance.simulator.checker.hazard import Hazard
from fsdp_conformance.simulator.replacements import Replacements
from fsdp_conformance.simulator.simulated_cuda.outbox import Outbox

__all__ = ["ForkedChild", "report_forks"]

#: Turns hazards into JSON with the names that the script uses.
Described = Callable[[Sequence[Hazard]], list[dict[str, Any]]]


class ForkedChild:
    """The observations of a forked process."""

    def __init__(self, described: Described) -> None:
        self._described = described
        self._accesses = checker.accesses()
        self._at_exit: list[Callable[[], object]] = []

    def progress(self) -> tuple[int, int]:
        """Numbers that change when there is something new: the hazards and the accesses so far."""
        return checker.num_hazards(), checker.accesses() - self._accesses

    def observed(self) -> dict[str, Any]:
        """The observations since the fork; JSON-ready."""
        return {
            "hazards": self._described(checker.hazards()),
            "accesses": checker.accesses() - self._accesses,
            "notes": [],
            "collectives": {"found": []},
        }

    def at_exit(self, action: Callable[[], object]) -> None:
        """Do something when the process ends."""
        self._at_exit.append(action)

    def leave(self, status: int, leave: Callable[[int], NoReturn] = os._exit) -> NoReturn:
        """Replaces os._exit."""
        for action in self._at_exit:
            action()
        leave(status)


def report_forks(
    directory: Path, inherited: Mapping[str, str], described: Described, *, leave_rank: Callable[[], object]
) -> None:
    """
    From now on each process that is forked from this one reports into a directory. Not to be undone.

    `leave_rank` is called first, in the forked process. For `inherited` see `outbox.process_name`.
    """

    def become_child() -> None:
        leave_rank()
        checker.clear()
        child = ForkedChild(described)
        Replacements().set(os, _exit=child.leave)  # for good
        Outbox(directory, inherited).open(child)

    os.register_at_fork(after_in_child=become_child)
