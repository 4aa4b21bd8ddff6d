"""The result of a comparison."""

from __future__ import annotations

from dataclasses import dataclass, field

from fsdp_conformance.parity.finding import Finding, Whose
from fsdp_conformance.parity.noise import Noise
from fsdp_conformance.parity.runs import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The tensors of one kind at one step."""

    step: int
    kind: str
    tensors: int
    equal: int
    """How many are equal bit for bit."""
    worst: float
    """The largest distance in units of the bound; above 1 is a finding."""
    name: str
    """Its tensor."""


@dataclass(kw_only=True)
class Comparison:
    """Two recordings, compared."""

    run: Run
    reference: Run
    noise: Noise
    """How far rounding takes the reference."""
    steps: int = 0
    """How many steps both have."""
    findings: list[Finding] = field(default_factory=list)
    """The first difference, and differences in what the script sets."""
    suspicions: list[Finding] = field(default_factory=list)
    collectives: tuple[str, ...] = ()
    """The first ones that differ, if both runs are sharded alike: evidence, and no finding by themselves."""
    rows: list[Row] = field(default_factory=list)
    is_vacuous: bool = False
    """True if the runs would be equal whatever the engine does, or have nothing in common; the finding says why."""
    is_renamed: bool = False
    """True if the names of one run begin with a prefix that those of the other lack, and that was left out."""
    unjudged: int | None = None
    """The first step at which rounding alone is too large to judge."""
    unjudged_tensors: int = 0
    """In how many comparisons of a tensor it is."""
    coarsest: float = 0.0
    """The largest difference that has counted as rounding could have been, relative to its tensor."""

    @property
    def differs(self) -> bool:
        """True if something differs that rounding does not explain."""
        return bool(self.findings)

    @property
    def has_suite_failed(self) -> bool:
        """True if nothing differs as far as the suite could look, which has failed before the runs ended."""
        return bool(self.findings) and self.findings[0].whose is Whose.SUITE

    @property
    def is_bitwise(self) -> bool:
        """True if everything was equal, bit for bit."""
        return not self.findings and all(row.equal == row.tensors for row in self.rows)

    @property
    def idle_limit(self) -> float | None:
        """The largest limit of a clipping that has never changed a gradient; None if one has, or nothing clips."""
        clips = [clip for step in self.run.steps[: self.steps] for clips in step.clips for clip in clips]
        # Some scripts clip by infinity, only to get the norm.
        if not clips or any(clip.norm is None or clip.norm > clip.limit for clip in clips):
            return None
        return max(clip.limit for clip in clips)

    @property
    def largest(self) -> Row | None:
        """The row that came nearest to its bound."""
        return max((row for row in self.rows if row.tensors), key=lambda row: row.worst, default=None)
