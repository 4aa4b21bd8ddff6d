"""
Whole tensors that two recordings have kept: the first wrong element, the rank that holds it, and the likely cause.

Fingerprints show how far a tensor is off, and which combination of others it is. Elements show where, and causes that
move or lose some of them.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp_conformance.diagnosis.causes import likely
from fsdp_conformance.diagnosis.evidence import Evidence
from fsdp_conformance.diagnosis.places import FEWEST_TAKEN, NEAR
from fsdp_conformance.recordings.events import USED, Backward, Keep, Kept
from fsdp_conformance.recordings.files import Recording

#: An element is wrong if it differs by more than this part of the largest difference ...
_WRONG = 1e-2
#: ... and by more than this part of the largest element.
_ROUNDING = 1e-6
#: The number of tensors in which a cause is looked for.
_MOST = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class WrongElement:
    """The first wrong element of a tensor."""

    name: str
    index: tuple[int, ...]
    rank: int | None
    """The rank that holds it; None if several do."""
    got: float
    expected: float
    wrong: int
    """The number of elements that are wrong."""
    elements: int
    likely: str
    """The cause that the elements show; empty if they show none."""


def first_wrong(run: Recording, reference: Recording, keep: Keep) -> WrongElement | None:
    """The first wrong element of the first tensor that differs; None if no tensor is complete in both and differs."""
    if keep.kind != USED:
        return _first_wrong(_Elements(run, keep), _Elements(reference, keep), keep.names[:_MOST])
    # Each rank has a copy, and any of them may be the wrong one.
    right = _Elements(reference, keep, rank=0)
    of_ranks = (_first_wrong(_Elements(run, keep, rank=rank), right, keep.names) for rank in range(run.world_size))
    wrong = [element for element in of_ranks if element is not None]
    return min(wrong, key=lambda element: keep.names.index(element.name), default=None)


def _first_wrong(held: _Elements, expected: _Elements, names: Sequence[str]) -> WrongElement | None:
    """The first wrong element of the first tensor that shows a cause, else of the first that differs."""
    first: WrongElement | None = None
    for name in names:
        got, right = held.whole(name), expected.whole(name)
        if got is None or right is None or got.shape != right.shape:
            continue
        if right.is_floating_point() and right.element_size() > got.element_size():
            # An engine casts what modules compute with.
            right = right.to(got.dtype) if held.keep.kind == USED else right
        wrong = _wrong_in(got.double(), right.double())
        if not bool(wrong.any()):
            continue
        cause = _of_other_shards(held, name, right) or _stale(held, expected, name, got, wrong)
        cause = cause or likely(_evidence(name, got, right, wrong, held, expected)) or ""
        cause = cause or _of_another_tensor(held, expected, name, right, names)
        place = int(wrong.flatten().nonzero()[0])
        element = WrongElement(
            name=name,
            index=_index(place, got.shape),
            rank=held.rank_of(name, place),
            got=float(got.flatten()[place]),
            expected=float(right.flatten()[place]),
            wrong=int(wrong.sum()),
            elements=got.numel(),
            likely=cause,
        )
        if cause:
            return element
        first = first or element
    return first


def _of_other_shards(held: _Elements, name: str, right: Tensor) -> str:
    """In words, that each rank has the mean, or the sum, of the shards of all ranks; empty if it has not."""
    shards = held.shards(name)
    if len(shards) < 2 or len({part.shape for part in shards}) > 1:
        return ""
    boxes = torch.stack([_box(right.double(), part).flatten() for part in shards])
    contents = torch.stack([_content(part).double() for part in shards])
    for how, expected in (("averages", boxes.mean(0)), ("adds up", boxes.sum(0))):
        if bool(expected.any()) and not bool(_wrong_in(contents, expected.expand_as(contents)).any()):
            return (
                f"every rank has the same: the script {how} the shards of the ranks, which are different rows of the "
                "gradients. Sharded gradients are reduced already: do not reduce them again"
            )
    return ""


def _of_another_tensor(held: _Elements, expected: _Elements, name: str, right: Tensor, names: Sequence[str]) -> str:
    """In words, that each wrong shard has consecutive elements of another tensor's; empty if one has not."""
    wrong = [
        (rank, content)
        for rank, part in held.parts(name)
        if bool(_wrong_in(content := _content(part).double(), _box(right, part).flatten().double()).any())
    ]
    if not wrong or any(content.numel() < FEWEST_TAKEN or not bool(content.any()) for _, content in wrong):
        return ""
    others = {other: expected.whole(other) for other in names if other != name}
    taken = []
    for rank, content in wrong:
        places = (
            (other, place)
            for other, value in others.items()
            if value is not None
            for holder, part in held.parts(other)
            if holder == rank
            for place in _places(content, _box(value, part).flatten().double())
        )
        taken.append(next(places, None))
    if None in taken or taken[0] is None:
        return ""
    (rank, _), (other, place) = wrong[0], taken[0]
    return (
        f"mixed up with another parameter: rank {rank}'s elements are those of rank {rank}'s part of '{other}' from "
        f"element {place} on, as where a buffer that several parameters share is read at the wrong place"
    )


