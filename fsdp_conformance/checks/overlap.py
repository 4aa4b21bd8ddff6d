"""
Communication beside computation: whether units can compute while others are gathered and their gradients reduced.

Judged by what waits for what, on the simulated accelerator, and never by time: a program whose gathers wait for the
computation before them cannot overlap anywhere, and one whose gathers wait for nothing overlaps wherever the machine
lets it. What the host has waited for is known to everything that it issues later, so a host that waits for the device
in every unit shows in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_conformance.checks.result import CheckResult, Tally
from fsdp_conformance.history.collective import Op
from fsdp_conformance.history.overlap import Communicated, Computed, DeviceWork, Operation, finished

#: What an engine may issue to gather parameters, and to reduce gradients.
_GATHERS = frozenset({Op.ALL_GATHER, Op.BROADCAST, Op.ALL_TO_ALL, Op.GATHER, Op.SCATTER})
_REDUCTIONS = frozenset({Op.REDUCE_SCATTER, Op.ALL_REDUCE, Op.REDUCE})

#: The part of the bytes that must be able to go beside computation. The first gather of a phase and its last reduction
#: have nothing to go beside; of eight units, one more may be alone.
_PART = 0.75


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kind:
    """Collectives of one phase of a step."""

    what: str
    phase: str
    ops: frozenset[Op]
    before: bool
    """True if they serve the computation that follows: they should not wait for the one before. Else they serve the one
    before, and the one that follows should not wait for them."""


_KINDS = (
    _Kind(what="gathers", phase="forward", ops=_GATHERS, before=True),
    _Kind(what="gathers", phase="backward", ops=_GATHERS, before=True),
    _Kind(what="reductions", phase="backward", ops=_REDUCTIONS, before=False),
)


def overlaps(work: DeviceWork, *, rank: int, step: int, num_units: int, requirement: str) -> CheckResult:
    """
    In each phase of a step, collectives with at least three quarters of the bytes can go beside another unit's
    computation: neither waits for the other.

    A phase counts if it has as many collectives as there are units: an engine that sends everything in a few buckets
    has, on a small model, nothing to put beside anything. If no phase counts, the result is inconclusive. Measured: the
    percentage of the bytes that can go beside computation, by phase.
    """
    tally = Tally("overlap", requirement, rank=rank)
    shares = {}
    too_few = []
    for kind in _KINDS:
        collectives = [
            each for each in work.communicated if (each.step, each.phase) == (step, kind.phase) and each.op in kind.ops
        ]
        computed = [each for each in work.computed if (each.step, each.phase) == (step, kind.phase)]
        whole = sum(each.nbytes for each in collectives)
        # Flags and counts that ranks exchange are no parameters.
        large = [each for each in collectives if each.nbytes * 2 * num_units > whole]
        label = f"{kind.what} in {kind.phase}"
        if len(large) < num_units:
            too_few.append(f"{len(large)} {label}")
            continue
        beside = [each for each in large if any(each.may_overlap(other) for other in computed)]
        share = sum(each.nbytes for each in beside) / sum(each.nbytes for each in large)
        shares[label] = f"{share:.0%}"
        alone = [each for each in large if each not in beside]
        tally.compare(
            share >= _PART,
            f"{label} that can go beside computation",
            expected=f"at least {_PART:.0%} of their bytes",
            got=f"{share:.0%}",
            details=f"{len(beside)} of {len(large)} collectives",
            elements=len(large),
            step=step,
            phase=kind.phase,
            likely=_reason(kind, alone, computed),
        )
    result = tally.result(measurements=shares)
    if not shares:
        got = ", ".join(too_few)
        result.inconclusive = (
            f"expected {num_units} collectives or more, one for each unit, got {got} [overlap, rank {rank}]"
        )
    return result


def _reason(kind: _Kind, alone: Sequence[Communicated], computed: Sequence[Computed]) -> str:
    """The reason why most of these collectives do not overlap with computation."""
    by_host = by_stream = 0
    for collective in alone:
        pair = _neighbours(kind, collective, computed)
        if pair is not None and pair[1].waits_for(pair[0]):
            waited = finished(pair[1].known_to_host, pair[0].stream) >= pair[0].number
            by_host += waited
            by_stream += not waited
    if by_host >= by_stream and by_host:
        return "the host waits for the device in between"
    if kind.before:
        return "they wait for the computation before them: issued on its stream, or into memory that it uses"
    return "the stream that computes waits for them at once"


def _neighbours(
    kind: _Kind, collective: Communicated, computed: Sequence[Computed]
) -> tuple[Operation, Operation] | None:
    """The collective and the computation that it should go beside, in the order in which they were issued."""
    if kind.before:
        earlier = [each for each in computed if each.order < collective.order]
        return (earlier[-1], collective) if earlier else None
    later = [each for each in computed if each.order > collective.order]
    return (collective, later[0]) if later else None
