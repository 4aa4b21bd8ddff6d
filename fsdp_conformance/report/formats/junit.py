"""
Cases as tests in JUnit XML, which most CI systems show.

A test is named after its case, its class is the chapter, and its file the one that the adapter is in. A failure that
the list of known failures announces is a skipped test with the reason; one that the list does not expect, and an entry
whose failure is gone, fail.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator

from fsdp_conformance.contract import CHAPTERS
from fsdp_conformance.diagnosis.severity import severity_of
from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.report.certificate import Certificate
from fsdp_conformance.report.expectations import FAILED, NO_LIST, Judged, Mark, Standing, what_happened
from fsdp_conformance.report.formats.places import place_of
from fsdp_conformance.report.run_content import RunFile
from fsdp_conformance.report.terminal import render_failure
from fsdp_conformance.verdict import Verdict

#: Characters that XML 1.0 cannot hold.
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

#: The suite failed, or the adapter: nothing is known about the engine.
_ERRORS = frozenset({Verdict.ERROR_ADAPTER, Verdict.ERROR_SUITE})


def text(run: RunFile, certificate: Certificate, judged: Judged = NO_LIST) -> str:
    """The whole file: one suite, whose properties have the verdict and the engine."""
    implementation = run.header.get("implementation") or {}
    suite = ET.Element("testsuite", name=f"fsdp-conformance {certificate.profile}")
    properties = {
        "conformance_verdict": certificate.word,
        "conformance_implementation": f"{implementation.get('name', '')} {implementation.get('version', '')}".strip(),
        "conformance_run": run.path,
    }
    suite.append(_properties(properties))
    kinds = [_add_test(suite, record, run, judged.marks.get(record.case)) for record in run.records]
    counts = {"tests": len(kinds), **{f"{kind}s": kinds.count(kind) for kind in ("failure", "error")}}
    counts["skipped"] = kinds.count("skipped")
    for name, count in counts.items():
        suite.set(name, str(count))
    suite.set("time", f"{run.seconds:.3f}")
    started = str(run.header.get("started") or "")
    if started:
        suite.set("timestamp", started)
    suites = ET.Element("testsuites")
    suites.append(suite)
    ET.indent(suites)
    return ET.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _add_test(suite: ET.Element, record: CaseRecord, run: RunFile, mark: Mark | None) -> str:
    """Add the test of a case. Returns the name of the element that says how it ended; empty if it passed."""
    test = ET.SubElement(
        suite,
        "testcase",
        name=record.case,
        classname=f"{record.chapter}. {CHAPTERS.get(record.chapter, '?')}",
        time=f"{record.seconds:.3f}",
        file=place_of(record, run)[0],
    )
    test.append(_properties(dict(_facts(record, mark))))
    kind, message = _ending(record, mark)
    if kind:
        ending = ET.SubElement(test, kind, message=_readable(message), type=str(record.verdict))
        if record.verdict in FAILED:
            ending.text = _readable(render_failure(record, run=run.path))
    return kind


def _ending(record: CaseRecord, mark: Mark | None) -> tuple[str, str]:
    """The name of the element that says how a case ended, and its message; two empty texts if it passed."""
    if mark is not None and mark.standing is Standing.KNOWN:
        return "skipped", f"{record.verdict}, as expected: {mark.reason}"
    if mark is not None and mark.standing is Standing.GONE:
        return "failure", f"{record.verdict}, but its entry expects a failure: {mark.reason}"
    if record.verdict in _ERRORS:
        return "error", record.reason or what_happened(record)
    if record.verdict in FAILED:
        return "failure", what_happened(record)
    return ("", "") if record.verdict is Verdict.PASS else ("skipped", record.reason)


def _facts(record: CaseRecord, mark: Mark | None) -> Iterator[tuple[str, str]]:
    """The properties of a test, with the names that the user's own tests have."""
    yield "conformance_case", record.case
    yield "conformance_requirements", " ".join(record.requirements)
    yield "conformance_verdict", record.verdict
    severity = severity_of(record)
    if severity is not None:
        yield "conformance_severity", severity
    if mark is not None:
        yield "conformance_expectation", mark.sentence()


def _properties(values: dict[str, str]) -> ET.Element:
    properties = ET.Element("properties")
    for name, value in values.items():
        ET.SubElement(properties, "property", name=name, value=_readable(value))
    return properties


def _readable(text: str) -> str:
    """The text without characters that would make the file invalid."""
    return _NOT_XML.sub("�", text)
