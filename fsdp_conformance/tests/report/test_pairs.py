"""How many pairs a run covers: rows that pass, fail, are refused, or did not run."""

from __future__ import annotations

import pytest

from fsdp_conformance.contract.gate import empty_record
from fsdp_conformance.contract.profile import load_profile
from fsdp_conformance.outcome.records import DECLINED, CaseRecord
from fsdp_conformance.report.pairs import pair_coverage
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.verdict import Verdict

_IMPLEMENTATION = {"name": "an-engine", "capabilities": ["zero3", "clip_grad_norm"]}
_ENTRIES = [entry for entry in load_profile("core").entries if entry.id.startswith("R000/pairs-row")]


def _records(*verdicts: Verdict) -> list[CaseRecord]:
    records = []
    for entry, verdict in zip(_ENTRIES, verdicts, strict=False):
        record = empty_record(entry.case(), RunSettings(implementation="an-engine"), "cpu")
        record.verdict, record.comparisons = verdict, 10
        records.append(record)
    return records


def test_a_run_without_rows_says_nothing() -> None:
    """Other cases have no pairs."""
    assert pair_coverage([], _IMPLEMENTATION, "cpu") is None


def test_all_rows_cover_all_pairs() -> None:
    """If every row passes, no pair that the engine can be asked for is left."""
    coverage = pair_coverage(_records(*[Verdict.PASS] * len(_ENTRIES)), _IMPLEMENTATION, "cpu")

    assert coverage is not None
    assert coverage.covered == coverage.possible > 1000
    assert coverage.sentence().endswith("are in rows that pass")


@pytest.mark.parametrize("verdict", [Verdict.FAIL, Verdict.CRASH, Verdict.INCONCLUSIVE])
def test_rows_that_fail_cover_nothing(verdict: Verdict) -> None:
    """Their pairs are counted beside those of rows that pass, each once."""
    half = len(_ENTRIES) // 2
    coverage = pair_coverage(_records(*[Verdict.PASS] * half, *[verdict] * half), _IMPLEMENTATION, "cpu")

    assert coverage is not None
    assert 0 < coverage.covered < coverage.possible
    assert coverage.failing > 0
    assert coverage.covered + coverage.failing <= coverage.possible
    assert "only in rows that fail" in coverage.sentence()


def test_a_refused_row_covers_nothing() -> None:
    """It passes, because refusing is right, but nothing was trained."""
    records = _records(*[Verdict.PASS] * len(_ENTRIES))
    for record in records:
        record.measurements[DECLINED] = {"rank 0": "ValueError: no"}
    coverage = pair_coverage(records, _IMPLEMENTATION, "cpu")

    assert coverage is not None
    assert (coverage.covered, coverage.refused) == (0, coverage.possible)


def test_avoided_combinations_are_counted() -> None:
    """A row that ran without one is UNSUPPORTED, and counts with what it had."""
    avoids = [{"clipping": "2-norm", "rows": "uneven"}]
    everything = _records(*[Verdict.UNSUPPORTED] * len(_ENTRIES))
    coverage = pair_coverage(everything, {**_IMPLEMENTATION, "avoids": avoids}, "cpu")

    assert coverage is not None
    assert coverage.possible - coverage.covered >= 1
    assert "combinations that it avoids: 1" in coverage.sentence()
