"""
The collectives that each rank of a script has called, in files that the other ranks and the controller read.

A rank appends every call to its own log before the call is issued, and then reads the logs of the ranks that the call
involves. Whichever rank comes last to a collective therefore sees the calls of all others: they are compared without
any rank waiting for another. Twelve bytes are written for each call; what a call says (operation, sizes, line) is
written once, in a second file.

Standard library only: the controller reads these files too.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsdp_conformance.simulator.frames import Frame

#: The number that a rank writes when its script has ended.
_ENDED = 0xFFFFFFFF

#: One entry of the log: the number of the call's description, and its place in the order of the device.
_ENTRY = struct.Struct("<III")


@dataclass(frozen=True, kw_only=True, slots=True)
class Channel:
    """A sequence of calls that stay in order: a communicator, or the messages from one of its ranks to another."""

    group: str
    """torch's name of the process group."""
    ranks: tuple[int, ...]
    """The members as global ranks."""
    device: str
    """The type of the device: a group has a separate communicator for each."""
    pair: tuple[int, int] | None = None
    """For messages: the sender and the receiver, as global ranks."""

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that must call."""
        return self.pair or self.ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A call of a collective: what the ranks must agree on, and where it was made."""

    channel: Channel
    title: str
    """The group in words: "the default group"."""
    op: str
    reduce_op: str = ""
    root: int | None = None
    """Rank in the group."""
    dtypes: tuple[str, ...] = ()
    numels: tuple[int, ...] = ()
    """The numbers of elements that must agree."""
    sends: tuple[int, ...] = ()
    """For an all-to-all: elements for each rank of the group."""
    takes: tuple[int, ...] = ()
    """For an all-to-all: elements from each rank of the group."""
    words: str
    """ "all_reduce(SUM, 12 float32)"."""
    place: Frame | None = None
    device_index: int | None = None
    """The device that the tensors are on, as an index among the devices of the machine."""
    tag: int = 0
    """Of a message."""
    is_paired: bool = False
    """True for a message on a communicator of its two ranks: unbatched, in a group that is not bound to a device."""

    @property
    def orders(self) -> bool:
        """True if calls on different communicators must come in one order: those of an accelerator, except messages."""
        return self.channel.device != "cpu" and self.channel.pair is None

    @property
    def communicator(self) -> Hashable:
        """Calls on one communicator run on the device in the order in which they are issued."""
        pair = frozenset(self.channel.pair) if self.is_paired and self.channel.pair is not None else None
        return (self.channel.group, self.channel.device, pair)

    def __str__(self) -> str:
        return f"{self.words} on {self.title}" + (f" at {self.place}" if self.place is not None else "")


#: In which respect a message of a batch differs from one that is in none, in a group that is not bound to a device.
COMMUNICATORS = "communicators"


@dataclass(frozen=True, slots=True)
class IssuedCall:
    """A call, and its place in the order of its rank's device."""

    call: Call
    number: int = 0
    """In the order in which the rank has issued them; the messages of a batch share one."""
    waits_for: int = 0
    """The stream that issued it has waited for all with smaller numbers."""


def difference(mine: Call, theirs: Call, my_rank: int, their_rank: int) -> str:
    """In which respect two calls that should be the same collective differ; empty if they do not."""
    if mine.channel.pair is None and mine.op != theirs.op and not _each_alone(mine, theirs, my_rank, their_rank):
        return "operations"
    for name, one, other in (
        ("reductions", mine.reduce_op, theirs.reduce_op),
        ("roots", mine.root, theirs.root),
        ("dtypes", mine.dtypes, theirs.dtypes),
        ("sizes", mine.numels, theirs.numels),
    ):
        if one != other:
            return name
    if mine.is_paired != theirs.is_paired:
        return COMMUNICATORS
    return "" if _splits_agree(mine, theirs, my_rank, their_rank) else "split sizes"


