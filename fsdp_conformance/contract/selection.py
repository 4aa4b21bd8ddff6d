"""
Which cases of a profile a run selects.

There are several kinds of criteria: cases, requirements, bindings, chapters, scopes, capabilities, world sizes, and the
failures of the last run. Values of one kind add up (`--chapter A,G` selects both chapters), and kinds narrow each other
down (`--chapter A --world-size 2` selects what satisfies both). A kind without values selects everything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from fsdp_conformance import run_settings
from fsdp_conformance.contract import elsewhere
from fsdp_conformance.contract.case import Case
from fsdp_conformance.contract.profile import SUITES, Entry, Profile
from fsdp_conformance.contract.requirement import CHAPTERS, load
from fsdp_conformance.contract.scopes import scope_of
from fsdp_conformance.errors import ConfigError, SuiteError, UsageError
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.suggestions import near

#: The flag of each option that selects cases, and the field of RunSettings that holds its values.
OPTIONS = {
    option.flag: option.target for option in run_settings.OPTIONS.values() if option.kind is run_settings.Kind.SELECTION
}

_GLOB = re.compile(r"[*?\[]")


def selected(profile: Profile, settings: RunSettings, *, suites: str = SUITES) -> tuple[Entry, ...]:
    """
    The selected entries of the profile, in its order. `suites` is the package with the cases.

    Raises ConfigError for values that select nothing by themselves, and UsageError for a combination that does.
    """
    problems = _problems(profile, settings, suites)
    if problems:
        raise ConfigError(problems, where=f"profile {profile.name}")
    chosen, sizes = [], set()
    for entry in profile.entries:
        left_out = left_out_by(entry.case(), settings)
        if not left_out:
            chosen.append(entry)
        elif left_out == "--world-size":
            sizes.add(entry.world_size)
    if chosen:
        return tuple(chosen)
    if sizes:
        raise UsageError(
            f"no selected case uses world size {_listed(settings.world_sizes)}: the selected cases use "
            f"{_listed(sorted(sizes))}"
        )
    if not profile.entries:
        raise UsageError(f"the profile {profile.name} has no cases")
    raise UsageError(f"no case of {profile.name} satisfies all of {', '.join(selection_options(settings))}")


def left_out_by(case: Case, settings: RunSettings) -> str:
    """The option that leaves the case out of the run; empty if the case is selected."""
    options = selection_options(settings)
    return next((option for option in options if not _SELECTS[OPTIONS[option]](case, settings)), "")


def unselected(settings: RunSettings) -> RunSettings:
    """The same settings without any selection."""
    everything: dict[str, Any] = dict.fromkeys(OPTIONS.values(), ())
    return replace(settings, **everything)


def selection_options(settings: RunSettings) -> list[str]:
    """The options that narrow the run down to a part of its profile."""
    return [option for option, name in OPTIONS.items() if getattr(settings, name)]


def narrowing_options(profile: Profile, settings: RunSettings) -> list[str]:
    """The options that leave out cases of the profile, each by itself."""
    options = selection_options(settings)
    cases = [entry.case() for entry in profile.entries] if options else []
    return [option for option in options if not all(_SELECTS[OPTIONS[option]](case, settings) for case in cases)]


def _matches_any(case: Case, patterns: Iterable[str]) -> bool:
    """True if a pattern is the case's id, one of its requirements, or a glob that matches the id."""
    return any(pattern in (case.id, *case.requirements) or fnmatchcase(case.id, pattern) for pattern in patterns)


def _scope(case: Case) -> tuple[str, ...]:
    """The scope of the case in a certificate; none for requirements that the contract does not have."""
    requirement = load().requirements.get(case.requirements[0])
    return scope_of(requirement, case.needs) if requirement is not None else ()


#: By field of RunSettings: whether its values, of which there are some, select a case.
_SELECTS: Mapping[str, Callable[[Case, RunSettings], bool]] = {
    "cases": lambda case, chosen: _matches_any(case, chosen.cases),
    "requirements": lambda case, chosen: case.requirements[0] in chosen.requirements,
    "bindings": lambda case, chosen: not set(case.requirements).isdisjoint(chosen.bindings),
    "chapters": lambda case, chosen: case.chapter in chosen.chapters,
    "scopes": lambda case, chosen: not set(_scope(case)).isdisjoint(chosen.scopes),
    "capabilities": lambda case, chosen: not set(case.needs).isdisjoint(chosen.capabilities),
    "last_failed": lambda case, chosen: case.id in chosen.last_failed,
    "world_sizes": lambda case, chosen: case.world_size in chosen.world_sizes,
}
if _SELECTS.keys() != set(OPTIONS.values()):
    raise SuiteError(f"options that select cases: expected {sorted(OPTIONS.values())}, got {sorted(_SELECTS)}")


