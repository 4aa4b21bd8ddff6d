"""The templates of the generated pages. Values are escaped; texts of the contract may have words in backquotes."""

from __future__ import annotations

import re
from pathlib import Path

import jinja2
from markupsafe import Markup, escape

from fsdp_conformance.contract import OBSERVATIONS
from fsdp_conformance.report.terminal import duration
from pages.blocks import Block
from pages.site import cells

HERE = Path(__file__).parent

#: The words that begin a line of a finding, and the line with its title.
_LABEL = re.compile(r"^( {4})([a-z]+(?: at)?)(?=  )", re.MULTILINE)
_TITLE = re.compile(r"^(✗ .*)$", re.MULTILINE)
_TYPED = re.compile(r"^(\$ .*)$", re.MULTILINE)


def page(template: str, **values: object) -> str:
    """The text of a page."""
    return _environment().get_template(f"{template}.jinja").render(**values)


def code(text: str) -> Markup:
    """A text with words in backquotes, as HTML."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))  # noqa: S704 - escaped before


def markdown(text: str) -> Markup:
    """A text of ours that is Markdown already."""
    return Markup(text)  # noqa: S704 - from docs/


def terminal(block: Block) -> Markup:
    """A block of a console, with colours for what was typed, and for the title and the labels of a finding."""
    text = str(escape(block.text.rstrip("\n")))
    for pattern, name in ((_TITLE, "title"), (_TYPED, "typed")):
        text = pattern.sub(rf'<b class="{name}">\1</b>', text)
    return Markup(_LABEL.sub(r'\1<b class="label">\2</b>', text))  # noqa: S704 - escaped before


def anchor(script: str) -> str:
    """The anchor of a defect on the page of its engine."""
    return Path(script).stem.replace("_", "-")


def case_anchor(case: str) -> str:
    """The anchor of a case on the page of its requirement."""
    return f"case-{case.partition('/')[2]}"


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(code=code, terminal=terminal, anchor=anchor, case_anchor=case_anchor, duration=duration)
    environment.globals.update(cells=cells, OBSERVATIONS=OBSERVATIONS)
    return environment
