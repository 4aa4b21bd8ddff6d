"""The user's own model (--workload), examined in a child process before anything is judged on it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from fsdp_conformance.cli.child import answers
from fsdp_conformance.errors import ConfigError
from fsdp_conformance.run_settings import RunSettings

#: Seconds for some trainings of a small model.
TIMEOUT_S = 300.0

_WHERE = "--workload"


def with_workload(settings: RunSettings, *, fork: bool = False, signals: Sequence[int] = ()) -> RunSettings:
    """
    The settings with what the model of --workload has; the same settings if there is none.

    Raises ConfigError with every problem of the workload. With `fork`, the child is a fork of this process.
    """
    if not settings.workload:
        return settings
    with answers("workload", fork=fork, timeout_s=TIMEOUT_S, signals=signals, spec=settings.workload) as replies:
        return settings_from(replies, settings)


def settings_from(replies: Iterable[dict[str, Any]], settings: RunSettings) -> RunSettings:
    """The settings that the answers of the job make. Raises what `with_workload` raises."""
    last: dict[str, Any] = {}
    for answer in replies:
        last = answer
    if last.get("what") != "workload":
        output = str(last.get("output", "")).rstrip()
        how = last.get("how", "ended without an answer")
        problem = f"the process that examines {settings.workload} {how}. Its output ends with:\n{output}"
        raise ConfigError([problem], where=_WHERE)
    if last["problems"]:
        raise ConfigError(last["problems"], where=f"{_WHERE} {settings.workload}")
    return replace(settings, workload_has=tuple(last["has"]))
