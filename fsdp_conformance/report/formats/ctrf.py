"""Cases as tests in the Common Test Report Format (ctrf.io), which dashboards collect across tools."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from fsdp_conformance.contract import CHAPTERS
from fsdp_conformance.diagnosis.severity import severity_of
from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.report.certificate import Certificate
from fsdp_conformance.report.expectations import FAILED, NO_LIST, Judged, Mark, Standing
from fsdp_conformance.report.run_content import RunFile
from fsdp_conformance.report.terminal import render_record
from fsdp_conformance.verdict import Verdict

#: What the format calls each verdict. An inconclusive case has neither passed nor failed.
_STATUS = {
    Verdict.PASS: "passed",
    Verdict.XFAIL: "skipped",
    Verdict.UNSUPPORTED: "skipped",
    Verdict.DISABLED: "skipped",
    Verdict.NOT_RUN_ENV: "skipped",
    Verdict.INCONCLUSIVE: "other",
}
_FAILED = "failed"

#: What it calls a case of which the list of known failures says something, whatever the verdict.
_OF_STANDING: Mapping[Standing | None, str] = {Standing.KNOWN: "other", Standing.GONE: _FAILED}


def text(run: RunFile, certificate: Certificate, judged: Judged = NO_LIST) -> str:
    """The whole file. Times are milliseconds; the end is the start plus the run's own seconds."""
    tests = [_test(record, run.path, judged.marks.get(record.case)) for record in run.records]
    counts = Counter(test["status"] for test in tests)
    start = _milliseconds(str(run.header.get("started") or ""))
    implementation = run.header.get("implementation") or {}
    content = {
        "reportFormat": "CTRF",
        "specVersion": "0.0.0",
        "results": {
            "tool": {"name": "fsdp-conformance", "version": str(run.header.get("suite", ""))},
            "summary": {
                "tests": len(run.records),
                **{name: counts[name] for name in ("passed", "failed", "pending", "skipped", "other")},
                "start": start,
                "stop": start + round(run.seconds * 1000),
            },
            "environment": {
                "appName": str(implementation.get("name", "")),
                "appVersion": str(implementation.get("version", "")),
                "extra": {"verdict": certificate.word, "profile": certificate.profile},
            },
            "tests": tests,
        },
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _test(record: CaseRecord, run: str, mark: Mark | None) -> dict[str, Any]:
    standing = mark.standing if mark is not None else None
    status = _OF_STANDING.get(standing) or _STATUS.get(record.verdict, _FAILED)
    test: dict[str, Any] = {
        "name": record.case,
        "status": status,
        "rawStatus": record.verdict,
        "duration": round(record.seconds * 1000),
        "suite": f"{record.chapter}. {CHAPTERS.get(record.chapter, '?')}",
        "tags": record.requirements,
    }
    if record.reason:
        test["message"] = record.reason
    if record.verdict in FAILED:
        test["trace"] = render_record(record, run=run)
    severity = severity_of(record)
    extra = {"severity": severity, "expectation": mark.sentence() if mark is not None else None}
    if any(extra.values()):
        test["extra"] = {name: value for name, value in extra.items() if value}
    return test


def _milliseconds(moment: str) -> int:
    """Since 1970, or 0 for a header without a start."""
    try:
        return round(datetime.fromisoformat(moment).timestamp() * 1000)
    except ValueError:
        return 0
