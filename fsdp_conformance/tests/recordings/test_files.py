"""Recordings from outside: whatever is in a file, the answer is a sentence, and no part of it is followed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.recordings import files
from fsdp_conformance.recordings.events import FORMAT, Begin, End, Mark
from fsdp_conformance.recordings.fingerprint import SKETCH, Fingerprint, encoded


def begin(**changes: Any) -> Begin:
    fields: dict[str, Any] = {
        "format": FORMAT, "rank": 0, "world_size": 1, "pid": 7, "torch": "2.13.0", "command": ("train.py",),
        "sharding": "kept", "nudge": 0.0,
    }  # fmt: skip
    return Begin(**(fields | changes))


def write(directory: Path, *ranks: Begin, end: bool = True) -> Path:
    for rank in ranks:
        text = files.line_of(rank) + files.line_of(Mark(step=0, kind="note", line="train.py:1"))
        path = directory / files.file_name(rank.rank, rank.pid)
        path.write_text(text + (files.line_of(End()) if end else ""), encoding="utf-8")
    return directory


def problems(directory: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        files.read(directory)
    return "\n".join(refused.value.problems)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    ranks = [begin(rank=rank, world_size=2, pid=10 + rank) for rank in (1, 0)]

    recording = files.read(write(tmp_path, *ranks))

    assert [rank.begin.rank for rank in recording.ranks] == [0, 1]
    assert all(rank.end == End() for rank in recording.ranks)


def test_a_killed_process_loses_its_last_line_at_most(tmp_path: Path) -> None:
    write(tmp_path, begin(), end=False)
    path = next(tmp_path.iterdir())
    path.write_bytes(path.read_bytes() + b'{"event": "end", "err')

    rank = files.read(tmp_path).ranks[0]

    assert rank.end is None
    assert len(rank.events) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace('"format":2', '"format":1'), "its format must be 2, got 1"),
        (lambda text: text.replace('"mark"', '"other"'), "line 2 has an event that does not belong there"),
        (lambda text: text + text, "line 4 has an event that does not belong there"),
        (lambda text: text.replace('"step":0', '"step":"zero"'), "line 2: "),
        (lambda text: text.replace('"step":0', '"step":0,"path":"/etc/passwd"'), "unknown key `$.path`"),
        (lambda text: text.replace('"step":0', '"step":0,"step":1'), "duplicate key 'step'"),
        (lambda text: text.replace('"step":0', '"step":NaN'), "line 2: "),
        (lambda text: "[" * 200_000 + "\n" + text, "line 1: it is nested too deeply"),
        (lambda text: "7\n" + text, "line 1 must be an object"),
        (lambda text: "", "it is empty"),
    ],
)
def test_an_edited_file_is_refused(tmp_path: Path, change: Callable[[str], str], message: str) -> None:
    path = next(write(tmp_path, begin()).iterdir())
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")

    assert message in problems(tmp_path)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rank-0.1.jsonl").write_bytes(b"\xff\xfe\n")

    assert "line 1: 'utf-8' codec" in problems(tmp_path)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([], "it has no recording: no process"),
        ([begin(world_size=3)], "ranks 1, 2 of 3 recorded nothing"),
        ([begin(), begin(pid=8)], "rank 0 has trained in two processes"),
        ([begin(world_size=2), begin(rank=1, world_size=3)], "one world size, got 2, 3"),
        ([begin(), begin(rank=4)], "ranks must be below the world size 1, got 4"),
    ],
)
def test_ranks_must_be_complete(tmp_path: Path, ranks: list[Begin], message: str) -> None:
    assert message in problems(write(tmp_path, *ranks))


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert problems(tmp_path / "none") == "there is no such directory"


def test_what_steers_a_terminal_is_shown(tmp_path: Path) -> None:
    recording = files.read(write(tmp_path, begin(command=("\x1b[2Jtrain.py",))))

    assert recording.ranks[0].begin.command == ("\\x1b[2Jtrain.py",)


@pytest.mark.parametrize("sketch", ["", "AAAA", "not base64!", encoded([float("nan")] * SKETCH)])
def test_a_sketch_must_have_its_numbers(sketch: str) -> None:
    fingerprint = Fingerprint(
        shape=(1,), dtype="float32", region="0+1", elements=1, hash="0" * 16, square=0.0, nonfinite=0,
        sketch=sketch,
    )  # fmt: skip

    with pytest.raises(ValueError, match=r"sketch|base64|padding"):
        fingerprint.numbers()


def test_lines_are_json(tmp_path: Path) -> None:
    path = next(write(tmp_path, begin()).iterdir())

    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == ["begin", "mark", "end"]
