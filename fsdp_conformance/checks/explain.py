"""
From the pattern of a difference to its likely cause: summed instead of averaged, a missing rank, dropped rows, stale.

Every answer begins with the cause and quotes the numbers that support it. A signature must fit every element of the
tensor; if none fits, there is no answer.

The signatures come from 180 defects of real engines: scale, contributions of ranks and micro-batches, layout, time,
precision. `Evidence.contributions` holds the gradients of single ranks, from which sums without a rank are formed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fsdp_conformance.checks.tolerance import magnitude

#: How close a tensor must be to what a signature predicts, relative to its largest element.
_NEAR = 1e-4
#: Largest number of ranks for which every subset is tried.
_MAX_SUBSET_RANKS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What is known about a tensor that differs. All tensors have the same shape; `expected` is float64."""

    kind: str
    """"gradient", "parameter", "loss", ..."""
    got: Tensor
    expected: Tensor
    tolerance: Tensor | None
    """Per element or 0-dim; None: bitwise."""
    world_size: int
    rank: int
    micro_batches: int = 1
    previous: Tensor | None = None
    """What was expected one step earlier."""
    contributions: Sequence[Sequence[Tensor | None]] | None = None
    """By rank and micro-batch: the undivided gradient of that rank's loss alone."""
    others: Mapping[str, Tensor] = field(default_factory=dict)
    """Other expected tensors of the same kind, step and shape."""


def likely(evidence: Evidence) -> str | None:
    """The likely cause in one sentence, or None."""
    got = evidence.got.double()
    if not bool(got.isfinite().all()):
        return _not_finite(got)
    for signature in _SIGNATURES:
        found = signature(evidence, got, evidence.expected.double())
        if found is not None:
            return found
    return None


def likely_none(got: Tensor | None, expected: Tensor | None) -> str | None:
    """The likely cause of a gradient that is None on one side only."""
    if got is None and expected is not None:
        return "this rank did not use the parameter and left it out of the reduction"
    if got is not None and not bool(got.any()):
        return "a gradient of zeros was created for a parameter that no rank used"
    if got is not None:
        return "an earlier step's gradient was kept, or a frozen parameter received one"
    return None


def _not_finite(got: Tensor) -> str:
    bad = int((~got.isfinite()).sum())
    if bad == got.numel():
        return f"uninitialised or freed storage, or overflow: none of the {bad} elements is finite"
    tail = got.flatten().isfinite().logical_not().nonzero().flatten()
    at_end = int(tail[0]) == got.numel() - bad
    cause = "padding was read" if at_end else "storage was read before it was written"
    return f"{cause}: {'the last ' if at_end else ''}{bad} of {got.numel()} elements are not finite"


# --- signatures: each takes the evidence and the actual and expected tensors in float64 -------------------------------


def _unchanged(evidence: Evidence, got: Tensor, expected: Tensor) -> str | None:
    previous = evidence.previous
    if evidence.kind != "parameter" or previous is None or not _moved(expected, previous.double()):
        return None
    if _same(got, previous.double(), exactly=True):
        return "no update: the parameter has its value from before the step"
    return None


def _update_scaled(evidence: Evidence, got: Tensor, expected: Tensor) -> str | None:
    if evidence.kind != "parameter" or evidence.previous is None:
        return None
    before = evidence.previous.double()
    ratio = _uniform_ratio(got - before, expected - before, spread=1e-3)
    if ratio is None:
        return None
    return f"update scaled by {_figure(ratio)} at every element{_ratio_of(ratio, evidence.world_size)}"


def _scaled(evidence: Evidence, got: Tensor, expected: Tensor) -> str | None:
    """By a factor with a known cause."""
    ratio, at = _factor(evidence, got, expected)
    if ratio is None:
        return None
    world_size, micro = evidence.world_size, evidence.micro_batches
    if world_size > 1 and _close(ratio, world_size):
        return f"summed over ranks instead of averaged: {at}, which is the world size"
    if world_size > 1 and _close(ratio, 1 / world_size):
        return f"averaged twice: {at}, which is 1 / world size"
    if micro > 1 and _close(ratio, 1 / micro):
        return f"divided by the number of micro-batches: {at}, which is 1 / {micro}"
    if micro > 1 and _close(ratio, micro):
        return f"multiplied by the number of micro-batches: {at}, which is {micro}"
    if _close(ratio, 2):
        return f"counted twice: {at}"
    if _close(ratio, -1):
        return f"wrong sign: {at}"
    return None


