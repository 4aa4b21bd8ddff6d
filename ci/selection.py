"""
The cases that ci/test certifies, as options of ci/certify. ci/nightly runs every case of the profile.

    python ci/selection.py IMPLEMENTATION...

Of every case at several world sizes: the smallest one of at least two ranks. Of every test method, unless the reference
engine is the only implementation: the case with the fewest capabilities, which most engines declare. And every case
that ci/known-findings.toml lists for one of the implementations.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from fnmatch import fnmatchcase

import known_findings

from fsdp_conformance.config import RunSettings
from fsdp_conformance.contract.profile import Entry, load_profile

#: Changes with this project, not with torch, and is therefore run with every value of every axis.
OURS = ("reference",)


def without_world_size(entry: Entry) -> Hashable:
    """The same for cases that differ in the number of ranks alone."""
    return entry.id.rpartition("-ws")[0] or entry.id


def method(entry: Entry) -> Hashable:
    """The same for cases of one test method: all its values of its axes share the first line of its docstring."""
    return entry.primary, entry.title


def smallest(entries: Iterable[Entry], group: Callable[[Entry], Hashable]) -> list[Entry]:
    """One entry of each group: the one that asks for the least."""
    chosen: dict[Hashable, Entry] = {}
    for entry in sorted(
        entries, key=lambda entry: (len(entry.needs), entry.world_size < 2, entry.world_size, entry.id)
    ):
        chosen.setdefault(group(entry), entry)
    return list(chosen.values())


def selected(implementations: Sequence[str], entries: Sequence[Entry]) -> list[str]:
    """The ids of the cases, in order."""
    known = {
        finding.case
        for finding in known_findings.known_findings()
        if any(fnmatchcase(name, finding.implementation) for name in implementations)
    }
    group = without_world_size if tuple(implementations) == OURS else method
    return sorted({entry.id for entry in smallest(entries, group)} | known & {entry.id for entry in entries})


def main(implementations: Sequence[str]) -> int:
    """Print the options."""
    for case in selected(implementations, load_profile(RunSettings().profile).entries):
        print("--case", case)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
