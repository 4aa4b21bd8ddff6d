"""
A run in the formats that other programs read.

    sarif     findings as code-scanning alerts (SARIF 2.1.0)
    ctrf      cases as tests (Common Test Report Format)
    badge     the verdict as a small SVG picture
    trace     the collectives of each case for Perfetto and chrome://tracing

`FORMATS` is what `fsdp-conformance export` offers. pytest writes JUnit XML by itself.
"""

from collections.abc import Callable

from fsdp_conformance.report import markdown
from fsdp_conformance.report.certificate import Certificate
from fsdp_conformance.report.formats import badge, ctrf, sarif, trace
from fsdp_conformance.report.html import page
from fsdp_conformance.report.run_content import RunFile

#: The text of a run in each format.
FORMATS: dict[str, Callable[[RunFile, Certificate], str]] = {
    "badge": badge.text,
    "ctrf": ctrf.text,
    "html": page.page,
    "markdown": markdown.summary,
    "sarif": sarif.text,
    "trace": trace.text,
}
