"""`fsdp-conformance completion`: a script with which a shell completes commands, options, names and files."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fsdp_conformance import contract
from fsdp_conformance.adapters import registry
from fsdp_conformance.cli.arguments import parser
from fsdp_conformance.contract.profile import load_profile, names, newest
from fsdp_conformance.errors import EnvironmentUnavailable
from fsdp_conformance.run_settings import OWN_MODEL
from fsdp_conformance.status import Status

#: Metavars of arguments that take the path of a file.
_FILES = frozenset({"FILE", "PATH", "RUN", "OLD", "NEW", "SPEC", "SCRIPT"})

#: Arguments that take names, by metavar or `dest`, and the list that has these names.
_NAMES = {
    "IMPLEMENTATION": "adapters",
    "implementation": "adapters",
    "CASE": "cases",
    "[RUN] CASE": "cases",
    "GLOB": "cases",
    "cases": "requirements_and_cases",
    "name": "requirements_and_cases",
    "requirements": "requirements_of_cases",
    "bindings": "bound_requirements",
    "chapters": "chapters",
    "scopes": "scopes",
    "capabilities": "capabilities",
}

#: Those of them that take files, too.
_OR_FILES = frozenset({"IMPLEMENTATION", "implementation", "[RUN] CASE"})

#: How a shell completes the last name of a list with commas. The script has each list once, for all commands.
_BASH = """\
_fsdp_conformance_{list}=({names})
_fsdp_conformance_complete_{list}() {{
  local before=""
  [[ $1 == *,* ]] && before="${{1%,*}},"
  compgen -P "$before" -W "${{_fsdp_conformance_{list}[*]}}" -- "${{1##*,}}"
}}
_fsdp_conformance_complete_{list}_or_files() {{
  _fsdp_conformance_complete_{list} "$1"
  compgen -f -- "$1"
}}
"""
_ZSH = """\
_fsdp_conformance_{list}=({names})
_fsdp_conformance_complete_{list}() {{
  compset -P '*,'
  compadd -a _fsdp_conformance_{list}
}}
_fsdp_conformance_complete_{list}_or_files() {{
  _fsdp_conformance_complete_{list}
  _files
}}
"""


def main(arguments: argparse.Namespace) -> int:
    """Print the script. Raises EnvironmentUnavailable without shtab."""
    try:
        # Only here: no other command has to wait for it.
        import shtab
    except ImportError as error:
        raise EnvironmentUnavailable("completion needs shtab, which is not installed: pip install shtab") from error
    whole, lists = parser(), _lists()
    for action in _actions(whole):
        key = next((key for key in (action.metavar, action.dest) if key in _NAMES), None)
        if key is not None:
            files = shtab.FILE if key in _OR_FILES else None
            action.complete = _completion(_NAMES[key], lists, files=files)  # type: ignore[attr-defined]
        elif action.metavar in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.metavar == "DIR":
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif action.dest == "profile":
            action.choices = names()
    print(shtab.complete(whole, shell=arguments.shell))
    return Status.CERTIFIED


def _lists() -> dict[str, list[str]]:
    """The names to complete, by list, from all profiles of the newest date."""
    entries = {entry.id: entry for name in (*newest(), OWN_MODEL) for entry in load_profile(name).entries}
    cases = sorted(entries)
    return {
        "adapters": registry.names(),
        "bound_requirements": sorted({name for entry in entries.values() for name in entry.requirements}),
        "capabilities": sorted({flag for entry in entries.values() for flag in entry.needs}),
        "cases": cases,
        "chapters": list(contract.CHAPTERS),
        "requirements_of_cases": sorted({entry.primary for entry in entries.values()}),
        "requirements_and_cases": [*contract.load().requirements, *cases],
        "scopes": sorted({name for entry in entries.values() for name in entry.scope}),
    }


def _completion(name: str, lists: Mapping[str, Sequence[str]], *, files: Mapping[str, Any] | None) -> dict[str, Any]:
    """How each shell completes an argument, as shtab takes it. tcsh cannot complete a case, whose id has a slash."""
    function = f"_fsdp_conformance_complete_{name}{'_or_files' if files else ''}"
    words = " ".join(lists[name])
    of_tcsh = "" if "/" in words else f"({words})"
    return {
        "bash": function,
        "zsh": function,
        "tcsh": files["tcsh"] if files else of_tcsh,
        "preamble": {shell: text.format(list=name, names=words) for shell, text in (("bash", _BASH), ("zsh", _ZSH))},
    }


def _actions(of: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The arguments of a parser and of its commands."""
    for action in of._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
