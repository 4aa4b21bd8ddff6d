"""
A run in the formats that other programs read.

    sarif     findings as code-scanning alerts (SARIF 2.1.0)
    junit     cases as tests (JUnit XML)
    ctrf      cases as tests (Common Test Report Format)
    badge     the verdict as a small SVG picture
    trace     the collectives of each case for Perfetto and chrome://tracing

`FORMATS` is what `fsdp-conformance export` offers. Each format marks the failures that a list of known ones announces.

    places    where in a repository a result is shown
"""

from collections.abc import Callable

from fsdp_conformance.report import markdown
from fsdp_conformance.report.certificate import Certificate
from fsdp_conformance.report.expectations import Judged
from fsdp_conformance.report.formats import badge, ctrf, junit, sarif, trace
from fsdp_conformance.report.html import page
from fsdp_conformance.report.run_content import RunFile

#: The text of a run in each format.
FORMATS: dict[str, Callable[[RunFile, Certificate, Judged], str]] = {
    "badge": badge.text,
    "ctrf": ctrf.text,
    "html": page.page,
    "junit": junit.text,
    "markdown": markdown.summary,
    "sarif": sarif.text,
    "trace": trace.text,
}