def _each_alone(mine: Call, theirs: Call, my_rank: int, their_rank: int) -> bool:
    """True if each of the two makes a group of itself: groups with one name and one store, which exchange nothing."""
    return (mine.op, theirs.op) == (group_of((my_rank,)), group_of((their_rank,)))


def group_of(members: Iterable[int]) -> str:
    """The words for a call of `new_group`."""
    return f"new_group({', '.join(map(str, members))})"


def _splits_agree(mine: Call, theirs: Call, my_rank: int, their_rank: int) -> bool:
    if not mine.sends or not theirs.sends:
        return True
    me, them = mine.channel.ranks.index(my_rank), mine.channel.ranks.index(their_rank)
    return mine.sends[them] == theirs.takes[me] and theirs.sends[me] == mine.takes[them]


class CallLog:
    """The writing side: one rank's log."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._described: dict[Call, int] = {}
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._descriptions, self._entries = (os.open(path, flags, 0o600) for path in _paths(directory, rank))

    def append(self, call: Call, number: int = 0, waits_for: int = 0) -> None:
        """Add a call (`IssuedCall`). When this returns, other ranks can see it."""
        description = self._described.get(call)
        if description is None:
            description = self._described[call] = len(self._described)
            os.write(self._descriptions, json.dumps(asdict(call)).encode() + b"\n")
        os.write(self._entries, _ENTRY.pack(description, number, waits_for))

    def end(self) -> None:
        """The script has ended normally: no more calls will come."""
        os.write(self._entries, _ENTRY.pack(_ENDED, 0, 0))

    def close(self) -> None:
        """Close the files."""
        os.close(self._descriptions)
        os.close(self._entries)


class CallReader:
    """The reading side of one rank's log: returns the new records."""

    def __init__(self, directory: Path, rank: int) -> None:
        self.has_ended = False
        """True if the script has ended normally on that rank, as far as it was read."""
        self._paths = _paths(directory, rank)
        self._files: tuple[int, int] | None = None
        self._calls: list[Call] = []
        self._at = [0, 0]
        self._rest = b""

    def read(self) -> list[IssuedCall]:
        """The calls that were added since the last time, in order."""
        if self._files is None:
            try:
                self._files = (_opened(self._paths[0]), _opened(self._paths[1]))
            except FileNotFoundError:  # that rank has not begun
                return []
        entries = self._new(1)
        entries = entries[: len(entries) - len(entries) % _ENTRY.size]
        self._at[1] += len(entries)
        return [
            IssuedCall(call, number, waits_for)
            for description, number, waits_for in _ENTRY.iter_unpack(entries)
            for call in self._described(description)
        ]

    def close(self) -> None:
        """Close the files."""
        for file in self._files or ():
            os.close(file)
        self._files = None

    def _described(self, number: int) -> Iterator[Call]:
        if number == _ENDED:
            self.has_ended = True
            return
        if number >= len(self._calls):
            content = self._new(0)
            self._at[0] += len(content)
            *lines, self._rest = (self._rest + content).split(b"\n")
            self._calls += [call_from_json(json.loads(line)) for line in lines]
        if number < len(self._calls):  # else the rank was killed between its two writes
            yield self._calls[number]

    def _new(self, which: int) -> bytes:
        assert self._files is not None, "read() has opened them"
        content = b""
        while part := os.pread(self._files[which], 1 << 16, self._at[which] + len(content)):
            content += part
        return content


