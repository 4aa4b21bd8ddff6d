"""Renders the page. Everything that comes from a run is escaped: an engine's messages may contain anything."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from fsdp_conformance.report.baseline import Changes
from fsdp_conformance.report.certificate import Certificate
from fsdp_conformance.report.expectations import NO_LIST, Judged
from fsdp_conformance.report.html.views import view
from fsdp_conformance.report.run_content import RunFile
from fsdp_conformance.report.terminal import DETAIL

if TYPE_CHECKING:
    import jinja2

#: The name of the file in a report directory.
NAME = "report.html"


def page(
    run: RunFile,
    certificate: Certificate,
    judged: Judged = NO_LIST,
    *,
    changes: Changes | None = None,
    baseline: str = "",
) -> str:
    """The whole file. `changes` are those since the run that `baseline` names."""
    shown = view(run, certificate, judged, changes=changes, baseline=baseline)
    return rendered("page.html", view=shown, script=_text("script.js"), DETAIL=DETAIL)


def rendered(template: str, **values: object) -> str:
    """A template with its values and the style."""
    return _environment().get_template(template).render(style=_text("style.css"), **values)


@cache
def _environment() -> jinja2.Environment:
    # Not at the top: every command imports this module, and most write no page.
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FunctionLoader(_text),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _text(name: str) -> str:
    return (files(__package__) / "templates" / name).read_text(encoding="utf-8")
