"""Messages of the command: errors on stderr with its name in front, suggestions for mistyped words."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from fsdp_conformance.codec import encode
from fsdp_conformance.errors import AdapterError, ConfigError
from fsdp_conformance.report.folding import folded, terminal_width
from fsdp_conformance.suggestions import near, near_file

PROGRAM = "fsdp-conformance"

#: Errors of the disk: full, over a quota, over the limit of a file's size, read-only, broken.
DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO})


def say(text: str, *whole: object) -> None:
    """
    Print text for people: on a terminal, lines that are too long are folded. Programs such as grep get whole lines.

    `whole`: the paths in the text that may have spaces. They stay on one line.

    Not for commands, which are copied: they are printed as they are, on a separate line.
    """
    width = terminal_width()
    for line in text.splitlines():
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        print("\n".join(folded(line, width, indent=indent, whole=whole)) if width else line, flush=True)


def say_json(content: Mapping[str, Any]) -> None:
    """Print what a command with --json has to tell: one JSON object, and nothing else on stdout."""
    print(encode(content, indent=1))


def complain(what: BaseException | str) -> None:
    """Print an error to stderr, with a line for each problem that it carries."""
    problems: Iterable[str] = [str(what)]
    if isinstance(what, ConfigError):
        problems = what.sentences()
    elif isinstance(what, AdapterError):
        problems = what.problems
    for problem in problems:
        print(f"{PROGRAM}: {problem}", file=sys.stderr)


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """ ". Did you mean 'x' or 'y'?", or "" if nothing is similar."""
    close = near(word, choices, cutoff=0.6)
    return f". Did you mean {' or '.join(map(repr, close))}?" if close else ""


def no_script(path: str) -> str:
    """The error for a script that does not exist, with a similar name if there is one."""
    meant = near_file(path)
    return f"there is no script {path!r}" + (f". Did you mean {meant!r}?" if meant else "")


def plural(count: int, noun: str) -> str:
    """ "1 case", "2 cases"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
