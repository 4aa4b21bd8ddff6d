"""
The settings of a run file that can name code or files.

Nothing is read or imported because a run file names it: where a command repeats or continues a run, the user names such
an implementation, profile or workload again.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping

from fsdp_conformance.adapters import registry
from fsdp_conformance.errors import UsageError
from fsdp_conformance.run_settings import OPTIONS, RunSettings

#: These options, and whether a value names no file and no module.
NAMES_CODE: Mapping[str, Callable[[str], bool]] = {
    "implementation": registry.is_installed,
    "profile": lambda value: not value.endswith(".json"),
    "workload": lambda value: not value,
}


def check_named(settings: RunSettings, given: Mapping[str, str | None], *, path: object) -> None:
    """
    Raise UsageError, with all options to add, if only the run file at `path` names some code or file of its `settings`.

    `given`: what the user has named, by option. Only these options matter to the command.
    """
    recorded = {name: getattr(settings, name) for name in given}
    unnamed = [name for name, value in recorded.items() if given[name] is None and not NAMES_CODE[name](value)]
    if unnamed:
        options = " ".join(f"{OPTIONS[name].flag} {shlex.quote(recorded[name])}" for name in unnamed)
        raise UsageError(
            f"{path} is a run with {options}. No file or module is loaded just because a run file names it: "
            f"add {options}"
        )