def _problems(profile: Profile, settings: RunSettings, suites: str) -> list[str]:
    """The problems of each value by itself."""
    ids = [entry.id for entry in profile.entries]
    primary = {entry.primary for entry in profile.entries}
    bound = {name for entry in profile.entries for name in entry.requirements}
    chapters = {load()[entry.primary].chapter for entry in profile.entries}
    scopes = sorted({name for entry in profile.entries for name in entry.scope})
    sizes = sorted({entry.world_size for entry in profile.entries})
    problems = []
    for pattern in settings.cases:
        if pattern in bound or any(fnmatchcase(case_id, pattern) for case_id in ids):
            continue
        if reason := _why_left_out(pattern, profile, suites):
            problems.append(reason)
        elif _GLOB.search(pattern):
            problems.append(f"case must match at least one case, got {pattern!r}{_near_glob(pattern, ids)}")
        else:
            what = "must be a case id, a requirement that has cases, or a glob such as 'R005/*-ws2'"
            problems.append(f"case {what}, got {pattern!r}{_near(pattern, [*ids, *bound])}")
    for name in settings.requirements:
        if name not in primary:
            hint = f". --binding {name} selects the cases that cover it" if name in bound else ""
            hint = hint or _other_profiles(profile, RunSettings(requirements=(name,))) or _near(name, primary)
            problems.append(f"requirement must be one that cases are named after, got {name!r}{hint}")
    problems += [
        f"binding must be a requirement that has cases, got {name!r}"
        + (_other_profiles(profile, RunSettings(bindings=(name,))) or _near(name, bound))
        for name in settings.bindings
        if name not in bound
    ]
    problems += [
        f"chapter must be one of {_listed([chapter for chapter in CHAPTERS if chapter in chapters])}, got {letter!r}"
        + _other_profiles(profile, RunSettings(chapters=(letter,)))
        for letter in settings.chapters
        if letter not in chapters
    ]
    problems += [
        f"scope must be one of {_listed(scopes)}, got {name!r}{_near(name, scopes)}"
        for name in settings.scopes
        if name not in scopes
    ]
    flags = {flag for entry in profile.entries for flag in entry.needs}
    problems += [
        f"capability must be one that cases need, got {name!r}"
        + (_other_profiles(profile, RunSettings(capabilities=(name,))) or _near(name, flags))
        for name in settings.capabilities
        if name not in flags
    ]
    if settings.last_failed and set(settings.last_failed).isdisjoint(ids):
        problems.append(
            f"no case that failed in the last run is in this profile, for example {settings.last_failed[0]}"
        )
    problems += [
        f"world_size must be one of {_listed(sizes)}, got {size}" for size in settings.world_sizes if size not in sizes
    ]
    return problems


def _why_left_out(pattern: str, profile: Profile, suites: str) -> str:
    """Why a pattern that could match cases matches none of this profile; empty if it matches none anywhere."""

    chosen = RunSettings(cases=(pattern,))
    absent = f"case {pattern!r} is in the suites, but not in profile {profile.name}"
    if others := _other_profiles(profile, chosen):
        return f"{absent}{others}"
    name = elsewhere.profile_for_unlisted(pattern, lambda case: not left_out_by(case, chosen), suites=suites)
    if not name:
        return ""
    choice = "" if name == profile.name else f" Then use --profile {name}."
    return f"{absent}. Write it there with `python -m fsdp_conformance.contract.profile --write {name}`.{choice}"


def _other_profiles(profile: Profile, settings: RunSettings) -> str:
    """The profiles that have what the settings select, as advice; empty if there are none."""
    others = elsewhere.profiles_with(lambda case: not left_out_by(case, settings), besides=profile)
    return f". Use --profile {' or '.join(others)}" if others else ""


def _near(word: str, choices: Iterable[str], *, cutoff: float = 0.5) -> str:
    close = near(word, choices, cutoff=cutoff)
    return f". Did you mean {', '.join(close)}?" if close else ""


def _near_glob(pattern: str, ids: Sequence[str]) -> str:
    """The same pattern for the nearest requirements if it names one without cases, else the nearest ids."""
    requirement, slash, rest = pattern.partition("/")
    primary = {case_id.partition("/")[0] for case_id in ids}
    if slash and requirement not in primary:
        return _near(pattern, (f"{name}/{rest}" for name in primary), cutoff=0.0)
    return _near(_GLOB.sub("", pattern), ids, cutoff=0.0)


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