def _places(content: Tensor, shard: Tensor) -> Iterator[int]:
    """Where all elements of `content` are in a shard, one after the other."""
    count = content.numel()
    near = NEAR * float(content.abs().max())
    begins = (shard[: max(0, shard.numel() - count + 1)] - content[0]).abs() <= near
    for place in begins.nonzero().flatten().tolist():
        if float((content - shard[place : place + count]).abs().max()) <= near:
            yield place


def _stale(held: _Elements, expected: _Elements, name: str, got: Tensor, wrong: Tensor) -> str:
    """In words, that the wrong elements that a module computed with have their old values; empty if they have not."""
    before = expected.whole(name, step=held.keep.step - 1) if held.keep.kind == USED else None
    if before is None or before.shape != got.shape:
        return ""
    is_old = not bool(_wrong_in(got.double(), before.to(got.dtype).double())[wrong].any())
    which = "all elements" if bool(wrong.all()) else f"the {int(wrong.sum())} wrong elements"
    return f"stale: {which} have the values of the step before, as if they were not gathered again" if is_old else ""


class _Elements:
    """The elements that one recording has kept."""

    def __init__(self, recording: Recording, keep: Keep, *, rank: int | None = None) -> None:
        """`rank`: the only one whose elements count; None for all of them together."""
        self.keep = keep
        self.world_size = recording.world_size
        self._ranks = [
            [event for event in each.events if isinstance(event, Kept) and rank in (None, number)]
            for number, each in enumerate(recording.ranks)
        ]
        self.backwards = [
            [event for event in rank.events if isinstance(event, Backward) and event.step == keep.step]
            for rank in recording.ranks
        ]

    def whole(self, name: str, *, step: int | None = None) -> Tensor | None:
        """A tensor, put together from what the ranks hold; None if some of it is missing."""
        at = self.keep.step if step is None else step
        return _whole([part for rank in self._ranks for part in _of(rank, at, self.keep.kind, name)])

    def contributions(self, name: str) -> list[list[Tensor | None]] | None:
        """The gradient that each rank has added in each pass; None if that was not kept."""
        of_ranks: list[list[Tensor | None]] = []
        for rank, backwards in zip(self._ranks, self.backwards, strict=True):
            passes: list[Tensor | None] = []
            before: Tensor | None = None
            for backward in backwards:
                parts = list(_of(rank, self.keep.step, "contribution", name))
                total = _whole([each for each in parts if each.number == backward.number])
                if total is None:
                    return None
                passes.append(total if before is None else total - before)
                # Reduced gradients are set aside; gradients that were not reduced are in the next total as well.
                before = None if backward.is_reduced else total
            of_ranks.append(passes)
        return of_ranks if of_ranks and all(of_ranks) else None

    def shards(self, name: str) -> list[Kept]:
        """The only part of a tensor that each rank holds, if the parts are equally large and no replicas; else none."""
        parts = [list(_of(rank, self.keep.step, self.keep.kind, name)) for rank in self._ranks]
        if any(len(each) != 1 for each in parts):
            return []
        shards = [part for (part,) in parts]
        sizes = {len(part.data) for part in shards}
        return shards if len(sizes) == 1 and len({part.offsets for part in shards}) == len(shards) else []

    def parts(self, name: str) -> Iterator[tuple[int, Kept]]:
        """The parts of a tensor, each with its rank."""
        for number, rank in enumerate(self._ranks):
            for part in _of(rank, self.keep.step, self.keep.kind, name):
                yield number, part

    def rank_of(self, name: str, place: int) -> int | None:
        """The only rank that holds an element of a tensor, by its place in row-major order."""
        holders = {rank for rank, part in self.parts(name) if _holds(part, place)}
        return holders.pop() if len(holders) == 1 else None


