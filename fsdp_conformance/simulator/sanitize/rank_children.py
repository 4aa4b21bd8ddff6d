"""
The processes that a script starts from its ranks: `fsdp-conformance sanitize` has them see the ranks' GPUs, too, and
asks for their observations.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_conformance.simulator.sanitize.order import ChildrenOfRank, ScriptOrder, rank_variables
from fsdp_conformance.simulator.simulated_cuda.findings import saved_files
from fsdp_conformance.simulator.simulated_cuda.settings import Briefing

__all__ = ["ChildOfRank", "RankChildren"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildOfRank:
    """The observations of a process that a rank, or one of its children, has started."""

    name: str
    hazards: tuple[dict[str, Any], ...]
    """As JSON."""
    accesses: int
    notes: tuple[str, ...]
    collectives: dict[str, Any]
    """The findings about collectives, as JSON."""
    has_ended: bool
    """False if it was killed or outlived its rank, so that its last observations may be missing."""


class RankChildren:
    """
    The children of every rank of a script. Their files are in a directory that others remove.

    A child of a child belongs to the same rank. Children inherit the rank's environment, in which RANK is the rank's:
    they are named by it only if the variable is changed, as torchrun does.
    """

    def __init__(self, order: ScriptOrder, *, run_id: str, directory: Path) -> None:
        self._briefings = [
            Briefing(
                order.num_devices,
                as_cuda=order.as_cuda,
                options=order.options,
                inherited=rank_variables(rank, run_id),
                parent=directory,
            )
            for rank in range(order.world_size)
        ]
        self.observed: list[list[ChildOfRank]] = [[] for _ in self._briefings]
        """The observations of each rank's children, once `look` has read them."""

    def told(self, extension: dict[str, str]) -> list[ChildrenOfRank]:
        """For each rank, what its children must be told; `extension` are variables with which they load it."""
        return [
            ChildrenOfRank(
                directory=str(one.directory),
                variables={**extension, **one.variables()},
                inherited=one.settings.inherited,
            )
            for one in self._briefings
        ]

    def look(self) -> None:
        """Read what the children of each rank have observed, of those that used a device; in order of their names."""
        self.observed = [
            sorted(
                (
                    ChildOfRank(
                        name=one["process"],
                        hazards=tuple(one["hazards"]),
                        accesses=one["accesses"],
                        notes=tuple(one["notes"]),
                        collectives=one["collectives"],
                        has_ended=one["ended"],
                    )
                    for _, one in saved_files(briefing.directory)
                    if one["accesses"]
                ),
                key=lambda child: (child.name, child.accesses),
            )
            for briefing in self._briefings
        ]