def _scaled_otherwise(evidence: Evidence, got: Tensor, expected: Tensor) -> str | None:
    """By any other factor. Tried late, because a missing rank is also a factor if ranks' gradients are proportional."""
    ratio, at = _factor(evidence, got, expected)
    if ratio is None:
        return None
    divisor = evidence.world_size / ratio
    if 1 <= round(divisor) <= 2 * evidence.world_size and _close(divisor, round(divisor)):
        return f"divided by {round(divisor)}, but the world size is {evidence.world_size}: {at}"
    return f"scaled: {at}"


def _factor(evidence: Evidence, got: Tensor, expected: Tensor) -> tuple[float | None, str]:
    """got / expected if it is one number other than 1, and its text; only for values linear in the gradients."""
    if evidence.kind not in ("gradient", "norm", "clipped gradient"):
        return None, ""
    ratio = _uniform_ratio(got, expected)
    if ratio is None or abs(ratio - 1) < _NEAR:
        return None, ""
    return ratio, f"got / expected = {_figure(ratio)}" + (" at every element" if expected.numel() > 1 else "")


def _other_step(evidence: Evidence, got: Tensor, expected: Tensor) -> str | None:
    previous = evidence.previous
    if previous is None or evidence.kind == "parameter" or previous.shape != got.shape:
        return None
    if magnitude(previous) > 0 and not _same(previous.double(), expected) and _same(got, previous.double()):
        return f"stale by one step: every element equals the previous step's {evidence.kind}"
    return None


def _local(evidence: Evidence, got: Tensor, expected: Tensor) -> str | None:
    if evidence.contributions is None or evidence.world_size == 1:
        return None
    for rank, total in enumerate(_totals(evidence)):
        owner = "this rank's" if rank == evidence.rank else f"rank {rank}'s"
        if total is None or not magnitude(total):
            continue
        if _same(got, total):
            return f"not reduced: equals {owner} own gradient"
        if _same(got, total / evidence.world_size):
            return f"not reduced: equals {owner} own gradient divided by the world size"
    return None


def _ranks_missing(evidence: Evidence, got: Tensor, expected: Tensor) -> str | None:
    totals = _present(evidence)
    if totals is None or not 1 < len(totals) <= _MAX_SUBSET_RANKS:
        return None
    world_size = len(totals)
    for size in range(world_size - 1, 0, -1):
        for ranks in itertools.combinations(range(world_size), size):
            total = _sum([totals[rank] for rank in ranks])
            absent = [rank for rank in range(world_size) if rank not in ranks]
            if not any(magnitude(totals[rank]) for rank in absent):
                continue
            if _same(got, total / world_size):
                return f"{_ranks(absent)} missing: equals the sum over {_ranks(ranks)}, divided by {world_size}"
            if size > 1 and _same(got, total / size):
                return f"averaged over {_ranks(ranks)} only, as in a group of {size}: {_ranks(absent)} left out"
    for rank, total in enumerate(totals):
        if magnitude(total) and _same(got, expected + total / world_size):
            return f"rank {rank} counted twice: its gradient divided by {world_size} is added once more"
    return None


def _micro_batches(evidence: Evidence, got: Tensor, expected: Tensor) -> str | None:
    contributions = evidence.contributions
    if contributions is None or evidence.micro_batches < 2:
        return None
    means = [_mean([rank[micro] for rank in contributions]) for micro in range(evidence.micro_batches)]
    # With two micro-batches, "only one" and "the other missing" look alike: overwriting is more common, so it is first.
    for micro, mean in enumerate(means):
        if mean is not None and magnitude(mean) and _same(got, mean):
            return f"overwritten instead of accumulated: equals the gradient of micro-batch {micro} alone"
    for micro, mean in enumerate(means):
        if mean is None or not magnitude(mean):
            continue
        own = contributions[evidence.rank][micro]
        if _same(got, expected - mean):
            return f"micro-batch {micro} missing: the others are included"
        if _same(got, expected + mean):
            return f"micro-batch {micro} counted twice"
        if own is not None and _same(got, expected - mean + own):
            return f"micro-batch {micro} not reduced: this rank's own gradient is in its place"
    return None


