"""
The same names for the parameters of two recordings.

Parameters have the names that the outermost module gives them which is called. A framework, or another script, may call
a module that has the model inside, so that all names of one recording begin with a prefix: 'model.0.weight'.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from typing import Any

from fsdp_conformance.recordings.events import Backward, Clip, Event, Forward, Initial, Step
from fsdp_conformance.recordings.files import Recording

#: Fields whose keys are names, or begin with one.
_KEYED: dict[type, tuple[str, ...]] = {
    Initial: ("values",),
    Forward: ("units",),
    Backward: ("contributions",),
    Clip: ("gradients",),
    Step: ("gradients", "parameters", "state", "counters", "buffers", "reduced", "begin"),
}

#: Fields that are tuples of names.
_NAMES: dict[type, tuple[str, ...]] = {Initial: ("frozen",), Step: ("untrained", "written", "originals")}


def prefixes_of(recording: Recording, reference: Recording) -> tuple[str, str]:
    """The prefixes without which two recordings have the same names; both are empty if they have some in common."""
    mine, theirs = _names_of(recording), _names_of(reference)
    if not mine or not theirs or mine & theirs:
        return "", ""
    prefixes = _common_prefix(mine), _common_prefix(theirs)
    mine, theirs = (_stripped(names, prefix) for names, prefix in zip((mine, theirs), prefixes, strict=True))
    more = _prefix_in(mine, theirs), _prefix_in(theirs, mine)
    mine, theirs = (_stripped(names, prefix) for names, prefix in zip((mine, theirs), more, strict=True))
    if 2 * len(mine & theirs) < min(len(mine), len(theirs)):
        return "", ""
    return prefixes[0] + more[0], prefixes[1] + more[1]


def without_prefix(recording: Recording, prefix: str) -> Recording:
    """The recording with names that lack a prefix. Names that do not begin with it stay."""
    if not prefix:
        return recording
    ranks = (replace(rank, events=tuple(_renamed(event, prefix) for event in rank.events)) for rank in recording.ranks)
    return replace(recording, ranks=tuple(ranks))


def _names_of(recording: Recording) -> Set[str]:
    return {name for event in recording.ranks[0].events if isinstance(event, Initial) for name in event.values}


def _common_prefix(names: Set[str]) -> str:
    """The part up to a dot with which all names begin."""
    first, *others = sorted(names)
    prefix = ""
    for part in first.split(".")[:-1]:
        longer = f"{prefix}{part}."
        if not all(name.startswith(longer) for name in others):
            break
        prefix = longer
    return prefix


def _prefix_in(names: Set[str], others: Set[str]) -> str:
    """The prefix without which most of the other names are among `names`; empty if there is none."""
    candidates = {name[: -len(other)] for other in sorted(others)[:1] for name in names if name.endswith(f".{other}")}
    return max(candidates, key=lambda prefix: len(_stripped(names, prefix) & others), default="")


def _stripped(names: Iterable[str], prefix: str) -> Set[str]:
    return {name.removeprefix(prefix) for name in names}


def _renamed(event: Event, prefix: str) -> Event:
    changes: dict[str, Any] = {}
    for field in _KEYED.get(type(event), ()):
        values: Mapping[str, Any] = getattr(event, field)
        changes[field] = {name.removeprefix(prefix): value for name, value in values.items()}
    for field in _NAMES.get(type(event), ()):
        changes[field] = tuple(name.removeprefix(prefix) for name in getattr(event, field))
    if isinstance(event, Initial):
        changes["tied"] = {
            name.removeprefix(prefix): tuple(other.removeprefix(prefix) for other in others)
            for name, others in event.tied.items()
        }
    if isinstance(event, Step):
        changes["groups"] = tuple(
            replace(group, parameters=tuple(name.removeprefix(prefix) for name in group.parameters))
            for group in event.groups
        )
    return replace(event, **changes) if changes else event
