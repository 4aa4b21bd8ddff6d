"""
Stored verdicts over time.

Each commit that changes ci/verdicts has the verdicts of one more run of some engine, so git is the archive. Two runs
are compared on the cases that both have and that ask for the same; all else that differs is new or changed cases.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from known_findings import VERSIONS, known_findings
from packaging.specifiers import SpecifierSet

from fsdp_conformance.errors import UsageError
from fsdp_conformance.report.expectations import Expectation
from fsdp_conformance.report.tally import Tally, tally_from_json
from fsdp_conformance.verdict import ACCUSING, Verdict
from pages import scoreboard
from pages.blocks import ROOT
from pages.failures import script_in

#: The versions of torch that docs/continuous-integration.md has results of.
TORCH = ("2.6", "2.8", "2.10", "2.11", "2.12", "2.13", "2.14", "2.15")


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A case with another verdict than in the run before."""

    case: str
    before: Verdict
    after: Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """A stored run, next to the one before it."""

    tally: Tally
    changes: tuple[Change, ...]
    compared: int
    """How many cases both runs have; 0 for the first."""

    @property
    def counts(self) -> Counter[str]:
        """Cases by what they show."""
        return Counter(_word(shown.verdict) for shown in self.tally.cases.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class OldDefect:
    """A defect of some versions of torch, on one engine."""

    engine: str
    reason: str
    script: str
    url: str
    versions: str
    has: tuple[bool, ...]
    """For each of TORCH."""


def timelines() -> dict[str, list[Stored]]:
    """Each engine's stored runs, oldest first; where git has no history, only today's."""
    return {engine.name: compared(_former(engine)) for engine in scoreboard.kept()}


def is_complete() -> bool:
    """True if git has every commit of the checkout, False in a shallow clone and outside of a repository."""
    return _git("rev-parse", "--is-shallow-repository").strip() == "false"


def _former(engine: Tally) -> list[Tally]:
    """The states of an engine's file, oldest first, each run once; those in an older layout are left out."""
    path = f"ci/verdicts/{engine.name}.json"
    texts = [_git("show", f"{commit}:{path}") for commit in _git("log", "--reverse", "--format=%H", "--", path).split()]
    states: dict[tuple[str, ...], Tally] = {}
    for text in texts:
        try:
            state = tally_from_json(text, where=path)
        except UsageError:
            continue
        states[_key(state)] = state
    # Today's file may not be committed yet.
    states.pop(_key(engine), None)
    return [*states.values(), engine]


def _key(tally: Tally) -> tuple[str, ...]:
    return (tally.version, tally.torch, tally.suite, tally.adapter, tally.date)


def _git(*words: str) -> str:
    return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=False).stdout


def compared(states: Sequence[Tally]) -> list[Stored]:
    """Runs of one engine, oldest first, each next to the one before it."""
    return [
        Stored(tally=now, changes=tuple(_changes(before, now)), compared=len(_common(before, now)) if before else 0)
        for before, now in zip([None, *states], states, strict=False)
    ]


def _common(before: Tally, now: Tally) -> list[str]:
    return [
        case for case, shown in now.cases.items() if case in before.cases and before.cases[case].digest == shown.digest
    ]


def _changes(before: Tally | None, now: Tally) -> list[Change]:
    pairs = {case: (before.cases[case], now.cases[case]) for case in _common(before, now)} if before else {}
    return [
        Change(case=case, before=old.verdict, after=new.verdict)
        for case, (old, new) in pairs.items()
        if old.verdict is not new.verdict
    ]


def _word(verdict: Verdict) -> str:
    if verdict is Verdict.PASS:
        return "passed"
    if verdict in ACCUSING | {Verdict.XFAIL}:
        return "failed"
    return "declined" if verdict is Verdict.UNSUPPORTED else "not judged"


def defects_by_torch() -> list[OldDefect]:
    """The known defects that not all versions of torch have, each once for an engine."""
    entries: dict[tuple[str, str, str], Expectation] = {}
    for entry in (*known_findings(VERSIONS), *known_findings()):
        if entry.torch:
            entries.setdefault((entry.implementation, entry.reason, entry.torch), entry)
    return [
        OldDefect(
            engine=entry.implementation,
            reason=script_in(entry.reason)[0],
            script=script_in(entry.reason)[1],
            url=entry.url,
            versions=entry.torch,
            has=tuple(SpecifierSet(entry.torch).contains(f"{version}.1") for version in TORCH),
        )
        for entry in entries.values()
    ]
