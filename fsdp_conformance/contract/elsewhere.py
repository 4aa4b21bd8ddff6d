"""
Where a case is that the chosen profile does not have: in another profile, or in the suites alone.

Only for messages about a selection that finds nothing.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from fsdp_conformance.contract.case import Case
from fsdp_conformance.contract.profile import (
    COMPONENT_CHAPTERS,
    COMPONENTS,
    CORE,
    SUITES,
    Profile,
    collect_cases,
    load_profile,
    newest,
)
from fsdp_conformance.errors import ConformanceError, SuiteError

#: What makes the middle of a case's id: the name of its method, or the word that stands for it.
_STEM = re.compile(r'def test_(\w+)\(|\bslug="([\w.-]+)"')

#: From here on, a pattern may match more than it says.
_OPEN = re.compile(r"[*?\[]")


def profiles_with(matches: Callable[[Case], bool], *, besides: Profile) -> list[str]:
    """The names of the newest profiles with a case that matches, the smallest first; without `besides` itself."""
    return [
        name
        for name in newest()
        if name != besides.name and any(matches(entry.case()) for entry in load_profile(name).entries)
    ]


def profile_for_unlisted(pattern: str, matches: Callable[[Case], bool], *, suites: str = SUITES) -> str:
    """
    The profile to write if a case that matches the pattern is in the suites and in no profile; "" if none is.

    Importing the suites takes seconds, so they are read first: most patterns that match nothing are just mistyped.
    Raises SuiteError for suites that cannot be imported.
    """
    if not _may_be_id(pattern, _stems(suites)):
        return ""
    try:
        cases = collect_cases(suites)
    except ConformanceError:
        raise
    except Exception as error:  # a case that is being written may raise anything
        raise SuiteError(f"{suites}, which may have case {pattern}, cannot be imported: {error}") from error
    case = next(filter(matches, cases), None)
    if case is None:
        return ""
    kind = COMPONENTS if case.chapter in COMPONENT_CHAPTERS else CORE
    return next(name for name in newest() if name.startswith(kind))


def _stems(suites: str) -> set[str]:
    """The middles of the ids of all cases, as the source text has them."""
    spec = importlib.util.find_spec(suites)
    places: Iterable[str] = (spec and spec.submodule_search_locations) or ()
    texts = (file.read_text(encoding="utf-8") for place in places for file in sorted(Path(place).glob("*.py")))
    return {(method or slug).replace("_", "-") for text in texts for method, slug in _STEM.findall(text)}


def _may_be_id(pattern: str, stems: Iterable[str]) -> bool:
    """True if the pattern could be that of an id with one of these in the middle."""
    middle = pattern.partition("/")[2]
    match = _OPEN.search(middle)
    fixed = middle[: match.start()] if match else middle
    return any(fixed.startswith(stem) or (match is not None and stem.startswith(fixed)) for stem in stems)
