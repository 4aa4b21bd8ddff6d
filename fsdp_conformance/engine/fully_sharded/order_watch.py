"""
Checks that peers run the same units: by tags that travel with the data, and by comparing collectives before they start.

A storage over several ranks ends with a tag, the number of its unit. The tag is gathered and averaged with the rest.

On the CPU every gather and every reduction is checked when it arrives. On other devices, reading a tensor makes the
host wait. So there the tags are kept and checked together, at the end of the backward or of a forward without a graph,
in the first iteration and in iterations whose order differs from the previous one. A rank that once agreed with its
peers, and whose order never changes, still agrees with them. If a peer changes its order, that peer finds out.

Tags only help if data arrive. If ranks run units of different sizes, NCCL, which compares nothing, may hang or write
past its buffer. So in the iterations that are checked, ranks also compare each collective before they issue it, through
the group's store. The first rank to arrive writes down which collective it is about to issue. A rank that is about to
issue another one raises. No rank waits for an answer, and the device is left alone.

Gathered data end with the last rank's tag. The last rank therefore sees its own, and notices a difference only from the
average, which arrives with the gradients. In a forward without a graph, and for frozen units, there is no average: then
no rank notices if only the last one changes its order.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d

from fsdp_conformance.engine.errors import ExecutionOrderError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class _Arrived(NamedTuple):
    unit: str
    expected: int
    tag: Tensor  # 0-dim
    what: str
    tolerance: float

    def is_refuted_by(self, number: float) -> bool:
        """True if `number` is not the expected tag. No tags average to NaN, so a NaN there proves nothing."""
        return abs(number - self.expected) > self.tolerance or (math.isnan(number) and self.what == "gathered")


_HINT = "All ranks must run the same units in the same order."

#: In larger groups only this many ranks compare, because all of them ask the same store about each collective.
RANKS_COMPARED = 1024

#: The number of watches per store. A watch's number is part of its keys, and is the same on every rank.
_watches: weakref.WeakKeyDictionary[Store, int] = weakref.WeakKeyDictionary()


class _Announcements:
    """The collectives that one rank is about to issue in a group, in order."""

    def __init__(self, store: Store, ranks: Sequence[int]) -> None:
        _watches[store] = number = _watches.get(store, 0) + 1
        self._store = weakref.ref(store)
        # Groups that `split_group` makes together share a name and a prefix, and do different things in pipelines.
        members = hashlib.sha256(repr(list(ranks)).encode()).hexdigest()[:16]
        self._prefix = f"fully_sharded/{members}/{number}"

    def first(self, iteration: int, place: int, mine: str) -> str:
        """The entry of the first rank to reach this place; `mine` if it is this rank, or if the store is gone."""
        store = self._store()
        if store is None:
            return mine
        try:
            entry = store.compare_set(f"{self._prefix}/{iteration}/{place}", "", mine)
        except RuntimeError:
            # The store of a fake group cannot do this, and that of a group that is ending may no longer answer.
            return mine
        return str(entry.decode())


class OrderWatch:
    """The collectives that ranks are about to issue, and the tags that arrived, in one iteration."""

    def __init__(self) -> None:
        self.is_on = True
        """True if this iteration is checked."""
        self._arrived: list[_Arrived] = []
        self._iteration = 0
        # By the group's name: the number of its collectives in this iteration, and their announcements.
        self._places: Counter[str] = Counter()
        self._announcements: dict[str, _Announcements | None] = {}

    def begin(self) -> None:
        """Begin an iteration. Raises ExecutionOrderError as `judge` does."""
        self.judge()
        self._iteration += 1
        self._places.clear()

    def announce(self, group: ProcessGroup, action: str, unit: str) -> None:
        """
        Compare the next collective of the group with those of its peers, before it is issued.

        `action` must be equal on all ranks; tags tell equal actions of different units apart. Raises
        ExecutionOrderError if a peer came first with another one. That peer waits until its timeout, as for any rank
        that ends.
        """
        name = group.group_name
        place = self._places[name]
        self._places[name] += 1
        if not self.is_on or group.rank() >= RANKS_COMPARED:
            return
        if name not in self._announcements:
            store = _store_of(group)
            ranks = dist.get_process_group_ranks(group) if store is not None else []
            self._announcements[name] = None if store is None else _Announcements(store, ranks)
        announcements = self._announcements[name]
        own_entry = f"{action} of {unit}"
        first = own_entry if announcements is None else announcements.first(self._iteration, place, own_entry)
        if not first.startswith(f"{action} of "):
            raise ExecutionOrderError(
                f"this rank is about to issue the {own_entry}, and another rank has issued the {first}",
                where=f"rank {dist.get_rank()}",
                hint=_HINT,
            )

    def announce_all(self, groups: Iterable[ProcessGroup | None], what: str, *, numel: int, unit: str) -> None:
        """`announce` a gather or a reduction of shards of `numel` elements in every group of several ranks."""
        for group in groups:
            if group is not None and group.size() > 1:
                self.announce(group, f"{what} ({numel} elements a rank)", unit)

    def check(
        self, unit: str, expected: int, tag: Tensor, *, at_once: bool, what: str = "gathered", tolerance: float = 0.0
    ) -> None:
        """
        Compare a tag that has arrived: `at_once`, or else in `judge`, so that the host need not wait for it now.

        Raises ExecutionOrderError if it is another unit's.
        """
        if at_once:
            _check_tag(tag, expected, what, name=unit)
        else:
            self.note(unit, expected, tag, what=what, tolerance=tolerance)

    def note(self, unit: str, expected: int, tag: Tensor, *, what: str = "gathered", tolerance: float = 0.0) -> None:
        """
        Keep a tag that has arrived, for the current stream: a copy, because its memory is the unit's.

        `what` was done with it; `tolerance`: how far it may be from `expected`.
        """
        if self.is_on:
            tag_copy = tag.detach().reshape(()).to(torch.float32, copy=True)
            self._arrived.append(_Arrived(unit, expected, tag_copy, what, tolerance))

    def judge(self) -> None:
        """Raise ExecutionOrderError naming every tag of another unit. The host waits if any tag was noted."""
        arrived, self._arrived = self._arrived, []
        if not arrived:
            return
        problems = [
            f"expected unit {each.expected} ({each.unit}), {each.what} unit {number:g}"
            for each, number in _numbers(arrived)
            if each.is_refuted_by(number)
        ]
        if problems:
            raise ExecutionOrderError(
                problems,
                where=f"rank {dist.get_rank()}",
                hint=_HINT,
            )

    def forget(self) -> None:
        """Drop the tags that have arrived, after an exception."""
        self._arrived.clear()


def _numbers(arrived: Iterable[_Arrived]) -> Iterator[tuple[_Arrived, float]]:
    """Each with the value of its tag. The host waits once for each device: offloaded gradients are on the CPU."""
    by_device: dict[torch.device, list[_Arrived]] = {}
    for each in arrived:
        by_device.setdefault(each.tag.device, []).append(each)
    for on_device in by_device.values():
        yield from zip(on_device, torch.stack([each.tag for each in on_device]).tolist(), strict=True)


def _store_of(group: ProcessGroup) -> Store | None:
    """The store that a group's ranks met at, or None."""
    try:
        return distributed_c10d._get_process_group_store(group)
    except (KeyError, ValueError):  # not made by torch.distributed
        return None


