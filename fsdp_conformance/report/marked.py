"""
Markdown with text that others wrote: the names of engines and their messages cannot become markup.

A line is made by `marked` from a template of ours and from values, which are escaped unless they are Markdown already;
a table by `row`, whose cells are such values. Control characters and line breaks are escaped where text enters the
suite: see `visible`.
"""

from __future__ import annotations

import html
import re
import string
from collections.abc import Iterable
from typing import Any

#: Marks that mean something inside of a line. An underscore does so only at the edge of a word.
_MARKS = re.compile(r"[\\`*\[\]|~]|(?<![^\W_])_|_(?![^\W_])")
#: Marks that mean something where a text begins.
_AT_START = re.compile(r"^\s*([#+\-=]|\d+[.)])(?=\s|$)")
#: GitHub makes links and mentions of these without any mark.
_LINKS = {"://": "&#58;//", "www.": "www&#46;", "@": "&#64;"}


class Markdown(str):
    """Text that is Markdown already, and is not escaped again."""

    __slots__ = ()


class _Formatter(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        text = super().format_field(value, format_spec)
        return text if isinstance(value, Markdown) else escaped(text)


_FORMATTER = _Formatter()


def marked(template: str, *values: object) -> Markdown:
    """The template, as `str.format` fills it, with the values escaped."""
    return Markdown(_FORMATTER.format(template, *values))


def row(cells: Iterable[str]) -> Markdown:
    """A row of a table."""
    return Markdown("| " + " | ".join(marked("{}", cell) for cell in cells) + " |")


def in_html(text: str) -> Markdown:
    """Text inside of an HTML element, where Markdown means nothing."""
    return Markdown(html.escape(text))


def escaped(text: str) -> str:
    """The text as Markdown that shows it."""
    text = _MARKS.sub(lambda mark: f"\\{mark[0]}", html.escape(" ".join(text.split("\n")), quote=False))
    text = _AT_START.sub(lambda start: start[0][: -len(start[1])] + "\\" + start[1], text)
    for mark, entity in _LINKS.items():
        text = text.replace(mark, entity)
    return text
