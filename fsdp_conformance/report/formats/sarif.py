"""
Findings as SARIF 2.1.0 (OASIS), which code hosts show as alerts: one result for each problem, not for each case.

A problem is placed at the innermost frame of the engine if the engine raised, else at the adapter's file, else nowhere.
Its fingerprint is made of what groups cases together, so that an alert keeps its identity from one run to the next.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp_conformance import contract
from fsdp_conformance.diagnosis.grouping import Group, grouped, requirement_of
from fsdp_conformance.diagnosis.headline import headline_of
from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.report.certificate import Certificate
from fsdp_conformance.report.run_content import RunFile
from fsdp_conformance.report.terminal import render_record
from fsdp_conformance.stack import engine_frames, frames_of_traceback
from fsdp_conformance.verdict import ACCUSING

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def text(run: RunFile, certificate: Certificate) -> str:
    """The whole file. The verdict of the run is among its properties."""
    groups = grouped(run.records)
    return document(
        version=str(run.header.get("suite", "")),
        rules=[_rule(id_) for id_ in sorted({requirement_of(group.first) for group in groups})],
        results=[_result(group, run) for group in groups],
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


def _result(group: Group, run: RunFile) -> dict[str, Any]:
    record = group.first
    finding = headline_of(record)
    key = [requirement_of(record), record.verdict, finding.check if finding else "", record.case]
    result: dict[str, Any] = {
        "ruleId": requirement_of(record),
        "level": "error" if record.verdict in ACCUSING else "warning",
        "message": {"text": render_record(record, others=group.others)},
        "partialFingerprints": fingerprint(key),
        "properties": {"cases": [one.case for one in group.cases], "verdict": record.verdict},
    }
    place = _place(record, run)
    if place is not None:
        result["locations"] = [location(*place)]
    return result


def _place(record: CaseRecord, run: RunFile) -> tuple[str, int] | None:
    """A file of this repository, and a line if one is known. Installed packages are not part of it."""
    for frame in engine_frames(frames_of_traceback(record.traceback)):
        file = relative(frame.file)
        if file is not None:
            return file, int(frame.line)
    spec = str((run.header.get("implementation") or {}).get("spec") or "")
    file = relative(spec.rpartition(":")[0]) if ".py:" in spec else None
    return (file, 1) if file is not None else None


def relative(file: str) -> str | None:
    """The path below the working directory, with slashes; None for any other file."""
    path = Path(file)
    if path.is_absolute():
        try:
            path = path.relative_to(Path.cwd())
        except ValueError:
            return None
    inside = ".." not in path.parts and not any(part in ("site-packages", "dist-packages") for part in path.parts)
    return path.as_posix() if inside else None