def _swapped(evidence: Evidence, got: Tensor, expected: Tensor) -> str | None:
    if evidence.kind == "loss":
        return None
    for name, other in evidence.others.items():
        wide = other.double()
        if not magnitude(wide) or _same(wide, expected):
            continue
        if _same(got, wide):
            return f"mixed up with {name!r}: every element equals that {evidence.kind}"
        if evidence.kind == "gradient" and _same(got, expected + wide):
            return f"mixed up with {name!r}, which has the same shape: equals the sum of both gradients"
    return None


def _rows(evidence: Evidence, got: Tensor, expected: Tensor) -> str | None:
    """Differences confined to a run of rows."""
    if expected.dim() == 0 or evidence.kind not in ("gradient", "parameter", "initial"):
        return None
    outside_E = _outside(evidence, got, expected)
    rows = outside_E.flatten(1).any(1) if expected.dim() > 1 else outside_E
    bad = rows.nonzero().flatten().tolist()
    num_rows = len(rows)
    if not bad or len(bad) == num_rows or bad != list(range(bad[0], bad[-1] + 1)):
        return None
    missing = "zero" if not magnitude(got[bad]) else None
    if missing is None and evidence.previous is not None and evidence.kind == "parameter":
        missing = "not updated" if _same(got[bad], evidence.previous.double()[bad], exactly=True) else None
    if missing is None:
        return None
    which = f"row {bad[0]}" if len(bad) == 1 else f"rows {bad[0]} to {bad[-1]}"
    shard = _shard_of(bad, num_rows, evidence.world_size)
    if bad[-1] == num_rows - 1 and num_rows % evidence.world_size:
        cause = "last padded rows dropped" + (f" (rank {shard}'s shard)" if shard is not None else "")
    else:
        cause = f"rank {shard}'s shard lost" if shard is not None else "rows lost"
    return f"{cause}: {which} of {num_rows} {'is' if len(bad) == 1 else 'are'} {missing}, the others are correct"


def _all_zero(evidence: Evidence, got: Tensor, expected: Tensor) -> str | None:
    if evidence.kind == "gradient" and not magnitude(got) and magnitude(expected):
        return "dropped: every element is zero"
    return None


def _moved_elements(evidence: Evidence, got: Tensor, expected: Tensor) -> str | None:
    """The right values in the wrong places."""
    flat_got, flat_expected = got.flatten(), expected.flatten()
    if flat_got.numel() < 3 or not _same(flat_got.sort().values, flat_expected.sort().values):
        return None
    if got.dim() and evidence.world_size > 1:
        chunks = torch.chunk(expected, evidence.world_size)
        for turn in range(1, len(chunks)):
            rotated = torch.cat([*chunks[turn:], *chunks[:turn]])
            if _same(got, rotated):
                return f"shards rotated by {turn} ranks: every value is right but in another rank's place"
    for offset in (1, -1):
        if _same(flat_got, flat_expected.roll(offset)):
            return _off_by_one("-" if offset > 0 else "+")
    if got.dim() == 2 and got.size(0) == got.size(1) and _same(got, expected.t()):
        return f"transposed: element [i, j] has the value of element [j, i] in all {got.size(0)} rows"
    return "elements permuted: every value is right but in the wrong place"


def _off_by_one(sign: str) -> str:
    return f"flat offset off by one: element i has the value of element i {sign} 1"


def _exchanged_shards(evidence: Evidence, got: Tensor, expected: Tensor) -> str | None:
    """Every wrong shard along dim 0 holds the rows of another rank's."""
    if expected.dim() == 0 or evidence.world_size < 2:
        return None
    shards, held = torch.chunk(expected, evidence.world_size), torch.chunk(got, evidence.world_size)
    taken: list[str] = []
    for rank, rows in enumerate(held):
        if _same(rows, shards[rank]):
            continue
        sources = [other for other, shard in enumerate(shards) if magnitude(rows) and _same(rows, shard[: len(rows)])]
        if not sources:
            return None
        taken.append(f"rank {rank} has rank {sources[0]}'s")
    return f"shards in the wrong place: {', '.join(taken)} ({len(shards[0])} rows each)" if taken else None


def _shifted(evidence: Evidence, got: Tensor, expected: Tensor) -> str | None:
    """A flat offset that loses an element at one end."""
    flat_got, flat_expected = got.flatten(), expected.flatten()
    if flat_got.numel() < 4 or not _moved(flat_expected[1:], flat_expected[:-1]):
        return None
    if _same(flat_got[1:], flat_expected[:-1]):
        return _off_by_one("-")
    if _same(flat_got[:-1], flat_expected[1:]):
        return _off_by_one("+")
    return None


