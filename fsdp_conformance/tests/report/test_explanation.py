"""`explain` says what a row of the pair profile combines, and what of it an engine is asked for."""

from __future__ import annotations

from typing import Any

from fsdp_conformance import contract
from fsdp_conformance.contract.profile import load_profile
from fsdp_conformance.report.explanation import explain
from fsdp_conformance.report.run_content import RunFile
from fsdp_conformance.scenarios import rows


def _header(capabilities: list[str]) -> dict[str, Any]:
    return {"implementation": {"capabilities": capabilities, "avoids": []}}


def test_what_a_row_combines() -> None:
    """All its values; with a run, also those that are left of them for its engine."""
    profile, known = load_profile("core-2026.11"), contract.load()
    case = next(entry.id for entry in profile.entries if rows.number_of(entry.id) == 3)
    row = rows.pairs()[2]
    header = _header(sorted(row.needs))
    plain = _header([])

    def lines(run: RunFile | None) -> dict[str, str]:
        text = explain(case, known, profile, run, width=10_000)
        return {line[:12].strip(): line[12:] for line in text.splitlines()}

    assert lines(None)["combines"] == row.describe()
    assert "asked for" not in lines(None)
    assert "asked for" not in lines(RunFile(path="run.jsonl", header=header))
    left = lines(RunFile(path="run.jsonl", header=plain))["asked for"]
    assert left == rows.for_engine(3, frozenset()).scenario.describe()
    assert {*left.split(", ")} < {*row.describe().split(", ")}
