"""Progress is counted from the run file's lines, and by no other clock than the one that it is given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_conformance.cli.progress import LiveDisplay, PlainDisplay, Progress, RunFileTail
from fsdp_conformance.contract.case import Case


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def a_case(name: str, *, chapter: str = "A", world_size: int = 2) -> Case:
    """A case that is never run."""
    return Case(id=name, requirements=("R001",), chapter=chapter, world_size=world_size, title="It holds.")


def start(name: str) -> dict[str, Any]:
    """The line of a case that begins."""
    return {"type": "start", "case": name, "world_size": 2}


def verdict(name: str, what: str = "PASS", seconds: float = 1.0) -> dict[str, Any]:
    """The line of a case that was judged."""
    return {"type": "case", "case": name, "verdict": what, "seconds": seconds, "reason": "as told"}


CASES = [a_case("a"), a_case("b", world_size=4), a_case("c", chapter="B"), a_case("d", chapter="B"), a_case("e")]
EXPECTED = {case.id: 1.0 for case in CASES}


def test_half_a_line_waits_for_its_other_half(tmp_path: Path) -> None:
    """A line is read once, and when it is whole; what cannot be read is passed over."""
    path = tmp_path / "run.jsonl"
    tail = RunFileTail(path)

    assert tail.lines() == []
    path.write_text('{"a": 1}\n{"b"', encoding="utf-8")
    assert tail.lines() == [{"a": 1}]
    with path.open("a", encoding="utf-8") as file:
        file.write(": 2}\nno json\n" + json.dumps({"c": 3}) + "\n")
    assert tail.lines() == [{"b": 2}, {"c": 3}]
    assert tail.lines() == []
    tail.close()


def test_chapters_count_their_cases_by_verdict() -> None:
    """In the order of the contract, with the world sizes of their cases."""
    progress = Progress(CASES, EXPECTED)
    for line in (start("a"), verdict("a"), verdict("b", "FAIL"), verdict("c", "UNSUPPORTED")):
        progress.take(line)

    chapters = list(progress.chapters.values())
    assert [(chapter.letter, chapter.done, chapter.total, chapter.world_sizes) for chapter in chapters] == [
        ("A", 2, 3, (2, 4)),
        ("B", 1, 2, (2,)),
    ]
    assert chapters[0].words() == "1 PASS · 1 FAIL"
    assert progress.running == {}


def test_a_case_counts_once_and_only_if_it_was_asked_for() -> None:
    """Cases that were left out come by as DISABLED, and are not counted."""
    progress = Progress(CASES[:1], {"a": 1.0})

    assert progress.take(verdict("b", "DISABLED")) is None
    assert progress.take(start("b")) is None
    assert progress.take(verdict("a")) is not None
    assert progress.take(verdict("a", "FAIL")) is None
    assert progress.running == {}
    assert "1/1 cases" in progress.words()


def test_time_left_is_told_from_what_has_run() -> None:
    """
    Three cases took 30 s by the clock and two are left: 20 s.

    The cases' own seconds do not count, because several may run at a time; nor do cases that were never to be run.
    """
    clock = Clock()
    progress = Progress([*CASES, a_case("gated")], EXPECTED, clock)
    progress.take(verdict("gated", "UNSUPPORTED"))
    clock.now += 50.0  # until the first case begins
    progress.take(start("a"))
    assert progress.left_s() is None
    clock.now += 30.0
    for name in "abc":
        progress.take(verdict(name, seconds=25.0))

    assert progress.left_s() == 20.0
    assert progress.words() == "4/6 cases · 3 PASS · 1 UNSUPPORTED · 1 min 20 s · about 20 s left"


def test_a_slow_machine_is_slow_for_what_is_left_as_well() -> None:
    """Three cases that should have taken 6 s took 12 s, so the last two, of 20 s together, will take 40 s."""
    clock = Clock()
    progress = Progress(CASES, {"a": 1.0, "b": 2.0, "c": 3.0, "d": 5.0, "e": 15.0}, clock)
    progress.take(start("a"))
    clock.now += 12.0
    for name in "abc":
        progress.take(verdict(name))

    assert progress.left_s() == 40.0


def test_a_case_that_takes_long_is_named() -> None:
    """So that a hang, or a failing row whose causes are being looked for, can be told from a slow run."""
    clock = Clock()
    progress = Progress(CASES, EXPECTED, clock)
    progress.take(start("a"))
    clock.now += 25.0
    progress.take(start("b"))
    assert progress.slowest() == ""
    clock.now += 65.0

    assert progress.slowest() == "a has run for 1 min 30 s"
    progress.take(verdict("a"))
    assert progress.slowest() == "b has run for 1 min 05 s"
    progress.take(verdict("b"))
    assert progress.slowest() == ""


def test_lines_for_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    """A failure at once, a chapter when it is through or when the run ends; nothing for a pass."""
    progress = Progress(CASES, EXPECTED)
    with PlainDisplay(progress) as display:
        for line in (verdict("c"), verdict("a", "HANG"), verdict("d")):
            display.took(line, progress.take(line))
        display.tick()
    lines = capsys.readouterr().out.splitlines()

    assert [line.partition("   ")[0] if line[0] != " " else line.strip() for line in lines] == [
        "HANG  a: as told",
        "B  Init modes and device placement",
        "A  Numerical parity with DDP",
    ]
    assert "2/2 " in lines[1]
    assert "1/3 " in lines[2]


def test_a_narrow_terminal_gets_whole_paths_and_ids(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The terminal breaks lines itself, so that what is copied from it has no break."""
    monkeypatch.setenv("COLUMNS", "60")
    progress = Progress(CASES, EXPECTED)
    reason = "no such file: /data/my own runs/of today/" + "x" * 40 + "/checkpoint.pt"
    line = {**verdict("a", "FAIL"), "reason": reason}
    with LiveDisplay(progress) as display:
        display.took(line, progress.take(line))
        display.say(f"report: {reason}")
    printed = capsys.readouterr().out

    assert f"FAIL  a: {reason}\n" in printed
    assert f"report: {reason}\n" in printed