def _low_precision(evidence: Evidence, got: Tensor, expected: Tensor) -> str | None:
    """Every element is the expected one at lower precision."""
    if not magnitude(expected) or evidence.kind == "loss":
        return None
    for dtype in (torch.bfloat16, torch.float16):
        eps, name = torch.finfo(dtype).eps, str(dtype).removeprefix("torch.")
        distance = magnitude(got - expected) / magnitude(expected)
        representable = torch.equal(got.to(dtype).double(), got)
        if representable and distance <= eps and not torch.equal(expected.to(dtype).double(), expected):
            return f"rounded to {name}: every element is representable in it"
        if evidence.kind == "gradient" and eps / 16 <= distance <= eps and not representable:
            return f"computed or reduced in {name}: off by {distance:.1e} of the largest element (eps is {eps:.1e})"
    return None


_Signature = Callable[[Evidence, Tensor, Tensor], str | None]
_SIGNATURES: tuple[_Signature, ...] = (
    _unchanged,
    _all_zero,
    _other_step,
    _scaled,
    _local,
    _ranks_missing,
    _micro_batches,
    _swapped,
    _scaled_otherwise,
    _update_scaled,
    _rows,
    _exchanged_shards,
    _moved_elements,
    _shifted,
    _low_precision,
)


# --- helpers ----------------------------------------------------------------------------------------------------------


def _same(got: Tensor, predicted: Tensor, *, exactly: bool = False) -> bool:
    if got.shape != predicted.shape:
        return False
    if exactly:
        return torch.equal(got, predicted)
    scale = max(magnitude(predicted), magnitude(got))
    return magnitude(got - predicted) <= _NEAR * scale


def _moved(after: Tensor, before: Tensor) -> bool:
    return not torch.equal(after, before)


def _uniform_ratio(got: Tensor, expected: Tensor, *, spread: float = _NEAR) -> float | None:
    """got / expected if it is the same at every element, relative to the largest one."""
    index = int(expected.abs().argmax()) if expected.numel() else 0
    if not expected.numel() or expected.flatten()[index] == 0:
        return None
    ratio = float(got.flatten()[index] / expected.flatten()[index])
    if not ratio or magnitude(got - ratio * expected) > spread * abs(ratio) * magnitude(expected):
        return None
    return ratio


def _close(value: float, target: float) -> bool:
    return abs(value - target) <= _NEAR * abs(target)


def _ratio_of(ratio: float, world_size: int) -> str:
    if world_size > 1 and abs(ratio - world_size) < 1e-3 * world_size:
        return ", which is the world size"
    if world_size > 1 and abs(ratio * world_size - 1) < 1e-3:
        return ", which is 1 / world size"
    return ""


def _figure(ratio: float) -> str:
    """Rounded, without the noise of the last digits."""
    return f"{round(ratio, 4):g}"


def _totals(evidence: Evidence) -> Iterator[Tensor | None]:
    """By rank: the sum of its micro-batches' gradients."""
    for rank in evidence.contributions or ():
        found = [grad.double() for grad in rank if grad is not None]
        yield _sum(found) if found else None


def _present(evidence: Evidence) -> list[Tensor] | None:
    """`_totals` with zeros for ranks without a gradient; None if contributions are unknown."""
    if evidence.contributions is None:
        return None
    zeros = torch.zeros_like(evidence.expected, dtype=torch.float64)
    return [zeros if total is None else total for total in _totals(evidence)]


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).sum(0)


def _mean(tensors: Sequence[Tensor | None]) -> Tensor | None:
    found = [tensor.double() for tensor in tensors if tensor is not None]
    return _sum(found) / len(tensors) if found else None


def _outside(evidence: Evidence, got: Tensor, expected: Tensor) -> Tensor:
    distance = (got - expected).abs()
    return distance > (0 if evidence.tolerance is None else evidence.tolerance)


def _shard_of(rows: list[int], num_rows: int, world_size: int) -> int | None:
    """The rank whose dim-0 shard, as torch.chunk makes it, is exactly these rows."""
    for rank, shard in enumerate(torch.arange(num_rows).chunk(world_size)):
        if shard.tolist() == rows:
            return rank
    return None


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
