"""
Text that others wrote, made visible: what would steer a terminal or deceive a reader is shown as its escape.

An engine's name, its messages and a run file may contain anything: escape sequences, marks that turn the direction of
the text, characters without width. Such text enters the suite at few places, with a rank's report, an adapter's
description or a run file, and goes through `visible` or `visible_content` there, so that no output has to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Keys of records whose texts may have several lines. Anywhere else a line break is shown as its escape.
WITH_LINES = frozenset({"message", "detail", "traceback", "stack", "output", "problems"})

_BREAKS = {"\n", "\t"}
_SHORT = {"\n": r"\n", "\t": r"\t", "\r": r"\r"}


def visible(text: str, *, lines: bool = False) -> str:
    r"""The text with everything that cannot be printed as its escape, such as `\x1b`; with `lines`, breaks stay."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or (lines and character in _BREAKS) else _escape(character)
        for character in text
    )


def visible_content(content: Any, *, lines: bool = False) -> Any:
    """Content in terms of JSON, in which every text and every key is visible. Breaks stay where WITH_LINES has them."""
    if isinstance(content, str):
        return visible(content, lines=lines)
    if isinstance(content, Mapping):
        return {visible(key): visible_content(item, lines=key in WITH_LINES) for key, item in content.items()}
    if isinstance(content, list | tuple):
        return [visible_content(item, lines=lines) for item in content]
    return content


def _escape(character: str) -> str:
    code = ord(character)
    if character in _SHORT:
        return _SHORT[character]
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
