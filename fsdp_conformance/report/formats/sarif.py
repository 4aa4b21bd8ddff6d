"""
Findings as SARIF 2.1.0 (OASIS), which code hosts show as alerts: one result for each problem, not for each case.

A problem is placed at the innermost frame of the engine if the engine raised, else at the adapter's file, else at the
run file: see `places`. One whose cases are all known failures is suppressed, which keeps it out of a review.
Its fingerprint is made of what groups cases together, so that an alert keeps its identity from one run to the next.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fsdp_conformance import contract
from fsdp_conformance.diagnosis.grouping import Group, grouped, requirement_of
from fsdp_conformance.diagnosis.headline import headline_of
from fsdp_conformance.report.certificate import Certificate
from fsdp_conformance.report.expectations import NO_LIST, Judged
from fsdp_conformance.report.formats.places import place_of
from fsdp_conformance.report.run_content import RunFile
from fsdp_conformance.report.terminal import render_record
from fsdp_conformance.verdict import ACCUSING

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def text(run: RunFile, certificate: Certificate, judged: Judged = NO_LIST) -> str:
    """The whole file. The verdict of the run is among its properties."""
    groups = grouped(run.records)
    return document(
        version=str(run.header.get("suite", "")),
        rules=[_rule(id_) for id_ in sorted({requirement_of(group.first) for group in groups})],
        results=[_result(group, run, judged) for group in groups],
        properties={"verdict": certificate.word, "profile": certificate.profile},
    )


def document(
    *,
    version: str,
    rules: Sequence[Mapping[str, Any]],
    results: Sequence[Mapping[str, Any]],
    properties: Mapping[str, Any],
) -> str:
    """A SARIF file with one run of this program."""
    driver = {"name": "fsdp-conformance", "version": version, "rules": rules}
    run = {"tool": {"driver": driver}, "results": results, "properties": properties}
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1, ensure_ascii=False) + "\n"


def location(file: str, line: int, message: str = "") -> dict[str, Any]:
    """A place in a file of the working directory; line 0 is the whole file."""
    physical: dict[str, Any] = {"artifactLocation": {"uri": file}}
    if line:
        physical["region"] = {"startLine": line}
    return {"physicalLocation": physical, **({"message": {"text": message}} if message else {})}


def fingerprint(parts: Iterable[str]) -> dict[str, str]:
    """The fingerprint by which an alert is recognised from run to run."""
    return {"fsdpConformance/v1": hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]}


def _rule(id_: str) -> dict[str, Any]:
    requirement = contract.load().requirements.get(id_)
    if requirement is None:
        return {"id": id_}
    return {
        "id": id_,
        "shortDescription": {"text": requirement.name},
        "fullDescription": {"text": requirement.sentence},
    }


def _result(group: Group, run: RunFile, judged: Judged) -> dict[str, Any]:
    record = group.first
    finding = headline_of(record)
    key = [requirement_of(record), record.verdict, finding.check if finding else "", record.case]
    result: dict[str, Any] = {
        "ruleId": requirement_of(record),
        "level": "error" if record.verdict in ACCUSING else "warning",
        "message": {"text": render_record(record, others=group.others, run=run.path)},
        "partialFingerprints": fingerprint(key),
        "locations": [location(*place_of(record, run))],
        "properties": {"cases": [one.case for one in group.cases], "verdict": record.verdict},
    }
    if group.severity is not None:
        result["properties"]["severity"] = group.severity
    marks = {one.case: judged.marks[one.case] for one in group.cases if one.case in judged.marks}
    if marks:
        result["properties"]["expectations"] = {case: mark.sentence() for case, mark in marks.items()}
    if all(map(judged.is_known, group.cases)):
        reasons = dict.fromkeys(mark.reason for mark in marks.values())
        result["suppressions"] = [{"kind": "external", "justification": "; ".join(reasons)}]
    return result
