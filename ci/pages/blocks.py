"""
The fenced blocks of a page.

A comment on the line before a block says how it is checked:

    <!-- file: train.py -->         the block is a whole file, which the commands of the page find under that name
    <!-- adapter: my.py:Mine -->    the same, and `smoke` is run on the adapter in it
    <!-- script: train.py -->       the same, and it is run as a program; what it prints is the next block
    <!-- output: train.py -->       what that program prints
    <!-- change: train.py -->       a difference, which is applied to that file before the commands that follow
    <!-- fragment: REASON -->       code that is not a program; the tests run it
    <!-- smoke: my.py:Mine without METHOD -->   what `smoke` says of that adapter without one of its methods
    <!-- from: docs/PAGE.md -->     every line of the block is in a block of that page, where it is checked
    <!-- inside: FILE.py -->        its lines stand in that file, one after the other
    <!-- parsed: REASON -->         it is not run; its commands are parsed by the command line's own parser
    <!-- not run: REASON -->        nothing here can run it; the tests count these

A console block without a comment is run: its exit status must be 0 (or what `<!-- status: 1 -->` says) and its output
what is quoted, but for numbers. A line `...` in the quotation stands for any number of lines.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

#: Every word that a comment may begin with.
WORDS = (
    *("file", "change", "adapter", "script", "output", "fragment", "smoke", "from", "inside"),
    *("status", "parsed", "not run"),
)

_FENCE = re.compile(
    r"(?:^[ ]*<!--[ ](?P<word>[a-z ]+?):[ ](?P<said>[^\n]*?)[ ]-->\n)?"
    r"^(?P<indent>[ ]*)```(?P<language>[a-z]*)\n(?P<text>.*?)^[ ]*```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A line that a reader types, with what is quoted below it."""

    line: str
    quoted: str

    def words(self) -> list[str]:
        """As a shell would split it; a line that ends in a backslash goes on."""
        return shlex.split(self.line.replace("\\\n", " "), comments=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One fenced block."""

    page: str
    """The path in the checkout."""
    line: int
    language: str
    text: str
    word: str
    """The word of the comment before it: a member of WORDS, or empty."""
    said: str
    """The rest of the comment."""
    start: int
    """Where its text begins on the page, in characters; used to replace it."""

    @property
    def place(self) -> str:
        """For messages."""
        return f"{self.page}:{self.line}"

    def commands(self) -> list[Command]:
        """The commands of a console block."""
        typed_commands: list[Command] = []
        for part in re.split(r"^\$ ", self.text, flags=re.MULTILINE)[1:]:
            typed, _, quoted = part.partition("\n")
            while typed.endswith("\\"):
                more, _, quoted = quoted.partition("\n")
                typed += "\n" + more
            typed_commands.append(Command(line=typed, quoted=quoted))
        return typed_commands


def pages() -> list[str]:
    """The README, and every page of docs/, as paths in the checkout."""
    return ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]


def text_of(page: str) -> str:
    """A page's text."""
    return (ROOT / page).read_text(encoding="utf-8")


def blocks_of(page: str) -> list[Block]:
    """The blocks of a page, in order."""
    return list(blocks_in(text_of(page), page))


def blocks_in(text: str, page: str) -> Iterator[Block]:
    """The blocks of a page's text."""
    for match in _FENCE.finditer(text):
        yield Block(
            page=page,
            line=text.count("\n", 0, match.start("indent")) + 1,
            language=match["language"],
            text=textwrap.dedent(match["text"]),
            word=match["word"] or "",
            said=match["said"] or "",
            start=match.start("text"),
        )


def prose_of(page: str) -> str:
    """A page's text without its blocks."""
    return _FENCE.sub("", text_of(page))
