"""Suggestions for a mistyped word: a number, a beginning, a part, a spelling, in this order."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_conformance.suggestions import as_id, near, near_file

CASES = ("R003/every-rank-ws2", "R003/every-rank-ws4", "R007/same-on-every-rank-ws2", "R030/x-ws2")
REQUIREMENTS = ("R003", "R030", "R103")


@pytest.mark.parametrize(
    ("word", "choices", "expected"),
    [
        ("3", REQUIREMENTS, ["R003"]),
        ("r03", REQUIREMENTS, ["R003", "R030"]),
        ("R03", REQUIREMENTS, ["R003", "R030", "R103"]),
        ("R003/every", CASES, ["R003/every-rank-ws2", "R003/every-rank-ws4"]),
        ("every-rank", CASES, ["R003/every-rank-ws2", "R003/every-rank-ws4", "R007/same-on-every-rank-ws2"]),
        ("R030/y-ws2", CASES, ["R030/x-ws2"]),
        ("off", ("ofload", "offload", "offset"), ["offset", "offload"]),
        ("", REQUIREMENTS, []),
        ("zzz", REQUIREMENTS, []),
    ],
)
def test_the_likeliest_come_first(word: str, choices: tuple[str, ...], expected: list[str]) -> None:
    """Only what is among the choices."""
    assert near(word, choices)[: len(expected)] == expected
    assert set(near(word, choices)) <= set(choices)
    assert bool(near(word, choices)) is bool(expected)


def test_no_more_than_asked_for() -> None:
    """Three, unless another number is asked for."""
    many = [f"case{number}" for number in range(9)]

    assert len(near("case", many)) == 3
    assert near("case", many, count=1) == ["case0"]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("r003", "R003"), ("r003/probe-ws2", "R003/probe-ws2"), ("R003", "R003"), ("r03", "r03"), ("r0031", "r0031")],
)
def test_an_id_may_begin_with_a_small_letter(typed: str, meant: str) -> None:
    """Only what has the form of an id is changed."""
    assert as_id(typed) == meant


def test_a_script_that_is_not_there_has_a_neighbour(tmp_path: Path) -> None:
    """Scripts only, and none in a directory that does not exist."""
    for name in ("train.py", "trian.txt", "evaluate.py"):
        (tmp_path / name).touch()

    assert near_file(str(tmp_path / "trian.py")) == str(tmp_path / "train.py")
    assert near_file(str(tmp_path / "x" / "train.py")) == ""
    assert near_file(str(tmp_path / "zzzz.py")) == ""
