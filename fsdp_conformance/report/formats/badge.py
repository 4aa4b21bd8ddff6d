"""
The verdict as an SVG picture for a README. It names the scope: "certified" alone would say more than was seen.

A run that stopped early, or that left cases out, has no verdict to show, and the badge shows that instead.
"""

from __future__ import annotations

from html import escape

from fsdp_conformance.report.certificate import Certificate
from fsdp_conformance.report.expectations import NO_LIST, Judged
from fsdp_conformance.report.run_content import RunFile
from fsdp_conformance.report.terminal import verdict_words
from fsdp_conformance.verdict import ACCUSING

_LABEL = "fsdp-conformance"
_GREEN, _RED, _GREY = "#1a7f37", "#c62828", "#68707c"

#: The width of a character in Verdana at 11 px, on average, and the space around a text.
_CHARACTER = 6.6
_SPACE = 12


def text(run: RunFile, certificate: Certificate, judged: Judged = NO_LIST) -> str:
    """The picture."""
    del judged
    words, colour = _words(run, certificate)
    left, right = (round(len(part) * _CHARACTER + _SPACE) for part in (_LABEL, words))
    title = escape(f"{_LABEL}: {words} ({certificate.profile})")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" aria-label="{title}">'
        f"<title>{title}</title>"
        f'<rect width="{left}" height="20" fill="#444c56"/>'
        f'<rect x="{left}" width="{right}" height="20" fill="{colour}"/>'
        '<g fill="#fff" font-family="Verdana,Geneva,sans-serif" font-size="11" text-anchor="middle">'
        f'<text x="{left / 2}" y="14">{_LABEL}</text>'
        f'<text x="{left + right / 2}" y="14">{escape(words)}</text>'
        "</g></svg>\n"
    )


def _words(run: RunFile, certificate: Certificate) -> tuple[str, str]:
    if certificate.certified:
        # The word is said by the colour; what counts is of what.
        return verdict_words(certificate).removeprefix(f"{certificate.word} "), _GREEN
    if not ACCUSING.isdisjoint(certificate.counts):
        failed = sum(count for verdict, count in certificate.counts.items() if verdict in ACCUSING)
        return f"{failed} of {certificate.executed} cases failed", _RED
    if run.aborted or certificate.executed < certificate.expected:
        return f"{certificate.executed} of {certificate.expected} cases ran", _GREY
    return certificate.word.lower(), _GREY
