"""Text folded to a width: the terminal's on a screen, WIDTH in files and in pipes."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterable

#: The most columns to use; also where there is no terminal.
WIDTH = 120
#: Below that, long ids and paths leave no room for words.
_NARROWEST = 60

#: A path in quotation marks, as errors of the operating system show it.
_QUOTED_PATH = re.compile(r"(?<!\w)'[^'\n]*/[^'\n]*'(?!\w)")

#: What stands for a space inside of a path while lines are folded.
_SPACE_OF_PATH = "\ue000"


def terminal_width() -> int | None:
    """The columns of the terminal, or what the variable COLUMNS says, within reason; None without either."""
    columns = shutil.get_terminal_size((0, 0)).columns
    return max(_NARROWEST, min(WIDTH, columns)) if columns else None


def screen_width() -> int:
    """The columns to fold paragraphs at: the terminal's, or WIDTH."""
    return terminal_width() or WIDTH


def folded(
    text: str, width: int = WIDTH, *, lead: str = "", indent: str = "", whole: Iterable[object] = ()
) -> list[str]:
    """
    The lines of a paragraph: `lead` stands before the first one, `indent` before the others.

    Spaces inside of a line stay, so columns remain aligned. Words that are too long are not broken: they are ids, paths
    and tensors' names, which people copy. A path with spaces stays on one line if it is in quotation marks, or is
    one of those in `whole`.
    """
    for path in (*map(str, whole), *_QUOTED_PATH.findall(text)):
        text = text.replace(path, path.replace(" ", _SPACE_OF_PATH))
    words = text.lstrip()
    # `wrap` would drop the spaces in front of a first word that does not fit.
    lead += text[: len(text) - len(words)]
    lines = textwrap.wrap(
        words, width, initial_indent=lead, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return [line.replace(_SPACE_OF_PATH, " ") for line in lines]
