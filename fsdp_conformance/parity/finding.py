"""A difference between two trainings, with its evidence."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Whose(StrEnum):
    """Where a difference comes from, in the order in which they are looked for."""

    SUITE = "fsdp-conformance"
    RUN = "the runs themselves"
    DATA = "the data"
    SCRIPT = "the script"
    EITHER = "the script or the engine"
    ENGINE = "the engine"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A difference, or something suspicious."""

    title: str
    whose: Whose
    step: int | None = None
    first: str = ""
    """Where it was seen first: tensor, rank, pass, size and bound."""
    likely: str = ""
    """The cause, if the pattern of the difference shows one."""
    evidence: tuple[str, ...] = ()
    line: str = ""
    """The line of the script."""
    is_exact: bool = False
    """True if neither rounding nor random numbers can be the reason."""
    kind: str = ""
    """The kind of the tensors that differ, as in `recordings.events.Keep`; empty if their elements say no more."""
    tensors: tuple[str, ...] = ()
    """Their names, the first one first; for USED, those that may be the reason."""
    number: int = 0
    """The micro-batch, for USED."""
    is_certain: bool = True
    """False for what may be meant: it is shown, and does not count."""
