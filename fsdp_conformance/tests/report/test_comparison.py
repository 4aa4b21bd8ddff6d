"""Two runs side by side."""

from __future__ import annotations

import json

import pytest

from fsdp_conformance import codec
from fsdp_conformance.errors import UsageError
from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.report.comparison import compare, text
from fsdp_conformance.report.run_content import RunFile
from fsdp_conformance.tests.report.evidence import a_record
from fsdp_conformance.verdict import Verdict


def a_run(path: str, *records: CaseRecord, implementation: str = "mine", device: str = "cpu") -> RunFile:
    """A run file with these records."""
    settings = {"implementation": implementation, "device": device}
    return RunFile(path=path, header={"settings": settings}, records=list(records))


OLD = a_run(
    "old.jsonl",
    a_record("R001/probe-ws2"),
    a_record("R003/once-ws2"),
    a_record("R005/gone-ws2", Verdict.UNSUPPORTED),
    a_record("R070/order-ws2", Verdict.FAIL, reason="out of order"),
)
NEW = a_run(
    "new.jsonl",
    a_record("R003/once-ws2", Verdict.HANG, reason="rank 1 did not answer"),
    a_record("R001/probe-ws2"),
    a_record("R070/order-ws2"),
    a_record("R089/fresh-ws2"),
)


def test_differing_verdicts_and_lonely_cases_are_found() -> None:
    """The order of the cases makes no difference."""
    result = compare(OLD, NEW)

    assert [(item.case, item.old, item.new) for item in result.differing] == [
        ("R003/once-ws2", "PASS", "HANG"),
        ("R070/order-ws2", "FAIL", "PASS"),
    ]
    assert (result.compared, result.only_old, result.only_new) == (3, ("R005/gone-ws2",), ("R089/fresh-ws2",))
    assert result.counts == {"PASS": (2, 3), "UNSUPPORTED": (1, 0), "FAIL": (1, 0), "HANG": (0, 1)}


def test_a_run_does_not_differ_from_itself() -> None:
    """Nothing is reported."""
    result = compare(OLD, OLD)

    assert (result.differing, result.only_old, result.only_new) == ((), (), ())
    assert text(result).endswith("0 of 4 verdicts differ")


def test_the_text_says_what_differs_and_why() -> None:
    """The last line has the result."""
    assert text(compare(OLD, NEW)) == (
        "old: old.jsonl\n"
        "new: new.jsonl\n"
        "\n"
        "R003/once-ws2: PASS -> HANG\n"
        "  new: rank 1 did not answer\n"
        "R070/order-ws2: FAIL -> PASS\n"
        "  old: out of order\n"
        "R005/gone-ws2: only in the old run\n"
        "R089/fresh-ws2: only in the new run\n"
        "\n"
        "verdict            old   new\n"
        "PASS                 2     3\n"
        "UNSUPPORTED          1     0\n"
        "FAIL                 1     0\n"
        "HANG                 0     1\n"
        "2 of 3 verdicts differ; 2 cases are in only one of the runs"
    )


@pytest.mark.parametrize("changes", [{"implementation": "other"}, {"device": "cuda"}], ids=str)
def test_runs_of_different_things_are_compared_only_by_force(changes: dict[str, str]) -> None:
    """Their verdicts may differ for a good reason."""
    other = a_run("other.jsonl", a_record(), **changes)

    with pytest.raises(UsageError, match=f"different {next(iter(changes))}s: .* Compare anyway: --force"):
        compare(OLD, other)
    assert compare(OLD, other, force=True).compared == 1


def test_the_json_has_everything() -> None:
    """The content survives a round trip through JSON."""
    data = json.loads(json.dumps(codec.plain(compare(OLD, NEW))))

    assert data["differing"][0] == {
        "case": "R003/once-ws2", "old": "PASS", "new": "HANG", "old_reason": "", "new_reason": "rank 1 did not answer",
    }  # fmt: skip
    assert data["counts"]["PASS"] == [2, 3]
