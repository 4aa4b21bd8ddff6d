"""Text of others, made visible."""

from __future__ import annotations

import pytest

from fsdp_conformance.outcome.records import RankExit, rank_report_from_json
from fsdp_conformance.report.marked import Markdown, marked, row
from fsdp_conformance.visible import visible, visible_content


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain · text, ümlaut 漢字", "plain · text, ümlaut 漢字"),
        ("\x1b[31mred", r"\x1b[31mred"),
        ("\x9b31m", r"\x9b31m"),
        ("a\nb\tc\rd", r"a\nb\tc\rd"),
        ("\u202eabc\u2066", r"\u202eabc\u2066"),
        ("\u200b\ufeff\u2028", r"\u200b\ufeff\u2028"),
        ("\udc80", r"\udc80"),
        ("\U000e0041", r"\U000e0041"),
    ],
)
def test_what_cannot_be_printed_is_shown_as_its_escape(text: str, shown: str) -> None:
    """Everything else stays as it is."""
    assert visible(text) == shown
    assert visible(shown) == shown


def test_lines_stay_where_texts_have_some() -> None:
    """A traceback has lines, a name has none; keys are texts, too."""
    content = {"name": "a\nb", "traceback": "a\n\x1b", "findings": [{"message": "a\nb", "fqn": "a\nb"}], "k\x07": 1}

    assert visible_content(content) == {
        "name": r"a\nb",
        "traceback": "a\n\\x1b",
        "findings": [{"message": "a\nb", "fqn": r"a\nb"}],
        r"k\x07": 1,
    }


def test_what_a_rank_sends_is_visible() -> None:
    """Its report, what it wrote, and what it was doing."""
    report = rank_report_from_json({"rank": 0, "notes": ["\x1b[2J"], "measurements": {"a": ["\u202e"]}})
    end = RankExit(
        rank=0, pid=2, exitcode=0, time=1.0, reported=True, stack="a\n\x07", output="\x1b\n", last_collectives=["\n"]
    )

    assert (report.notes, report.measurements) == ([r"\x1b[2J"], {"a": [r"\u202e"]})
    assert (end.stack, end.output, end.last_collectives) == ("a\n\\x07", "\\x1b\n", [r"\n"])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no_sync of my_engine", "no_sync of my_engine"),
        ("_emphasis_ and **more**", r"\_emphasis\_ and \*\*more\*\*"),
        ("[a](b) ![c](d)", r"\[a\](b) !\[c\](d)"),
        ("<b>&", "&lt;b&gt;&amp;"),
        ("a | b", r"a \| b"),
        ("`code` \\ ~~gone~~", r"\`code\` \\ \~\~gone\~\~"),
        ("# heading", r"\# heading"),
        ("1. item", r"\1. item"),
        ("https://a.b @someone", "https&#58;//a.b &#64;someone"),
        ("a\nb", "a b"),
    ],
)
def test_text_is_no_markup(text: str, shown: str) -> None:
    """A value that is Markdown already stays."""
    assert marked("- {}", text) == f"- {shown}"
    assert row([text, Markdown("**b**")]) == f"| {shown} | **b** |"
