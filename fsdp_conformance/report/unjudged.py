"""Records of cases that were not judged because their test ended without a verdict."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from fsdp_conformance import run_settings
from fsdp_conformance.errors import AdapterError, AdapterNotFound, EnvironmentUnavailable
from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.verdict import Verdict


def unjudged(
    about: Mapping[str, Any], reason: str, verdict: Verdict = Verdict.ERROR_SUITE, *, text: str = ""
) -> CaseRecord:
    """A record of the case that `about` describes (id, requirements, chapter, world_size), with `text` as traceback."""
    run = run_settings.current()
    return CaseRecord(
        case=about["id"],
        requirements=list(about["requirements"]),
        chapter=about["chapter"],
        verdict=verdict,
        reason=reason,
        traceback=text,
        world_size=about["world_size"],
        adapter=str((run_settings.description() or {}).get("identity", "")),
        device=run.device,
        repro=f"fsdp-conformance run --implementation {shlex.quote(run.implementation)} --case {about['id']}",
    )


def of_exception(about: Mapping[str, Any], raised: BaseException | None, *, text: str = "") -> CaseRecord:
    """The record of a test that ended without a verdict: the suite's fault, unless the exception says otherwise."""
    verdict = Verdict.ERROR_SUITE
    if isinstance(raised, AdapterError | AdapterNotFound):
        verdict = Verdict.ERROR_ADAPTER
    elif isinstance(raised, EnvironmentUnavailable):
        verdict = Verdict.NOT_RUN_ENV
    reason = f"{type(raised).__name__}: {raised}" if raised is not None else "the test ended without a verdict"
    return unjudged(about, reason, verdict, text=text)


def contradicted(record: CaseRecord, outcome: str, text: str) -> CaseRecord:
    """The record of a case that was judged PASS although its test did not pass: something happened afterwards."""
    record.verdict = Verdict.ERROR_SUITE
    record.reason = f"the verdict was PASS, but the test {outcome}: {last_line(text)}"
    record.traceback = text
    return record


def last_line(text: str) -> str:
    """The last non-blank line of a traceback."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no reason given"