# --- tags -------------------------------------------------------------------------------------------------------------

#: Tags are smaller, so that bfloat16 represents them exactly.
_NUM_TAGS = 251

#: Less than the distance between tags, and more than 16 bits lose in an average.
TAG_TOLERANCE = 0.3


def tag_of(ordinal: int, dtype: torch.dtype) -> int:
    """The tag of the unit with that number, in a storage of that dtype."""
    if dtype is torch.bool:
        return 1
    largest = _NUM_TAGS if dtype.is_floating_point else min(_NUM_TAGS, torch.iinfo(dtype).max)
    return ordinal % largest + 1


def averaged_tag(tag: int, dtype: torch.dtype) -> int:
    """The number that stands for a tag in an average in `dtype`, in which the sum over ranks must be exact."""
    return tag if dtype.itemsize > 2 else tag % 16


def _check_tag(tag: Tensor, expected: int, what: str, *, name: str) -> None:
    """Raise ExecutionOrderError if another unit's tag was gathered or averaged. Makes the host wait."""
    value = tag.item()
    if not abs(value - expected) <= TAG_TOLERANCE:
        raise ExecutionOrderError(
            f"expected unit {expected} ({name}), {what} unit {value:g}",
            where=f"{name}, rank {torch.distributed.get_rank()}",
            hint=_HINT,
        )
