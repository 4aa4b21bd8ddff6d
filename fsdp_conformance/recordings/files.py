"""
A recording: a directory with a file for each rank, which gets a line of JSON for each event.

A process that is killed loses at most the line that it was writing. Whatever the files say, they are data: nothing in
them names a path that is opened.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_conformance import codec
from fsdp_conformance.errors import ConfigError
from fsdp_conformance.recordings.events import FORMAT, KINDS, NAMES, Begin, End, Event, Mark
from fsdp_conformance.visible import visible_content

_NAME = re.compile(r"rank-(\d{1,6})\.(\d{1,12})\.jsonl")

#: Bytes that the line of an end has at most, unless an exception has a longer text.
_LONGEST_END = 1 << 14


def file_name(rank: int, pid: int) -> str:
    """The name of the file of a process."""
    return f"rank-{rank}.{pid}.jsonl"


def line_of(event: Event) -> str:
    """An event as a line of a file."""
    return codec.encode({"event": NAMES[type(event)], **codec.plain(event)}) + "\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRecording:
    """The events of one rank."""

    begin: Begin
    events: tuple[Event, ...]
    end: End | None
    """None if the process was killed, or still runs."""

    @property
    def error(self) -> str:
        """The reason why the rank ended; empty if it ended by itself, or has destroyed its process group before."""
        if self.end is not None:
            return self.end.error
        last = self.events[-1] if self.events else None
        return "" if isinstance(last, Mark) and last.kind == "left" else "it was killed, or still runs"


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """A recorded training run."""

    name: str
    """As the user gave it."""
    ranks: tuple[RankRecording, ...]
    """In the order of their numbers."""

    @property
    def world_size(self) -> int:
        """How many ranks trained."""
        return len(self.ranks)


def read(directory: Path) -> Recording:
    """
    The recording in a directory.

    Raises ConfigError with every problem: no recording, a file that was edited or written by another version, ranks
    that are missing or there twice.
    """
    where = str(directory)
    if not directory.is_dir():
        raise ConfigError(["there is no such directory"], where=where)
    problems: list[str] = []
    ranks: dict[int, RankRecording] = {}
    for path in sorted(directory.iterdir()):
        if not _NAME.fullmatch(path.name):
            continue
        try:
            rank = _read_rank(path)
        except (OSError, ValueError) as error:
            problems.append(f"{path.name}: {error}")
            continue
        if rank.begin.rank in ranks:
            problems.append(
                f"{path.name}: rank {rank.begin.rank} has trained in two processes; record one training run at a time"
            )
        ranks[rank.begin.rank] = rank
    if not ranks and not problems:
        problems.append(
            "it has no recording: no process with this environment called a module with parameters and then an "
            "optimizer of torch.optim"
        )
    elif not problems:
        sizes = {rank.begin.world_size for rank in ranks.values()}
        if len(sizes) > 1:
            problems.append(f"all ranks must have one world size, got {', '.join(map(str, sorted(sizes)))}")
        elif missing := set(range(max(sizes))) - ranks.keys():
            problems.append(f"{_ranks(missing)} of {max(sizes)} recorded nothing")
        elif ranks.keys() - set(range(max(sizes))):
            problems.append(f"ranks must be below the world size {max(sizes)}, got {max(ranks)}")
    if problems:
        raise ConfigError(problems, where=where)
    return Recording(name=where, ranks=tuple(ranks[number] for number in sorted(ranks)))


def has_ended(directory: Path, world_size: int) -> bool:
    """True if this many ranks have recorded all that they were asked for, or have destroyed their process groups."""
    paths = [path for path in directory.glob("rank-*") if _NAME.fullmatch(path.name)]
    return len(paths) == world_size and all(map(_ends, paths))


def _ends(path: Path) -> bool:
    """True if the last line of a file is complete, and is the end, or says that the rank has left."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LONGEST_END))
        *_, last, rest = b"\n", *file.read().split(b"\n")
    if rest or not last:
        return False
    try:
        content = codec.parsed(last.decode())
    except ValueError:
        return False
    if not isinstance(content, dict):
        return False
    return content.get("event") == NAMES[End] or (content.get("event"), content.get("kind")) == (NAMES[Mark], "left")


def _ranks(numbers: set[int]) -> str:
    words = ", ".join(map(str, sorted(numbers)))
    return f"rank{'s' * (len(numbers) > 1)} {words}"


def _read_rank(path: Path) -> RankRecording:
    """One file. A last line that was cut off is left out. Raises ValueError for anything else that is wrong."""
    events: list[Event] = []
    begin: Begin | None = None
    end: End | None = None
    for number, content in _lines(path):
        if begin is None and content.get("format") != FORMAT:
            raise ValueError(
                f"its format must be {FORMAT}, got {content.get('format')!r}: record it again with this version"
            )
        kind = KINDS.get(content.pop("event", ""))
        if kind is None or (kind is Begin) is (begin is not None) or end is not None:
            raise ValueError(f"line {number} has an event that does not belong there")
        try:
            event: Any = codec.typed(kind, visible_content(content))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
        if isinstance(event, Begin):
            begin = event
        elif isinstance(event, End):
            end = event
        else:
            events.append(event)
    if begin is None:
        raise ValueError("it is empty")
    return RankRecording(begin=begin, events=tuple(events), end=end)


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            content = codec.parsed(line.decode())
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
        if not isinstance(content, dict):
            raise ValueError(f"line {number} must be an object")
        yield number, content