def _of(rank: Sequence[Kept], step: int, kind: str, name: str) -> Iterator[Kept]:
    return (part for part in rank if (part.step, part.kind, part.name) == (step, kind, name))


def _whole(parts: Sequence[Kept]) -> Tensor | None:
    if not parts or len({(part.shape, part.dtype) for part in parts}) > 1:
        return None
    values = torch.zeros(parts[0].shape, dtype=getattr(torch, parts[0].dtype))
    is_filled = torch.zeros(parts[0].shape, dtype=torch.bool)
    for part in parts:
        for tensor, content in ((values, _content(part)), (is_filled, None)):
            box = _box(tensor, part)
            box.copy_(torch.ones_like(box) if content is None else content.view(box.shape))
    return values if bool(is_filled.all()) else None


def _box(tensor: Tensor, part: Kept) -> Tensor:
    """The elements of a whole tensor that a part has."""
    if part.sizes is None:
        item = torch.empty(0, dtype=getattr(torch, part.dtype)).element_size()
        count = len(base64.b64decode(part.data, validate=True)) // item
        return tensor.view(-1)[part.offsets[0] : part.offsets[0] + count]
    return tensor[tuple(slice(begin, begin + size) for begin, size in zip(part.offsets, part.sizes, strict=True))]


def _content(part: Kept) -> Tensor:
    data = bytearray(base64.b64decode(part.data, validate=True))
    dtype = getattr(torch, part.dtype)
    return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)


def _holds(part: Kept, place: int) -> bool:
    is_held = torch.zeros(part.shape, dtype=torch.bool)
    _box(is_held, part).fill_(True)
    return bool(is_held.flatten()[place])


def _wrong_in(got: Tensor, expected: Tensor) -> Tensor:
    """The elements that are wrong."""
    apart = (got - expected).abs()
    finite = apart.nan_to_num(nan=math.inf, posinf=math.inf)
    finite_values = finite[finite.isfinite()]
    largest = float(finite_values.max()) if finite_values.numel() else 0.0
    scale = float(expected.abs().nan_to_num(0.0, 0.0, 0.0).max()) if expected.numel() else 0.0
    return finite > max(_WRONG * largest, _ROUNDING * scale)


def _index(place: int, shape: Sequence[int]) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        place, position = divmod(place, size)
        index.append(position)
    return tuple(reversed(index))


def _evidence(name: str, got: Tensor, right: Tensor, wrong: Tensor, held: _Elements, expected: _Elements) -> Evidence:
    keep = expected.keep
    values = {other: expected.whole(other) for other in keep.names if other != name}
    apart = (got.double() - right.double()).abs()
    return Evidence(
        kind={"clipped": "clipped gradient"}.get(keep.kind, keep.kind),
        got=got,
        expected=right.double(),
        tolerance=torch.where(wrong, 0.0, apart),
        world_size=held.world_size,
        rank=0,
        micro_batches=max(1, len(expected.backwards[0])),
        previous=expected.whole(name, step=keep.step - 1),
        contributions=expected.contributions(name) if keep.kind == "gradient" else None,
        others={
            other: value.double() for other, value in values.items() if value is not None and value.shape == got.shape
        },
    )
