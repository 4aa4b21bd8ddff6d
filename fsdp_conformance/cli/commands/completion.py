"""`fsdp-conformance completion`: a script with which a shell completes commands, options, profiles and files."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from fsdp_conformance.cli.arguments import parser
from fsdp_conformance.contract.profile import names
from fsdp_conformance.errors import EnvironmentUnavailable
from fsdp_conformance.status import Status

#: Metavars of arguments that take the path of a file; an implementation may be one.
_FILES = frozenset({"FILE", "PATH", "RUN", "OLD", "NEW", "SPEC", "IMPLEMENTATION", "SCRIPT"})


def main(arguments: argparse.Namespace) -> int:
    """Print the script. Raises EnvironmentUnavailable without shtab."""
    try:
        # Only here: no other command has to wait for it.
        import shtab
    except ImportError as error:
        raise EnvironmentUnavailable("completion needs shtab, which is not installed: pip install shtab") from error
    whole = parser()
    for action in _actions(whole):
        if action.metavar in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.metavar == "DIR":
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif action.dest == "profile":
            action.choices = names()
    print(shtab.complete(whole, shell=arguments.shell))
    return Status.CERTIFIED


def _actions(of: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The arguments of a parser and of its commands."""
    for action in of._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
