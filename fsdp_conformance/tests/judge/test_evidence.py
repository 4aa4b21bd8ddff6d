"""The evidence that a record keeps of its ranks' reports, and verdicts that do not follow from it."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_conformance.contract.profile import load_profile
from fsdp_conformance.judge import Observed, contradictions, judge, keep_evidence
from fsdp_conformance.judge.evidence import COMMON
from fsdp_conformance.outcome.records import DECLINED, CaseRecord, CheckCount, RankReport
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.tests.report.evidence import a_case, a_finding, a_record, a_report, an_error, exits, failed
from fsdp_conformance.verdict import Verdict


def judged(*reports: RankReport, declared: str = "", **case: Any) -> CaseRecord:
    """The record of a case in which the ranks reported this, with its evidence."""
    made = a_case(**case)
    flags = frozenset(declared.split())
    record = judge(made, Observed(reports=reports, exits=exits(len(reports)), declared=flags), RunSettings())
    record.refereed = True
    return keep_evidence(record, reports)


def problems(record: CaseRecord, declared: str = "", settings: RunSettings | None = None, **case: Any) -> list[str]:
    """The contradictions of a record."""
    flags = frozenset(declared.split())
    return contradictions(record, a_case(**case), declared=lambda _: flags, settings=settings or RunSettings())


# What is kept.


def test_a_pass_keeps_what_each_rank_compared() -> None:
    """Checks, flags and digests; nothing that the verdict does not depend on."""
    reports = [
        a_report(rank, asked=["zero3"], schedule=["all_gather"], notes=["a note"], seconds={"training": 1.0})
        for rank in range(2)
    ]
    record = judged(*reports, declared="zero3")

    assert record.verdict is Verdict.PASS
    assert record.evidence == [RankReport(rank=rank, checks=reports[0].checks, asked=["zero3"]) for rank in range(2)]


def test_digests_that_all_ranks_have_become_one() -> None:
    """It depends on each of them; those that only some ranks have are kept as they are."""
    labels = {"params step 0 a": "1" * 64, "params step 0 b": "2" * 64}
    record = judged(a_report(0, digests={**labels, "only here": "3" * 64}), a_report(1, digests=labels))
    other = judged(*(a_report(rank, digests={**labels, "params step 0 b": "4" * 64}) for rank in range(2)))
    first, second = (report.digests for report in record.evidence)

    assert set(first) == {COMMON, "only here"}
    assert set(second) == {COMMON}
    assert first[COMMON] == second[COMMON] != other.evidence[0].digests[COMMON]


def test_a_rank_without_digests_keeps_none() -> None:
    """There is nothing in common."""
    record = judged(a_report(0, digests={"params": "1" * 64}), a_report(1))

    assert [report.digests for report in record.evidence] == [{"params": "1" * 64}, {}]


def test_a_failure_keeps_nothing() -> None:
    """There is nothing to gain from forging it."""
    record = judged(a_report(0, a_finding()), a_report(1))

    assert (record.verdict, record.evidence) == (Verdict.FAIL, [])


def test_what_decides_is_kept() -> None:
    """It stays for any later version of the judge."""
    decisive: dict[str, Any] = {
        "asked": ["zero3"],
        "unobserved": ["full_grads"],
        "not_run": "no device",
        "inconclusive": "the references disagree",
        "error": an_error(),
    }
    report = a_report(0, a_finding(), **decisive)
    record = keep_evidence(a_record(verdict=Verdict.PASS), [report])

    assert record.evidence == [report]


def test_no_report_leaves_no_evidence() -> None:
    """Ranks that never started leave no report."""
    assert keep_evidence(a_record(verdict=Verdict.NOT_RUN_ENV), [None, None]).evidence == []


def test_a_missing_report_is_not_kept() -> None:
    """A rank that another machine could not run has none."""
    reports = [a_report(0, comparisons=0, not_run="no device"), None]
    record = keep_evidence(a_record(verdict=Verdict.NOT_RUN_ENV), reports)

    assert [report.rank for report in record.evidence] == [0]


# What contradicts itself.


def test_honest_records_do_not_contradict_themselves() -> None:
    """A pass, a refusal, a case that never ran because of a flag, and one that this machine cannot run."""
    flag: dict[str, Any] = {"needs": ("frozen_mixed",)}
    refused = [
        failed(rank, an_error("frozen_mixed is not supported", blame="refusal", capability="frozen_mixed"))
        for rank in range(2)
    ]
    refusal = judged(*refused, **flag)
    never = a_record(verdict=Verdict.UNSUPPORTED, measurements={"undeclared": ["zero3"]})

    assert problems(judged(a_report(0), a_report(1))) == []
    assert (refusal.verdict, problems(refusal, **flag)) == (Verdict.UNSUPPORTED, [])
    assert problems(never, needs=("zero3",)) == []
    assert problems(a_record(verdict=Verdict.NOT_RUN_ENV), environment=("cuda",)) == []


@pytest.mark.parametrize("verdict", [Verdict.FAIL, Verdict.HANG, Verdict.ERROR_SUITE, Verdict.DISABLED])
def test_verdicts_that_do_no_good_are_believed(verdict: Verdict) -> None:
    """The rest of the record makes no difference."""
    assert problems(a_record("R001/probe-ws2", verdict, a_finding())) == []


def test_a_refusal_may_have_consequences() -> None:
    """Peers of the rank that refused lose it. A PASS has none."""
    flag: dict[str, Any] = {"needs": ("frozen_mixed",)}
    refusing = failed(0, an_error("no", blame="refusal", capability="frozen_mixed"))
    lost = failed(1, an_error("Connection closed by peer", kind="builtins.RuntimeError", time=2.0))
    record = judged(refusing, lost, **flag)
    passed = judged(a_report(0), a_report(1))
    passed.consequences = ["rank 1 lost a peer"]

    assert (record.verdict, len(record.consequences), problems(record, **flag)) == (Verdict.UNSUPPORTED, 1, [])
    assert problems(passed) == ["PASS with 1 finding"]


def test_findings_are_counted() -> None:
    """The text counts findings in words."""
    record = judged(a_report(0), a_report(1))
    record.findings = [a_finding(), a_finding()]

    assert problems(record) == ["PASS with 2 findings"]


def test_a_pass_needs_the_flags_that_are_asked_for_before_it_runs() -> None:
    """All of them are named; a flag that only the model asks for is not needed."""
    record = judged(a_report(0), a_report(1))

    assert problems(record, needs=("zero3", "no_sync")) == ["PASS after it ran, but zero3, no_sync is not declared"]
    assert problems(record, needs=("frozen_mixed",)) == []


@pytest.mark.parametrize(("declared", "problems"), [("any_accelerator", 0), ("", 1)])
def test_flags_are_weighed_on_the_device_of_the_case(declared: str, problems: int) -> None:
    """A case that ran on the simulated accelerator needs an engine that knows others than CUDA."""
    record = judged(a_report(0), a_report(1))
    record.device = "sim"
    flags = {"sim": frozenset(declared.split()), "cpu": frozenset({"zero3"})}
    case = a_case(environment=("accelerator",))

    assert len(contradictions(record, case, declared=flags.__getitem__, settings=RunSettings())) == problems


@pytest.mark.parametrize(("case_id", "is_right"), [("R000/pairs-row1-ws1", True), ("R001/exact-probe-ws2", False)])
def test_a_combination_that_all_ranks_refuse_compares_no_values(case_id: str, is_right: bool) -> None:
    """Rows may be refused, and what every engine must train may not."""
    case = load_profile("core").by_id[case_id].case()
    checks = {"refusals": CheckCount(comparisons=1, elements=1)}
    reports = [a_report(rank, checks=checks) for rank in range(case.world_size)]
    observed = Observed(reports=reports, exits=exits(case.world_size))
    record = keep_evidence(judge(case, observed, RunSettings()), reports)
    record.measurements[DECLINED] = "ValueError: not together"
    lies = contradictions(record, case, declared=lambda _: frozenset(), settings=RunSettings())

    assert (not any("must make" in lie for lie in lies)) is is_right, lies
