"""
The cases that ci/test certifies, as options of ci/certify. ci/nightly runs every case of the profile.

    python ci/selection.py IMPLEMENTATION...

Of every test method the case with the fewest capabilities, which most engines declare, at the smallest world size of at
least two ranks. For the reference engine alone also as many others as it takes to have every value of every axis of the
method, but not every combination of them. And every case that ci/known-findings.toml lists for one of the
implementations.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Sequence
from fnmatch import fnmatchcase

import known_findings

from fsdp_conformance.config import RunSettings
from fsdp_conformance.contract.profile import Entry, load_profile

#: Changes with this project, not with torch, and is therefore run with every value of every axis.
OURS = ("reference",)


def words(entry: Entry) -> frozenset[str]:
    """The words of a case's id without its world size; each value of an axis is made of such words."""
    return frozenset((entry.id.rpartition("-ws")[0] or entry.id).partition("/")[2].split("-"))


def method(entry: Entry) -> Hashable:
    """The same for cases of one test method: all its values of its axes share the first line of its docstring."""
    return entry.primary, entry.title


def smallest(entries: Iterable[Entry], *, every_value: bool = False) -> list[Entry]:
    """One entry of each method, the one that asks for the least; with `every_value` all that have a new word, too."""
    chosen: list[Entry] = []
    met: dict[Hashable, set[str]] = {}
    for entry in sorted(
        entries, key=lambda entry: (len(entry.needs), entry.world_size < 2, entry.world_size, entry.id)
    ):
        known = met.get(method(entry))
        if known is None or (every_value and not words(entry) <= known):
            chosen.append(entry)
            met.setdefault(method(entry), set()).update(words(entry))
    return chosen


def selected(implementations: Sequence[str], entries: Sequence[Entry]) -> list[str]:
    """The ids of the cases, in order."""
    known = {
        finding.case
        for finding in known_findings.known_findings()
        if any(fnmatchcase(name, finding.implementation) for name in implementations)
    }
    chosen = smallest(entries, every_value=tuple(implementations) == OURS)
    return sorted({entry.id for entry in chosen} | known & {entry.id for entry in entries})


def main(implementations: Sequence[str]) -> int:
    """Print the options."""
    for case in selected(implementations, load_profile(RunSettings().profile).entries):
        print("--case", case)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
