"""A comparison for a terminal: the first divergence on top, on one screen."""

from __future__ import annotations

from collections.abc import Iterator

from fsdp_conformance.parity.finding import Finding
from fsdp_conformance.parity.noise import CEILING, EPS
from fsdp_conformance.parity.result import Comparison

#: Suspicions that are shown.
_SHOWN = 5


def lines_of(comparison: Comparison, *, collectives: bool = False) -> Iterator[tuple[str, str]]:
    """
    The lines, each with its style for rich: an empty string for none.

    `collectives`: show those that differ although nothing else does.
    """
    for finding in comparison.findings:
        yield from _finding(finding, "✗", "bold red")
        yield "", ""
    for finding in comparison.suspicions[:_SHOWN]:
        yield from _finding(finding, "?", "bold yellow")
        yield "", ""
    if collectives and not comparison.findings:
        yield from (("  differs     " + line, "") for line in comparison.collectives)
    yield from agreement_of(comparison)
    style = "bold red" if comparison.differs else "bold green"
    yield verdict_of(comparison), style


def verdict_of(comparison: Comparison) -> str:
    """The last line."""
    ranks, steps = comparison.run.world_size, comparison.steps
    of = f"{steps} step{'s' * (steps != 1)} of {ranks} rank{'s' * (ranks != 1)}"
    if comparison.is_vacuous:
        title = comparison.findings[0].title
        return f"NOTHING COMPARED: {title[0].lower()}{title[1:]}"
    if comparison.has_suite_failed:
        return f"ERROR_SUITE after {of}: the recorder failed, and nothing later was compared"
    if comparison.differs:
        first = comparison.findings[0]
        where = f" from step {first.step}" if first.step is not None else ""
        return f"DIFFERENT{where}: {first.title[0].lower()}{first.title[1:]} ({first.whose.value})"
    if not steps:
        return "NOTHING COMPARED: no step was recorded on every rank"
    equal = f"EQUAL  {of}, bit for bit" if comparison.is_bitwise else f"EQUAL  {of}, but for rounding"
    number = len(comparison.suspicions)
    return f"{equal}; {number} suspicion{'s' * (number != 1)} above, which both runs may share" if number else equal


def _finding(finding: Finding, mark: str, style: str) -> Iterator[tuple[str, str]]:
    where = f", from step {finding.step} on" if finding.step is not None else ""
    yield f"{mark} {finding.title}{where}", style
    unless = "" if finding.is_certain else ", unless it is meant"
    yield f"    whose     {finding.whose.value}{unless}", ""
    if finding.first:
        yield f"    first     {finding.first}", ""
    if finding.likely:
        yield f"    likely    {finding.likely}", ""
    for line in finding.evidence:
        yield f"    seen      {line}", ""
    if finding.line:
        yield f"    noticed   {finding.line}", ""


def agreement_of(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """How much was equal, and how near to its bound the rest came."""
    tensors = sum(row.tensors for row in comparison.rows)
    equal = sum(row.equal for row in comparison.rows)
    if tensors:
        yield f"  compared    {tensors} tensors, {equal} of them equal bit for bit", ""
    largest = comparison.largest
    if largest is not None and largest.worst and not comparison.differs:
        place = f"{largest.kind} '{largest.name}' at step {largest.step}"
        yield f"  rounding    the largest difference is {largest.worst:.2g} of what rounding explains: {place}", ""
    if comparison.unjudged is not None:
        number = comparison.unjudged_tensors
        what = f"{number} tensor{'s' * (number != 1)}, from step {comparison.unjudged} on"
        yield f"  not judged  {what}: rounding alone changes them by more than {CEILING:.0%}", ""
    if comparison.steps and not comparison.differs:
        yield from _limits_of(comparison)


def _limits_of(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """The differences that equality may hide."""
    noise, limit = comparison.noise, comparison.idle_limit
    if limit is not None:
        yield f"  not used    clipping: the norm of the gradients was never above the limit of {limit:g}", ""
    if noise.sums and not comparison.is_bitwise:
        dtype = next(name for name, eps in EPS.items() if eps == noise.sums)
        what = f"the run adds up gradients in {dtype}, and the reference does not"
        yield f"  coarse      {what}: differences of up to {comparison.coarsest:.2g} of a tensor pass as rounding", ""
    elif noise.eps > EPS["float32"] and not comparison.is_bitwise:
        dtype = next(name for name, eps in EPS.items() if eps == noise.eps)
        part = f"{comparison.coarsest:.2g} of a tensor, {noise.allowance}"
        yield f"  coarse      in {dtype}, differences of up to {part}, pass as rounding: compare in float32 too", ""
    if comparison.reference.sharding != "kept":
        shared = "mistakes of the script itself, which its reference makes as well"
        yield f"  not seen    {shared}: compare with a DDP script too (--reference)", ""
