"""A decision of the planner in words: a table of the candidates, the reason for the choice, and what its units do."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fsdp_conformance.listing import some
from fsdp_conformance.planner.plan_model import PlanUnit
from fsdp_conformance.planner.plan_step import Candidate
from fsdp_conformance.planner.planner import Decision, Estimate

_HEADINGS = ("strategy", "ranks", "offload", "step ms", "compute", "gather", "reduce", "optimizer", "exposed", "memory")
_WIDTHS = (20, 11, 8, 10, 10, 10, 10, 10, 10, 11)

#: How many plans are named that cannot be told apart from the chosen one.
_MOST_NAMED = 3


def decision_text(decision: Decision, *, num_rows: int = 12) -> str:
    """The whole text: table, choice, units."""
    return "\n".join([*_table(decision, num_rows), *_reasons(decision), *_unit_lines(decision)])


def candidate_name(candidate: Candidate) -> str:
    """Strategy, shards x replicas, and whether the shards are offloaded."""
    offload = ", offloaded" if candidate.cpu_offload else ""
    return f"{candidate.strategy.value} {_ranks(candidate)}{offload}"


def size_words(nbytes: float) -> str:
    """A size in the largest unit that it reaches."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes:.0f} B"


def _ranks(candidate: Candidate) -> str:
    return f"{candidate.num_shards} x {candidate.num_replicas}"


def _table(decision: Decision, num_rows: int) -> Iterator[str]:
    yield "  " + _line(_HEADINGS)
    shown = list(decision.estimates[:num_rows])
    if decision.chosen is not None and decision.chosen not in shown:
        shown.append(decision.chosen)
    for estimate in shown:
        yield ("> " if estimate is decision.chosen else "  ") + _row(estimate, decision.memory_bytes)
    if len(shown) < len(decision.estimates):
        rest = len(decision.estimates) - len(shown)
        yield f"  ({rest} slower or larger candidates are left out)"


def _row(estimate: Estimate, memory_bytes: float) -> str:
    candidate, time = estimate.candidate, estimate.time
    parts = (time.step, time.compute, time.gather, time.reduce, time.optimizer, time.exposed)
    words = [
        candidate.strategy.value,
        _ranks(candidate),
        "yes" if candidate.cpu_offload else "no",
        *(f"{microseconds / 1000:.2f}" for microseconds in parts),
        size_words(estimate.memory.on_device),
    ]
    return _line(words) + ("" if estimate.fits(memory_bytes) else "  does not fit")


def _line(words: Sequence[str]) -> str:
    first = len(_WIDTHS) - 7
    cells = [
        word.ljust(width) if index < first else word.rjust(width)
        for index, (word, width) in enumerate(zip(words, _WIDTHS, strict=True))
    ]
    return "".join(cells).rstrip()


def _reasons(decision: Decision) -> Iterator[str]:
    chosen = decision.chosen
    if chosen is None:
        least = decision.smallest
        yield (
            f"chosen: none. {candidate_name(least.candidate)} needs the least, {size_words(least.memory.on_device)}, "
            f"but the device has {size_words(decision.memory_bytes)}: use more ranks, smaller units or batches, or "
            "activation checkpointing"
        )
        return
    fastest = decision.estimates[0]
    number = sum(each.fits(decision.memory_bytes) for each in decision.estimates)
    yield (
        f"chosen: {candidate_name(chosen.candidate)}, the fastest of {number} that fit into "
        f"{size_words(decision.memory_bytes)}"
    )
    if fastest is not chosen:
        yield (
            f"  faster: {candidate_name(fastest.candidate)}, {fastest.time.step / chosen.time.step:.2f} of the time, "
            f"but it needs {size_words(fastest.memory.on_device)}"
        )
    if decision.as_good:
        names = [candidate_name(estimate.candidate) for estimate in decision.as_good]
        yield (
            f"  as good, if collectives may be off by {decision.communication_error:.0%}: {some(names, _MOST_NAMED)}"
        )
    memory = chosen.memory
    held = ", ".join(
        f"{name} {size_words(nbytes)}"
        for name, nbytes in (
            ("parameters", memory.parameters),
            ("gradients", memory.gradients),
            ("optimizer", memory.optimizer),
            ("gathered", memory.gathered),
            ("unreduced gradients", memory.unreduced),
            ("activations", memory.activations),
        )
    )
    on_host = f"; the first three, {size_words(memory.on_host)}, on the host" if memory.cpu_offload else ""
    yield f"  memory: {held}{on_host}"
    communication = chosen.time.communication
    if communication:
        hidden = 1 - chosen.time.exposed / communication
        yield f"  communication: {communication / 1000:.2f} ms, of which {hidden:.0%} overlaps with computation"


def _unit_lines(decision: Decision) -> Iterator[str]:
    estimate = decision.chosen
    if estimate is None:
        return
    pairs = list(zip(decision.units, estimate.units, strict=True))
    candidate = estimate.candidate
    for (size, time), group in itertools.groupby(pairs, key=lambda pair: (_size(pair[0]), pair[1])):
        names = [member.name for member, _ in group]
        label = names[0] or "root"
        if len(names) > 1:
            label += f" to {names[-1]} ({len(names)} units)"
        full_bytes = size.numel * decision.options.compute_dtype.itemsize
        gathered = full_bytes if candidate.num_shards > 1 else 0
        reduced = full_bytes if candidate.num_shards * candidate.num_replicas > 1 else 0
        passes = "in forward and backward" if candidate.reshards_after_forward and names[0] else "in forward"
        yield f"{label}: {size.num_parameters} parameters, {size.numel:,} elements" + (" each" if names[1:] else "")
        yield f"  all-gather {gathered:,} B over {candidate.num_shards} ranks {passes}: {time.gather:,.0f} us"
        yield (
            f"  reduce {reduced:,} B over {candidate.num_shards} ranks x {candidate.num_replicas} replicas: "
            f"{time.reduce:,.0f} us"
        )
        yield f"  compute forward {time.forward:,.0f} us, backward {time.backward:,.0f} us"


class _Size(NamedTuple):
    num_parameters: int
    numel: int


def _size(unit: PlanUnit) -> _Size:
    return _Size(unit.num_parameters, unit.numel)
