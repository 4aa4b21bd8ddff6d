"""
In a rank: the adapter that a study asks for, and a copy of the evidence of every explanation on disk.

An implementation is named `studies.cause_recording:NAME`, where NAME is a known-wrong implementation of the package or
a class of `studies.small_defects`. Explanations get a tag, which leads from a finding to its evidence; `replayed` gives
the tagged evidence to any way to explain it.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fsdp_conformance.adapters import registry
from fsdp_conformance.diagnosis import causes
from fsdp_conformance.diagnosis.evidence import Evidence
from fsdp_conformance.mutants import MUTANTS
from fsdp_conformance.outcome.records import RankReport
from studies import small_defects

#: The directory for the evidence; ranks inherit the variable.
VARIABLE = "FSDP_CONFORMANCE_CAUSES"

_TAG = re.compile(r" ?\{evidence (\S+)\}$")
_numbers = itertools.count()


def __getattr__(name: str) -> Any:
    """The adapter; from then on this process records."""
    if name.startswith("_"):
        raise AttributeError(name)
    if VARIABLE in os.environ and causes.likely is not _recorded:
        causes.likely = _recorded
    if name in MUTANTS:
        return registry.load(MUTANTS[name].spec)
    return getattr(small_defects, name)


def _recorded(evidence: Evidence) -> str:
    tag = f"{os.getpid()}-{next(_numbers)}"
    torch.save(_plain(evidence), Path(os.environ[VARIABLE]) / f"{tag}.pt")
    return f"{_original(evidence) or ''} {{evidence {tag}}}"


_original: Callable[[Evidence], str | None] = causes.likely


def _plain(evidence: Evidence) -> dict[str, Any]:
    fields = {name: getattr(evidence, name) for name in Evidence.__slots__ if name != "supposed"}
    return fields | {"supposed": list(evidence.supposed())}


def collected(directory: Path) -> dict[str, dict[str, Any]]:
    """The evidence in a directory by tag; the files are removed."""
    recordings = {}
    for path in sorted(directory.glob("*.pt")):
        recordings[path.stem] = torch.load(path, weights_only=False)
        path.unlink()
    return recordings


def replayed(
    report: RankReport, evidence: Mapping[str, dict[str, Any]], explained: Callable[[Evidence], str | None]
) -> RankReport:
    """The report with every recorded explanation made again."""
    findings = []
    for finding in report.findings:
        tag = _TAG.search(finding.likely or "")
        if tag is not None:
            fields = dict(evidence[tag[1]])
            supposed = partial(tuple, fields.pop("supposed"))
            renewed = explained(Evidence(**fields, supposed=supposed))
        findings.append(finding if tag is None else replace(finding, likely=renewed))
    return replace(report, findings=findings)
