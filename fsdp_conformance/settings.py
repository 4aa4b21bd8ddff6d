"""
The settings of the run in this process: set once by the pytest plugin, read by every case.

A process without the plugin (a case run by plain unittest) has the defaults of `RunSettings`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from fsdp_conformance.config import RANKS, RunSettings
from fsdp_conformance.errors import ConfigError

_settings = RunSettings()
_description: Mapping[str, Any] | None = None


def use(settings: RunSettings, description: Mapping[str, Any] | None = None) -> None:
    """
    Make `settings` what `current()` returns in this process.

    `description` is the adapter's description as JSON, where the controller has asked for it already: under
    pytest-xdist it is asked once and handed to every worker.
    """
    global _settings, _description
    _settings, _description = settings, description


def current() -> RunSettings:
    """The settings of the run; the defaults where nobody has set any."""
    return _settings


def description() -> Mapping[str, Any] | None:
    """The description of the adapter that the controller handed over, or None."""
    return _description


def from_words(
    *,
    implementation: str | None = None,
    profile: str | None = None,
    device: str | None = None,
    world_sizes: Iterable[str] | None = None,
    cases: Iterable[str] | None = None,
    report_dir: str | None = None,
    no_simulator: bool | None = None,
    ranks: str | None = None,
    reuse_ranks: bool | None = None,
    deadline_scale: str | None = None,
) -> RunSettings:
    """
    Settings from what was typed: numbers as words, lists with commas. None stands for the default.

    Raises ConfigError with every problem found.
    """
    given: dict[str, Any] = {
        "implementation": implementation,
        "profile": profile,
        "device": device,
        "report_dir": report_dir,
        "simulator": False if no_simulator else None,
        "ranks": ranks,
        "reuse_ranks": reuse_ranks,
    }
    problems = [
        f"{name}={given[name]!r}, but should not be blank"
        for name in ("implementation", "profile", "device", "report_dir")
        if given[name] is not None and not given[name].strip()
    ]
    if device is not None and device.strip() and not device.isidentifier():
        problems.append(f"device={device!r}, but should be a type such as cpu, sim or cuda, without an index")
    if ranks is not None and ranks not in RANKS:
        problems.append(f"ranks={ranks!r}, but should be one of {', '.join(RANKS)}")
    if reuse_ranks and ranks not in (None, RANKS[0]):
        problems.append(f"reuse_ranks with ranks={ranks!r}, but should be with ranks={RANKS[0]!r}")
    if world_sizes is not None:
        given["world_sizes"] = tuple(dict.fromkeys(_world_size(word, problems) for word in _split(world_sizes)))
    if cases is not None:
        given["cases"] = tuple(dict.fromkeys(_split(cases)))
    if deadline_scale is not None:
        given["deadline_scale"] = _scale(deadline_scale, problems)
    if problems:
        raise ConfigError(problems, where="options")
    return RunSettings(**{name: value for name, value in given.items() if value is not None})


def from_json(data: Mapping[str, Any]) -> RunSettings:
    """The inverse of `dataclasses.asdict`, after a way through JSON. Fields of other versions are left out."""
    known = {field.name for field in fields(RunSettings)}
    given: dict[str, Any] = {name: value for name, value in data.items() if name in known}
    for name in ("world_sizes", "cases"):
        given[name] = tuple(given.get(name, ()))
    return RunSettings(**given)


def _split(words: Iterable[str]) -> list[str]:
    return [part.strip() for word in words for part in word.split(",") if part.strip()]


def _world_size(word: str, problems: list[str]) -> int:
    if word.isdecimal() and int(word) > 0:
        return int(word)
    problems.append(f"world_size={word!r}, but should be a number of ranks, at least 1")
    return 0


def _scale(word: str, problems: list[str]) -> float:
    try:
        scale = float(word)
    except ValueError:
        scale = 0.0
    if not 0.0 < scale < float("inf"):
        problems.append(f"deadline_scale={word!r}, but should be a positive number")
    return scale
