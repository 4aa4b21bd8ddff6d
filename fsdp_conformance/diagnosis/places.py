"""Right values in wrong places: shards that were exchanged, elements that were moved, flat offsets."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fsdp_conformance.diagnosis.evidence import Evidence
from fsdp_conformance.references.tolerance import magnitude

#: How close a tensor must be to what a signature predicts, relative to its largest element.
NEAR = 1e-4
#: The fewest elements of another tensor that are no coincidence.
FEWEST_TAKEN = 4
#: The part of a tensor that must have the values of other places for them to count as moved there.
_MOST = 0.6
#: Places with the same value that are tried for each element.
_MAX_OFFSETS = 32


def same(got: Tensor, predicted: Tensor) -> bool:
    """True if a tensor is what a signature predicts."""
    if got.shape != predicted.shape:
        return False
    scale = max(magnitude(predicted), magnitude(got))
    return magnitude(got - predicted) <= NEAR * scale


def exchanged_shards(evidence: Evidence, got: Tensor, expected: Tensor) -> Iterator[str]:
    """Every wrong shard along dim 0 holds the rows of another rank's."""
    if expected.dim() == 0 or evidence.world_size < 2:
        return
    shards, held = torch.chunk(expected, evidence.world_size), torch.chunk(got, evidence.world_size)
    taken: list[str] = []
    for rank, rows in enumerate(held):
        if same(rows, shards[rank]):
            continue
        sources = [other for other, shard in enumerate(shards) if magnitude(rows) and same(rows, shard[: len(rows)])]
        if not sources:
            return
        taken.append(f"rank {rank} has rank {sources[0]}'s")
    if taken:
        yield f"shards in the wrong place: {', '.join(taken)} ({len(shards[0])} rows each)"


def moved_elements(evidence: Evidence, got: Tensor, expected: Tensor) -> Iterator[str]:
    """The right values in the wrong places."""
    flat_got, flat_expected = got.flatten(), expected.flatten()
    if flat_got.numel() < 3 or not same(flat_got.sort().values, flat_expected.sort().values):
        return
    if got.dim() and evidence.world_size > 1:
        chunks = torch.chunk(expected, evidence.world_size)
        for turn in range(1, len(chunks)):
            rotated = torch.cat([*chunks[turn:], *chunks[:turn]])
            if same(got, rotated):
                yield f"shards in the wrong place: rotated by {turn} ranks, every value is right"
    for offset in (1, -1):
        if same(flat_got, flat_expected.roll(offset)):
            yield _offset_of(offset)
    for dim in range(min(got.dim(), 2)):
        for turn in range(1, got.size(dim)):
            if got.numel() > got.size(dim) and same(got, expected.roll(turn, dim)):
                where = "rows" if dim == 0 else "columns"
                yield f"shards in the wrong place: all {where} are turned by {turn}, the last ones to the front"
    if got.dim() == 2 and got.size(0) == got.size(1) and same(got, expected.t()):
        yield f"transposed: element [i, j] has the value of element [j, i] in all {got.size(0)} rows"
    yield "elements permuted: every value is right but in the wrong place"


def shifted(evidence: Evidence, got: Tensor, expected: Tensor) -> Iterator[str]:
    """A flat offset: most elements have the value of the element that many places away; the ends are lost."""
    if got.numel() < 4 or evidence.kind in ("loss", "norm"):
        return
    offset = _offset(got.flatten(), expected.flatten())
    if offset:
        yield _offset_of(offset)


def shifted_in_unit(evidence: Evidence, got: Tensor, expected: Tensor) -> Iterator[str]:
    """The same among all parameters of a unit, which are sharded as one flat tensor."""
    if evidence.unit is None or evidence.unit[0].numel() < max(8, got.numel() + 1):
        return
    held, right = (value.double() for value in evidence.unit)
    world_size = evidence.world_size
    length = -(-held.numel() // world_size)
    taken = []
    shards = torch.split(right, length)
    for rank, rows in enumerate(torch.split(held, length)):
        sources = [other for other, shard in enumerate(shards) if magnitude(rows) and _begins_alike(rows, shard)]
        if rank in sources:
            continue
        if len(sources) != 1:
            break
        taken.append(f"rank {rank} has rank {sources[0]}'s")
    else:
        if taken and world_size > 1:
            yield f"shards in the wrong place: {', '.join(taken)} ({length} elements of the unit each)"
            return
    offset = _offset(held, right)
    if offset:
        turned, rest = divmod(abs(offset), length)
        if world_size > 1 and not rest:
            yield f"shards in the wrong place: rotated by {turned} ranks in the unit's flat tensor"
        else:
            yield _offset_of(offset) + " in the unit's flat tensor"


def _begins_alike(rows: Tensor, shard: Tensor) -> bool:
    """True if two shards agree as far as both go; the last one may be shorter, or padded with zeros."""
    shared = min(len(rows), len(shard))
    return 2 * shared >= len(rows) and same(rows[:shared], shard[:shared])


def _offset(held: Tensor, right: Tensor) -> int | None:
    """By how many places most of the wrong elements are moved."""
    scale = max(magnitude(held), magnitude(right))
    wrong = ((held - right).abs() > NEAR * scale) & (held.abs() > NEAR * scale)
    candidates: dict[int, None] = {}
    for index in wrong.nonzero().flatten()[:: max(1, int(wrong.sum()) // 8)].tolist():
        matches = ((right - held[index]).abs() <= NEAR * scale).nonzero().flatten()[:_MAX_OFFSETS]
        candidates.update(dict.fromkeys(index - int(match) for match in matches))
    for offset in sorted(candidates, key=abs):
        inside = slice(max(offset, 0), held.numel() + min(offset, 0))
        fits = (held[inside] - right.roll(offset)[inside]).abs() <= NEAR * scale
        proven = fits & wrong[inside]
        if offset and int(proven.sum()) >= max(3, _MOST * int(wrong.sum())):
            return offset
    return None


def _offset_of(offset: int) -> str:
    sign, size = "-" if offset > 0 else "+", abs(offset)
    return f"flat offset off by {'one' if size == 1 else size}: element i has the value of element i {sign} {size}"
