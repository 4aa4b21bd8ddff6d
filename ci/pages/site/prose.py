"""
Pages of docs/ in the dialect of the generator.

GitHub and most readers follow CommonMark, where the text of a list item is indented as far as the item's first word.
Python-Markdown, which the generator uses, wants four spaces, and a blank line before a list and after a long item.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable

from markdown_it import MarkdownIt

_COMMENT = re.compile(r"^[ ]*<!--.*?-->\n+", re.MULTILINE | re.DOTALL)
_ITEM = re.compile(r"\s*(?:[-*+]|\d+[.)])\s+")
_LINK = re.compile(r"(?<=\]\()(\.\./[^)\s#]+)")
_FENCE = re.compile(r"^([ ]*)```console$", re.MULTILINE)
_WIDTH = 4


def converted(text: str, source_page: Callable[[str], str]) -> str:
    """The page's text. `source_page` gives the page that shows a file of the checkout, for links to files."""
    text = _COMMENT.sub("", text)
    text = _with_wide_lists(text)
    text = _LINK.sub(lambda link: source_page(posixpath.normpath(f"docs/{link[1]}")), text)
    return _FENCE.sub(r"\1```text", text)


def _with_wide_lists(text: str) -> str:
    lines = text.splitlines()
    more = [0] * len(lines)
    begins = set()
    for token in MarkdownIt().enable("table").parse(text):
        if token.type in ("bullet_list_open", "ordered_list_open") and token.map:
            begins.add(token.map[0])
        if token.type == "list_item_open" and token.map:
            first, last = token.map
            if any(not line.strip() for line in lines[first:last]):
                # What follows an item of several paragraphs would otherwise go on with its last one.
                begins.add(last)
            marker = _ITEM.match(lines[first])
            width = len(marker[0]) - (len(lines[first]) - len(lines[first].lstrip())) if marker else _WIDTH
            for number in range(first + 1, last):
                more[number] += max(0, _WIDTH - width)
    wide = []
    for number, line in enumerate(lines):
        if number in begins and number and lines[number - 1].strip():
            wide.append("")
        wide.append(" " * more[number] + line if line.strip() else line)
    return "\n".join(wide) + "\n"