class Standstills:
    """Which ranks wait for peers and make no progress, in a file for each rank."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory = directory
        self._path = directory / f"calls{rank}.stuck"
        self._said: int | None = None

    def say(self, number: int | None) -> None:
        """This rank waits after its call number `number`, and has waited for a while; None: it does not."""
        if number == self._said:
            return
        self._said = number
        part = self._path.with_suffix(".part")
        part.write_text("" if number is None else str(number), encoding="ascii")
        os.replace(part, self._path)

    def read(self, world_size: int) -> dict[int, int]:
        """The ranks that wait, each with the number of calls that it has made."""
        by_rank = {}
        for rank in range(world_size):
            try:
                text = (self._directory / f"calls{rank}.stuck").read_text(encoding="ascii")
            except FileNotFoundError:
                continue
            if text:
                by_rank[rank] = int(text)
        return by_rank


def deadlocked(logs: Sequence[Sequence[Call]], waiting: Mapping[int, int]) -> dict[int, Call]:
    """
    The ranks that wait for each other forever, with the call of each that the others have not made.

    `waiting` are the ranks that wait for a collective, with the number of calls that they have made. A rank is among
    them if each of its unanswered calls is one that another of them has not made.
    """
    seen: dict[tuple[Channel, int], set[int]] = {}
    for rank, calls in enumerate(logs):
        for key, _ in numbered(calls):
            seen.setdefault(key, set()).add(rank)
    needs: dict[int, list[tuple[Call, set[int]]]] = {}
    for rank, number in waiting.items():
        open_calls = [
            (call, set(call.channel.members) - seen[key])
            for key, call in numbered(logs[rank])
            if set(call.channel.members) - seen[key]
        ]
        if open_calls and len(logs[rank]) == number:
            needs[rank] = open_calls
    while freed := [rank for rank, calls in needs.items() if any(not missing & needs.keys() for _, missing in calls)]:
        for rank in freed:
            del needs[rank]
    return {rank: calls[0][0] for rank, calls in sorted(needs.items())}


@dataclass(slots=True)
class Unanswered:
    """A collective that some ranks of its group have called and others have not."""

    call: Call
    callers: list[int]
    missing: list[int]


def logs_of(directory: Path, world_size: int) -> list[list[Call]]:
    """The calls of each rank, for the controller."""
    return [[issued.call for issued in log] for log in issued_logs(directory, world_size)]


def issued_logs(directory: Path, world_size: int) -> list[list[IssuedCall]]:
    """The calls of each rank, in the order of its device."""
    logs = []
    for rank in range(world_size):
        reader = CallReader(directory, rank)
        logs.append(reader.read())
        reader.close()
    return logs


def unanswered(logs: Sequence[Sequence[Call]]) -> list[Unanswered]:
    """The collectives that not all ranks of their group have called; the first ones of each calling rank."""
    seen: dict[tuple[Channel, int], dict[int, Call]] = {}
    for rank, calls in enumerate(logs):
        for key, call in numbered(calls):
            seen.setdefault(key, {})[rank] = call
    pending: dict[Hashable, Unanswered] = {}
    for calls in logs:
        for key, call in numbered(calls):
            callers = sorted(seen[key])
            missing = [member for member in call.channel.members if member not in seen[key] and member < len(logs)]
            if missing:
                pending.setdefault(key, Unanswered(seen[key][callers[0]], callers, missing))
                break  # what comes after it is a consequence
    return list(pending.values())


def numbered(calls: Sequence[Call]) -> Iterator[tuple[tuple[Channel, int], Call]]:
    """Each call with its channel and its number in the channel, which identify the collective on all ranks."""
    counts: dict[Channel, int] = {}
    for call in calls:
        number = counts.get(call.channel, 0)
        counts[call.channel] = number + 1
        yield (call.channel, number), call


def call_from_json(data: Mapping[str, Any]) -> Call:
    """The inverse of `dataclasses.asdict` on a Call."""
    fields = dict(data)
    channel = dict(fields.pop("channel"))
    place = fields.pop("place")
    pair = channel.pop("pair")
    others: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    return Call(
        channel=Channel(
            group=channel["group"],
            ranks=tuple(channel["ranks"]),
            device=channel["device"],
            pair=(pair[0], pair[1]) if pair else None,
        ),
        place=Frame(**place) if place else None,
        **others,
    )


def has_begun(directory: Path, rank: int) -> bool:
    """True if a rank with that number keeps, or has kept, its calls in the directory."""
    return any(path.exists() for path in _paths(directory, rank))


def _paths(directory: Path, rank: int) -> tuple[Path, Path]:
    return directory / f"calls{rank}.jsonl", directory / f"calls{rank}.bin"


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
