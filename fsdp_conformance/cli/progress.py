"""The progress of a run: counted from the run file as it grows, shown on a terminal or as lines of a log."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from fsdp_conformance import contract
from fsdp_conformance.contract.case import Case
from fsdp_conformance.report.terminal import duration
from fsdp_conformance.verdict import Verdict

#: Seconds between two signs of life if stdout is not a terminal.
HEARTBEAT_S = 30.0

#: The time left is estimated once this many cases have run.
_ENOUGH = 3


class RunFileTail:
    """The lines that were added to a run file since the last look; an incomplete line waits for its rest."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._rest = b""

    def lines(self) -> list[dict[str, Any]]:
        """New lines, decoded. Unreadable ones are skipped: `verify` reports them."""
        if self._file is None:
            try:
                self._file = self._path.open("rb")
            except FileNotFoundError:
                return []
        *whole, self._rest = (self._rest + self._file.read()).split(b"\n")
        decoded = []
        for line in whole:
            try:
                decoded.append(json.loads(line))
            except ValueError:
                continue
        return decoded

    def close(self) -> None:
        """Stop reading."""
        if self._file is not None:
            self._file.close()


@dataclass(slots=True)
class Chapter:
    """The cases of one chapter, a line of the display."""

    letter: str
    title: str
    total: int
    world_sizes: tuple[int, ...]
    counts: Counter[Verdict] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def done(self) -> int:
        """Cases with a verdict."""
        return self.counts.total()

    def words(self) -> str:
        """ "22 PASS · 2 FAIL", best first."""
        return " · ".join(f"{self.counts[verdict]} {verdict}" for verdict in Verdict if self.counts[verdict])


@dataclass(frozen=True, slots=True)
class Running:
    """A case that has started and has no verdict yet."""

    case: str
    world_size: int
    since: float


class Progress:
    """The cases that are finished, that run, and that are left."""

    def __init__(self, cases: Sequence[Case], expected: Mapping[str, float], clock: Any = time.monotonic) -> None:
        """`expected`: the seconds that each case will take, by id, of those that will run."""
        self._clock = clock
        self._began = clock()
        self._chapter_of = {case.id: case.chapter for case in cases}
        self._expected = dict(expected)
        self._to_run = set(expected)
        self.seconds: dict[str, float] = {}
        """The seconds of each case that has run, by id."""
        self._first_start: float | None = None
        self.running: dict[str, Running] = {}
        self.done: set[str] = set()
        order = list(contract.CHAPTERS)
        letters = sorted(set(self._chapter_of.values()), key=order.index)
        self.chapters = {
            letter: Chapter(
                letter=letter,
                title=contract.CHAPTERS[letter],
                total=sum(case.chapter == letter for case in cases),
                world_sizes=tuple(sorted({case.world_size for case in cases if case.chapter == letter})),
            )
            for letter in letters
        }

    @property
    def total(self) -> int:
        """Number of selected cases."""
        return len(self._chapter_of)

    @property
    def elapsed_s(self) -> float:
        """Since the run started."""
        return float(self._clock() - self._began)

    def take(self, line: dict[str, Any]) -> Chapter | None:
        """Count a line of the run file. Returns the chapter if it is the verdict on a selected case."""
        case = line.get("case")
        # Cases that --world-size leaves out are in the file, too, as DISABLED.
        if case not in self._chapter_of or case in self.done:
            return None
        if line.get("type") == "start":
            now = self._clock()
            self._first_start = self._first_start or now
            self.running[case] = Running(case, int(line.get("world_size", 0)), now)
        if line.get("type") != "case":
            return None
        self.running.pop(case, None)
        self.done.add(case)
        chapter = self.chapters[self._chapter_of[case]]
        chapter.counts[Verdict(line["verdict"])] += 1
        chapter.seconds += float(line.get("seconds", 0.0))
        if case in self._to_run:
            self._to_run.discard(case)
            self.seconds[case] = float(line.get("seconds", 0.0))
        return chapter

    def left_s(self) -> float | None:
        """
        Seconds until the end, if this machine is as fast as in the cases that have run, compared with what they should
        have taken; None if too few cases have run to tell.
        """
        expected = sum(map(self._expected.__getitem__, self.seconds))
        if len(self.seconds) < _ENOUGH or self._first_start is None or not expected:
            return None
        # Wall-clock time, not the cases' own seconds, so that it holds for any number of workers.
        pace = float(self._clock() - self._first_start) / expected
        return pace * sum(map(self._expected.__getitem__, self._to_run))

    def slowest(self) -> str:
        """ "R003/x has run for 40 s", of the case that has run longest; empty if that is not long."""
        running = min(self.running.values(), key=lambda each: each.since, default=None)
        if running is None or self._clock() - running.since < HEARTBEAT_S:
            return ""
        # It may be a failing scenario that is being shrunk.
        return f"{running.case} has run for {duration(self._clock() - running.since)}"

    def words(self) -> str:
        """Everything in one line."""
        counted: Counter[Verdict] = Counter()
        for chapter in self.chapters.values():
            counted.update(chapter.counts)
        parts = [f"{len(self.done)}/{self.total} cases"]
        parts += [f"{counted[verdict]} {verdict}" for verdict in Verdict if counted[verdict]]
        parts.append(duration(self.elapsed_s))
        left = self.left_s()
        if left is not None and self._to_run:
            parts.append(f"about {duration(left)} left")
        return " · ".join(parts)


