"""
Links to these pages, for messages: installed with them as `fsdp_conformance.docs`, so a link works offline.

    link("reading-a-verdict", "exit-statuses")   docs/reading-a-verdict.md#exit-statuses

Standard library only. A guard test checks that every page and anchor named here exists.
"""

from __future__ import annotations

from pathlib import Path

_PAGES = Path(__file__).resolve().parent

ADAPTER = ("writing-an-adapter", "")
"""How to write an adapter: the whole protocol."""
ADAPTER_PROBLEMS = ("writing-an-adapter", "when-smoke-complains")
"""The findings of `smoke`, and their common causes."""
VERDICT = ("reading-a-verdict", "")
"""The meaning of the verdicts, and how to read a failure."""
NOT_CERTIFIED = ("reading-a-verdict", "why-a-run-is-not-certified")
"""Every reason that stands between a run and a certificate."""
ENVIRONMENT = ("gpus-and-clusters", "what-a-machine-needs")
"""The hardware that cases need."""

#: Every page that a message links to, as arguments of `link`.
LINKED = (ADAPTER, ADAPTER_PROBLEMS, VERDICT, NOT_CERTIFIED, ENVIRONMENT)


def link(page: str, anchor: str = "") -> str:
    """
    Where a page is, as a path that can be opened from the working directory: relative to it where the page is below it.

    In a checkout that is `docs/PAGE.md`; installed from a wheel, the page lies beside the package.
    """
    path = _PAGES / f"{page}.md"
    try:
        shown = path.relative_to(Path.cwd())
    except (ValueError, OSError):  # the page is elsewhere, or the working directory is gone
        shown = path
    return f"{shown}#{anchor}" if anchor else str(shown)


def see(place: tuple[str, str]) -> str:
    """The words that point a reader to a page: `see docs/PAGE.md#ANCHOR`."""
    return f"see {link(*place)}"


def requirement(requirement_id: str) -> tuple[str, str]:
    """The place of a requirement on the generated page."""
    return "requirements", requirement_id.lower()
