"""The words that someone has probably meant who typed another one. Standard library only."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path

#: A requirement as people shorten it: 3, R3, r03.
_NUMBER = re.compile(r"[Rr]?0*(\d{1,3})")

#: A part of a word says something from this length on.
_TELLING = 3


#: The requirement at the beginning of an id, in small letters.
_SMALL = re.compile(r"^r(?=\d{3}(/|$))")


def is_id(word: str) -> bool:
    """True for the form of a requirement's or a case's id, also with a small letter."""
    return re.fullmatch(r"R\d{3}(/[a-z0-9.-]+)?", as_id(word)) is not None


def as_id(word: str) -> str:
    """The id of a requirement or a case, which begins with a capital letter, however it was typed."""
    return _SMALL.sub("R", word)


def near(word: str, choices: Iterable[str], *, count: int = 3, cutoff: float = 0.5) -> list[str]:
    """
    At most `count` of the choices, the likeliest first: the requirement with that number, what begins with the word,
    what has it in the middle, what is spelled like it. `cutoff` is `difflib`'s, from 0 for anything to 1 for equal.
    """
    ordered = sorted(set(choices))
    typed = word.lower()
    number = _NUMBER.fullmatch(word)
    likely = [f"R{int(number[1]):03}"] if number else []
    if typed:
        likely += sorted((each for each in ordered if each.lower().startswith(typed)), key=len)
    if len(typed) >= _TELLING:
        likely += [each for each in ordered if typed in each.lower()]
    likely += difflib.get_close_matches(word, ordered, n=count, cutoff=cutoff)
    return [each for each in dict.fromkeys(likely) if each in ordered][:count]


def near_file(path: str, suffix: str = ".py") -> str:
    """The existing file that someone has probably meant who typed this path; "" if nothing is similar."""
    directory = Path(path).parent
    try:
        names = [each.name for each in directory.iterdir() if each.suffix == suffix and each.is_file()]
    except OSError:
        return ""
    close = difflib.get_close_matches(Path(path).name, names, n=1)
    return str(directory / close[0]) if close else ""
