"""Tests for the file of findings that are not reported: what a line may be, and what it matches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.simulator.checker.hazard import Access, Hazard, HazardKind, Site, Stream
from fsdp_conformance.simulator.collectives.disagreement import Disagreement, DisagreementKind, Party
from fsdp_conformance.simulator.frames import Frame
from fsdp_conformance.simulator.suppressions import NO_SUPPRESSIONS, Suppressed, Suppressions

STREAM = Stream(device=0, number=0, name="default stream")


def site(*stack: tuple[str, str]) -> Site:
    """A site with the file and function of each frame."""
    return Site(op="op", stack=tuple(Frame(file=file, line=1, function=function) for file, function in stack))


def access(*stack: tuple[str, str]) -> Access:
    """An access from there."""
    return Access(kind="read", stream=STREAM, offset=0, run=4, repeats=(), allocation=1, site=site(*stack))


#: A race between two lines, with a frame of a library and one of an allocation.
HAZARD = Hazard(
    kind=HazardKind.READ_AFTER_WRITE,
    then=access(("/lib/site-packages/fast/copy.py", "copy_ahead"), ("/srv/me/project/train.py", "<module>")),
    now=access(("/srv/me/project/model/layers.py", "forward"), ("/srv/me/project/train.py", "<module>")),
    device=0,
    pinned=False,
    block=1,
    nbytes=4,
    allocated=site(("/srv/me/project/buffers.py", "make")),
    freed=None,
    tenant_stream=STREAM,
    then_block=1,
    then_nbytes=4,
    count=1,
)


def read(tmp_path: Path, *lines: str) -> Suppressions:
    """The suppressions of a file with these lines."""
    file = tmp_path / "known.supp"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return Suppressions.read(file)


@pytest.mark.parametrize(
    "line",
    [
        "read_after_write:copy_ahead",
        "race:forward",
        "race:copy_*",
        "race:[cf]o*",
        "race:layers.py",
        "race:model/layers.py",
        "race:/srv/me/project/model/layers.py",
        "race:fast/*",
        "race:*/fast/*",
        "race:make",
        "race:<module>",
        "any:*",
        "  race : forward   # with a reason",
    ],
)
def test_a_line_matches_any_frame(line: str, tmp_path: Path) -> None:
    """By its function, or by its file from any directory on."""
    assert read(tmp_path, "# a comment", "", line).of_hazard(HAZARD) == (3,)


@pytest.mark.parametrize(
    "line",
    [
        "write_after_read:forward",
        "uninitialized_read:forward",
        "collectives:forward",
        "race:Forward",
        "race:forw",
        "race:ayers.py",
        "race:layers",
        "race:model",
        "race:srv/model/*",
        "race:op",
    ],
)
def test_a_line_matches_nothing_else(line: str, tmp_path: Path) -> None:
    """Another kind, another case, a part of a name, an operation."""
    assert read(tmp_path, line).of_hazard(HAZARD) == ()


def test_uninitialized_memory_is_no_race(tmp_path: Path) -> None:
    """It has its own kind, and belongs to `any`."""
    hazard = replace(HAZARD, kind=HazardKind.UNINITIALIZED_READ)
    assert read(tmp_path, "race:*", "any:*", "uninitialized_read:make").of_hazard(hazard) == (2, 3)


def test_findings_about_collectives(tmp_path: Path) -> None:
    """They have one frame for each rank, or none."""
    call = Party(rank=0, words="barrier()", place=Frame(file="/x/train.py", line=3, function="save"))
    one = Disagreement.between(DisagreementKind.MISSING, [call, Party(rank=1, words="", place=None)], "")
    lines = ["missing_collective:save", "collectives:train.py", "any:*", "race:*", "deadlock:save", "any:main"]

    assert read(tmp_path, *lines).of_disagreement(one) == (1, 2, 3)


def test_a_finding_without_a_stack_is_matched_by_a_star(tmp_path: Path) -> None:
    """Nothing else could match it."""
    bare = replace(HAZARD, then=access(), now=access(), allocated=None)
    assert read(tmp_path, "race:*", "race:**", "race:?*").of_hazard(bare) == (1,)


def test_every_bad_line_is_reported_at_once(tmp_path: Path) -> None:
    """With its number, and what it should be."""
    with pytest.raises(ConfigError) as error:
        read(tmp_path, "race:forward", "forward", "race:", ":forward", "races:forward", "race:a:b", "# fine", "race")
    assert [problem.split(" must be")[0] for problem in error.value.problems] == [
        "line 2", "line 3", "line 4: the kind", "line 5: the kind", "line 8",
    ]  # fmt: skip
    assert "must be KIND:PATTERN, such as race:load_batch, got 'forward'" in error.value.problems[0]
    assert "one of race, collectives, any, both_send_first" in error.value.problems[2]
    assert "known.supp" in str(error.value)


@pytest.mark.parametrize("content", [None, b"race:\xff\xfe\n"], ids=["absent", "not UTF-8"])
def test_a_file_that_cannot_be_read(content: bytes | None, tmp_path: Path) -> None:
    """A directory cannot, either."""
    file = tmp_path / "known.supp"
    if content is not None:
        file.write_bytes(content)
    for place in (file, tmp_path):
        with pytest.raises(ConfigError, match="the file of suppressions cannot be read: "):
            Suppressions.read(place)


def test_lines_that_match_nothing(tmp_path: Path) -> None:
    """A line that matches only what another one matches, too, has matched."""
    known = read(tmp_path, "race:old", "race:forward", "race:layers.py", "deadlock:*")
    one = Suppressed("a race", known.of_hazard(HAZARD))
    places: Sequence[str] = known.unmatched([one])

    assert [place.rpartition("/")[2] for place in places] == ["known.supp:1 race:old", "known.supp:4 deadlock:*"]
    assert known.words(one).endswith("known.supp:3 race:layers.py]")
    assert NO_SUPPRESSIONS.unmatched([]) == []