class Display(Protocol):
    """Shows the progress."""

    def __enter__(self) -> Display: ...

    def __exit__(self, *exc: object) -> None: ...

    def took(self, line: dict[str, Any], chapter: Chapter | None) -> None:
        """A line of the run file has come in."""

    def tick(self) -> None:
        """Some time has passed."""

    def say(self, text: str) -> None:
        """Print a line next to the progress."""


class PlainDisplay(AbstractContextManager["PlainDisplay"]):
    """Lines for a log: failures, finished chapters, and a sign of life now and then."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._spoke = time.monotonic()

    def __exit__(self, *exc: object) -> None:
        for chapter in self._progress.chapters.values():
            if 0 < chapter.done < chapter.total:
                self.say(_chapter_line(chapter))

    def took(self, line: dict[str, Any], chapter: Chapter | None) -> None:
        if chapter is None:
            return
        if Verdict(line["verdict"]) in ALARMING:
            self.say(f"     {line['verdict']}  {line['case']}: {line.get('reason', '')}")
        if chapter.done == chapter.total:
            self.say(_chapter_line(chapter))

    def tick(self) -> None:
        if time.monotonic() - self._spoke >= HEARTBEAT_S:
            slowest = self._progress.slowest()
            self.say(f"     ... {self._progress.words()}{slowest and f' · {slowest}'}")

    def say(self, text: str) -> None:
        print(text, flush=True)
        self._spoke = time.monotonic()


class LiveDisplay(AbstractContextManager["LiveDisplay"]):
    """A table that is redrawn in place: a row for each chapter, and the running cases."""

    def __init__(self, progress: Progress) -> None:
        from rich.console import Console
        from rich.live import Live

        self._progress = progress
        self._console = Console()
        self._live = Live(console=self._console, get_renderable=self._table, refresh_per_second=5, transient=True)

    def __enter__(self) -> LiveDisplay:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()
        self._console.print(self._table())

    def took(self, line: dict[str, Any], chapter: Chapter | None) -> None:
        if chapter is not None and Verdict(line["verdict"]) in ALARMING:
            self._print(f"{line['verdict']}  {line['case']}: {line.get('reason', '')}", style="red")

    def tick(self) -> None:
        """Rich redraws the table in a thread."""

    def say(self, text: str) -> None:
        self._print(text, highlight=False)

    def _print(self, text: str, **options: Any) -> None:
        # The terminal itself breaks a long line, and copies it as one: paths and ids stay whole.
        self._console.print(text, markup=False, soft_wrap=True, **options)

    def _table(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, show_header=False)
        for chapter in list(self._progress.chapters.values()):
            table.add_row(
                chapter.letter,
                Text(chapter.title, overflow="ellipsis", no_wrap=True),
                ProgressBar(total=chapter.total, completed=chapter.done, width=12),
                f"{chapter.done}/{chapter.total}",
                Text.assemble(*_colored(chapter)),
                Text(_ranks(chapter), style="dim"),
            )
        lines = [Text(self._progress.words())]
        for running in list(self._progress.running.values())[:8]:
            age = duration(time.monotonic() - running.since)
            lines.append(Text(f"  {running.case} · {running.world_size} ranks · {age}", style="dim"))
        return Group(table, *lines)


#: Verdicts that are reported immediately.
ALARMING = frozenset(
    {
        Verdict.FAIL,
        Verdict.HANG,
        Verdict.CRASH,
        Verdict.ERROR_ADAPTER,
        Verdict.ERROR_SUITE,
        Verdict.XPASS,
        Verdict.INCONCLUSIVE,
    }
)


def display_for(progress: Progress) -> Display:
    """Live on a terminal, lines elsewhere."""
    return LiveDisplay(progress) if sys.stdout.isatty() else PlainDisplay(progress)


def _colored(chapter: Chapter) -> list[tuple[str, str]]:
    parts = []
    for verdict in Verdict:
        if chapter.counts[verdict]:
            style = "green" if verdict is Verdict.PASS else "red" if verdict in ALARMING else "yellow"
            parts.append((f"{chapter.counts[verdict]} {verdict}  ", style))
    return parts


def _ranks(chapter: Chapter) -> str:
    return "ranks " + ", ".join(map(str, chapter.world_sizes))


def _chapter_line(chapter: Chapter) -> str:
    return (
        f"{chapter.letter:<3}{chapter.title:<48.48} {chapter.done:>3}/{chapter.total:<3} "
        f"{_ranks(chapter):<16} {duration(chapter.seconds):>10}  {chapter.words()}"
    )
