"""The choices that someone who typed a wrong word has probably meant. Standard library only."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

#: A requirement as people shorten it: 3, R3, r03.
_NUMBER = re.compile(r"[Rr]?0*(\d{1,3})")

#: A part of a word says something from this length on.
_TELLING = 3


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
