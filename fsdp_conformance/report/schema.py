"""
The lines of a run file as types, and the JSON schema that follows from them.

    python -m fsdp_conformance.report.schema > fsdp_conformance/report/schema.json

The schema describes what this version writes. Reading is more lenient in one way: other versions may have more or fewer
keys in what the header and the footer contain.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from fsdp_conformance.adapters.registry import AdapterDescription
from fsdp_conformance.outcome.records import FIGURES, NOT_FINITE, CaseRecord, Finding, RankReport
from fsdp_conformance.report.certificate import Certificate, Counts
from fsdp_conformance.report.run_content import FORMAT, Note, Resume, Start
from fsdp_conformance.run_settings import RunSettings

_HASH = {"pattern": "^[0-9a-f]{64}$"}
_Sha256 = Annotated[str, Meta(extra_json_schema=_HASH)]


@dataclass(frozen=True, kw_only=True, slots=True)
class RanProfile:
    """The profile that was run."""

    name: str
    sha256: _Sha256
    cases: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """The machine and the versions."""

    torch: str
    python: str
    platform: str
    cores: int
    device: str
    executable: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """The first line."""

    suite: str
    suite_sha256: _Sha256
    interpretation: int
    profile: RanProfile
    implementation: AdapterDescription
    environment: Environment
    settings: RunSettings
    started: str
    """UTC, ISO 8601."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceCounts:
    """How many references were computed, taken from the store, and trained again to check the store."""

    computed: int
    shared: int
    checked: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Footer:
    """The last line; missing if the run was aborted."""

    finished: str
    seconds: float
    counts: Counts
    references: ReferenceCounts
    certificate: Certificate


#: Other versions may write more into these.
_OPEN = {kind.__name__ for kind in (AdapterDescription, Environment, RunSettings)}

#: By the `type` of the line.
LINES: dict[str, Any] = {
    "header": Header,
    "start": Start,
    "case": CaseRecord,
    "note": Note,
    "resume": Resume,
    "footer": Footer,
}


def schema() -> dict[str, Any]:
    """The JSON schema of a line: the types of LINES, each with its `type` and `chain`."""
    _, definitions = msgspec.json.schema_components(LINES.values(), ref_template="#/$defs/{name}")
    for name, definition in definitions.items():
        fields = definition.get("properties", {})
        for stated in fields.values():
            stated.pop("default", None)
        if fields:
            definition["additionalProperties"] = name in _OPEN
            # Empty fields of a rank's evidence are left out, everything else is written in full.
            definition["required"] = ["rank"] if name == RankReport.__name__ else list(fields)
    for figure in FIGURES:
        definitions[Finding.__name__]["properties"][figure]["anyOf"].append({"enum": list(NOT_FINITE)})
    for kind, line in LINES.items():
        definition = definitions.pop(line.__name__)
        definition["properties"] = {
            "type": {"const": kind},
            **({"format": {"const": FORMAT}} if line is Header else {}),
            **definition["properties"],
            "chain": {"type": "string", **_HASH, "description": "sha256 of this line and of all before it"},
        }
        definition["required"] = list(definition["properties"])
        definitions[kind] = definition
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "One line of an fsdp-conformance run file",
        "oneOf": [{"$ref": f"#/$defs/{kind}"} for kind in LINES],
        "$defs": definitions,
    }


def text() -> str:
    """The schema as it is shipped: a line for each definition."""
    content = schema()
    definitions = content.pop("$defs")
    lines = [f" {json.dumps(name)}: {json.dumps(definition)}" for name, definition in definitions.items()]
    return json.dumps(content)[:-1] + ', "$defs": {\n' + ",\n".join(lines) + "\n}}\n"


if __name__ == "__main__":
    print(text(), end="")
