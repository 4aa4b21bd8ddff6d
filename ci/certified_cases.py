"""
The cases that ci/test certifies, as options of ci/certify. ci/nightly runs every case of the profile.

    python ci/certified_cases.py [--quick] IMPLEMENTATION

One case of each chapter of the profile; with --quick, for slower engines, of the profile `quick`; for an adapter in
ci/components.py, of the profile of components.

The case of a chapter is the one with the fewest capabilities, which most engines declare, at the smallest world size of
at least two ranks.

Cases that ci/known-findings.toml lists for the implementation are added, if they are among those to choose from and no
rows of pairs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import components
import known_findings

from fsdp_conformance.contract.profile import Entry, load_profile
from fsdp_conformance.contract.requirement import load
from fsdp_conformance.run_settings import RunSettings

QUICK = "quick-2026.11"


def smallest(entries: Iterable[Entry]) -> list[Entry]:
    """One entry of each chapter, the one that asks for the least."""
    chosen: dict[str, Entry] = {}
    for entry in sorted(
        entries, key=lambda entry: (len(entry.needs), entry.world_size < 2, entry.world_size, entry.id)
    ):
        chosen.setdefault(load()[entry.primary].chapter, entry)
    return list(chosen.values())


def selected(implementation: str, *, quick: bool = False) -> list[str]:
    """The ids of the cases, in order."""
    if implementation in components.ADAPTERS:
        profile = components.PROFILE
    else:
        profile = QUICK if quick else RunSettings().profile
    entries = load_profile(profile).entries
    listed = {
        finding.case
        for finding in known_findings.known_findings()
        if fnmatchcase(implementation, finding.implementation)
    }
    return sorted({entry.id for entry in smallest(entries)} | listed & {entry.id for entry in entries})


def main(words: Sequence[str]) -> int:
    """Print the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one case of each chapter of the profile quick")
    parser.add_argument("implementation", metavar="IMPLEMENTATION")
    options = parser.parse_args(words)
    print(*components.profile_options(options.implementation))
    for case in selected(options.implementation, quick=options.quick):
        print("--case", case)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
