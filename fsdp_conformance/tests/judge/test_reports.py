"""The judge on ranks that all got through: findings, digests, vacuity, what is kept in the record."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_conformance.judge import Observed, contradictions, judge, keep_evidence
from fsdp_conformance.judge.findings import MAX_FINDINGS
from fsdp_conformance.outcome.records import CaseRecord, CheckCount, Finding, RankReport
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.tests.report.evidence import a_case, a_finding, a_report, exits
from fsdp_conformance.verdict import Verdict


def judged(*reports: RankReport, declared: str = "", **case: Any) -> CaseRecord:
    """The verdict on ranks that all reported and ended well."""
    return judge(
        a_case(world_size=len(reports), **case),
        Observed(reports=reports, exits=exits(len(reports)), declared=frozenset(declared.split()), seconds=1.5),
        RunSettings(),
    )


def test_comparisons_that_all_held_pass() -> None:
    """PASS says how much was looked at, over all ranks."""
    reports = [a_report(0, comparisons=4), a_report(1, comparisons=3)]

    observed = Observed(reports=reports, exits=exits(2))
    assert judge(a_case(), observed, RunSettings(implementation="")) == CaseRecord(
        case="R001/probe-ws2",
        requirements=["R001", "R003"],
        chapter="A",
        verdict=Verdict.PASS,
        world_size=2,
        device="cpu",
        ranks="processes",
        comparisons=7,
        elements=70,
        exits=exits(2),
        repro="fsdp-conformance run --case R001/probe-ws2",
    )


def test_the_record_says_what_the_case_ran_on() -> None:
    """Where it is not the default, the command to run it again asks for it."""
    record = judge(
        a_case(),
        Observed(reports=[a_report(0), a_report(1)], exits=exits(2), device="cuda", seconds=1.5),
        RunSettings(ranks="simulated"),
    )

    assert (record.device, record.ranks, record.seconds) == ("cuda", "simulated", 1.5)
    assert record.repro == (
        "fsdp-conformance run --implementation torch-fsdp2 --device cuda --ranks simulated --case R001/probe-ws2"
    )


def test_what_cannot_be_seen_does_not_pass() -> None:
    """UNSUPPORTED, with the flags that would show it, whatever else was compared."""
    blind = a_report(1, unobserved=["full_buffers", "full_grads"])
    record = judged(a_report(0), blind)

    assert (record.verdict, record.reason) == (
        Verdict.UNSUPPORTED,
        "R001 cannot be judged: full_buffers, full_grads are not declared",
    )
    assert record.measurements["undeclared"] == ["full_buffers", "full_grads"]


def test_combinations_that_an_adapter_avoids_are_named() -> None:
    """They are no capabilities, and the row was run without them."""
    record = judged(a_report(0, unobserved=["clipping 2-norm and offload CPU"]), a_report(1))

    assert (record.verdict, record.reason) == (
        Verdict.UNSUPPORTED,
        "judged without what the adapter avoids: clipping 2-norm and offload CPU",
    )


def test_what_cannot_be_seen_is_part_of_the_evidence() -> None:
    """The verdict follows from what the record keeps, and PASS does not."""
    blind = a_report(0)
    blind.unobserved = ["full_buffers"]
    reports = [blind, a_report(1)]
    record = keep_evidence(judged(*reports), reports)
    record.refereed = True

    def problems(verdict: Verdict) -> list[str]:
        record.verdict = verdict
        return contradictions(record, a_case(), declared=lambda device: frozenset(), settings=RunSettings())

    assert problems(Verdict.UNSUPPORTED) == []
    assert problems(Verdict.PASS) == [
        "stated PASS, but its evidence yields UNSUPPORTED: R001 cannot be judged: full_buffers is not declared"
    ]


def test_what_cannot_be_seen_excuses_no_finding() -> None:
    """A finding stays a finding, and is not a matter of loud refusal."""
    blind = a_report(0, findings=[a_finding()])
    blind.unobserved = ["full_buffers"]
    record = judged(blind, a_report(1))

    assert record.verdict is Verdict.FAIL
    assert [finding.requirement for finding in record.findings] == [a_finding().requirement]


# Faults that had nothing to strike.

_UNMET = {"delay of 15 ms before every all_gather on ranks [0]": ["all_gather"]}


def test_a_fault_without_its_collective_makes_the_case_inapplicable() -> None:
    """UNSUPPORTED with the reason: an engine that gathers by broadcasts shows nothing about late all-gathers."""
    schedule = ["setup all_gather 8B int64 [0,1]", "step broadcast 64B float32 [0,1]"]
    unmet = {**_UNMET, "delay of 5 ms before every reduction": ["reduce_scatter", "all_reduce"]}
    record = judged(a_report(0, unmet=unmet, schedule=schedule), a_report(1, schedule=schedule))

    assert record.verdict is Verdict.UNSUPPORTED
    assert record.reason == (
        "the engine issues no all_gather, and no reduce_scatter or all_reduce in training, so the case does not apply: "
        "delay of 15 ms before every all_gather on ranks [0]; delay of 5 ms before every reduction never struck"
    )
    assert record.measurements["inapplicable"] == list(unmet)


def test_a_fault_without_its_collective_is_part_of_the_evidence() -> None:
    """The verdict follows from what the record keeps; PASS does not, nor would it if a rank had the collective."""
    reports = [a_report(0, unmet=_UNMET), a_report(1, schedule=["step broadcast 64B float32 [0,1]"])]
    record = keep_evidence(judged(*reports), reports)
    record.refereed = True
    case = a_case(faults=tuple(_UNMET))

    def problems() -> list[str]:
        return contradictions(record, case, declared=lambda device: frozenset(), settings=RunSettings())

    assert problems() == []
    record.evidence[1].schedule = ["forward all_gather 64B float32 [0,1]"]
    assert "its evidence yields ERROR_SUITE" in problems()[0]
    record.evidence[1].schedule = []
    record.verdict = Verdict.PASS
    assert "stated PASS, but its evidence yields UNSUPPORTED" in problems()[0]


def test_a_fault_without_its_collective_excuses_no_finding() -> None:
    """Wrong numbers are a FAIL whatever could not be tried."""
    assert judged(a_report(0, a_finding(), unmet=_UNMET), a_report(1)).verdict is Verdict.FAIL


def test_a_fault_that_missed_a_collective_of_its_kind_is_the_suites_error() -> None:
    """Another rank has it in its schedule, so the plan of faults, or the recording, is wrong."""
    line = "forward all_gather 64B float32 [0,1]"
    record = judged(a_report(0, unmet=_UNMET), a_report(1, schedule=[line]))

    assert record.verdict is Verdict.ERROR_SUITE
    assert record.reason == f"{next(iter(_UNMET))} never struck, although rank 1 issues {line}"


# Vacuity.


def test_a_rank_that_compared_nothing_is_the_suites_error() -> None:
    """Zero on any rank, whatever the others did."""
    record = judged(a_report(0), a_report(1, comparisons=0))

    assert record.verdict is Verdict.ERROR_SUITE
    assert record.reason == "rank 1 made no comparison"


def test_a_rank_without_checks_is_the_suites_error() -> None:
    """No check ran there."""
    assert judged(a_report(0), a_report(1, checks={})).verdict is Verdict.ERROR_SUITE


def test_a_check_that_compared_nothing_on_any_rank_is_the_suites_error() -> None:
    """The others do not hide it."""
    idle = {"gradient parity": CheckCount(comparisons=4), "schedule": CheckCount()}
    record = judged(a_report(0, checks=idle), a_report(1, checks=idle))

    assert record.verdict is Verdict.ERROR_SUITE
    assert "check 'schedule' made no comparison on any rank" in record.reason


def test_a_check_that_had_nothing_to_compare_on_one_rank_is_no_error() -> None:
    """A rank may own an empty shard."""
    both = {"parity": CheckCount(comparisons=1), "partition": CheckCount(comparisons=1)}
    empty = {"parity": CheckCount(comparisons=1), "partition": CheckCount()}

    assert judged(a_report(0, checks=both), a_report(1, checks=empty)).verdict is Verdict.PASS


# Findings.


def test_a_finding_on_any_rank_fails() -> None:
    """The reason is the first divergence."""
    record = judged(a_report(0), a_report(1, a_finding(rank=1)))

    assert record.verdict is Verdict.FAIL
    assert record.reason == (
        "R003 (gradient parity): gradient of '0.weight': expected 0.5, got 1.0 "
        "[step 0 · reduce · '0.weight' · rank 1 · element [3, 1]]"
    )


@pytest.mark.parametrize("needs", [(), ("frozen_mixed",)])
def test_the_reason_is_the_finding_that_says_most(needs: tuple[str, ...]) -> None:
    """Not the first, if that is a loss and the gradients behind it name a cause."""
    loss = a_finding(check="loss parity", message="loss differs", phase="forward", likely=None)
    record = judged(a_report(0, loss, a_finding()), a_report(1), needs=needs)

    assert record.verdict is Verdict.FAIL
    assert "gradient of '0.weight': expected 0.5, got 1.0" in record.reason
    assert record.findings[-2:] == [loss, a_finding()]


def test_a_finding_on_a_rank_that_counted_nothing_fails() -> None:
    """A finding outranks a missing count."""
    assert judged(a_report(0), a_report(1, a_finding(rank=1), comparisons=0)).verdict is Verdict.FAIL


def test_findings_come_in_the_order_of_divergence() -> None:
    """Structure first, then step by step in the order of phases, then rank; what has no step and is late comes last."""
    scrambled = [
        a_finding("R004", step=1, phase="forward"),
        a_finding("R010", step=None, phase="eval"),
        a_finding("R003", step=0, phase="reduce"),
        a_finding("R002", step=0, phase="step"),
        a_finding("R001", step=0, phase="forward"),
        a_finding("R188", step=None, phase=None),
        a_finding("R019", step=None, phase="init"),
    ]
    record = judged(a_report(0, *scrambled), a_report(1))

    assert [item.requirement for item in record.findings] == ["R019", "R188", "R001", "R003", "R002", "R004", "R010"]


def test_findings_of_one_phase_keep_the_order_in_which_they_were_made() -> None:
    """The order of parameters is the model's."""
    names = ["2.weight", "0.weight", "1.bias"]
    record = judged(a_report(0, *(a_finding(fqn=name) for name in names)), a_report(1))

    assert [item.fqn for item in record.findings] == names


def test_a_finding_about_the_whole_job_comes_before_those_of_a_rank() -> None:
    """At the same place, whichever rank made it."""
    record = judged(a_report(0), a_report(1, a_finding(rank=1)), a_report(2, a_finding(rank=None, got="3.0")))

    assert [item.rank for item in record.findings] == [None, 1]


def test_a_digest_comes_before_the_later_findings_of_its_step() -> None:
    """It counts as the first of its rank."""
    seen = [a_finding(fqn=name, step=2, phase=None) for name in ("0.weight", "1.weight")]
    digests = [{"params step 2 2.weight": digest} for digest in ("aa", "bb")]
    record = judged(a_report(0, *seen, digests=digests[0]), a_report(1, digests=digests[1]))

    assert [item.fqn for item in record.findings] == ["0.weight", "2.weight", "1.weight"]


@pytest.mark.parametrize(
    ("ranks", "words"),
    [((0, 1, 2), " (the same on every rank)"), ((0, 2), " (the same on ranks 0, 2)"), ((1,), "")],
)
def test_a_finding_that_ranks_share_is_said_once(ranks: tuple[int, ...], words: str) -> None:
    """The lowest rank stands for all."""
    reports = [a_report(rank, *([a_finding(rank=rank)] if rank in ranks else [])) for rank in range(3)]
    record = judged(*reports)

    assert [(item.rank, item.message) for item in record.findings] == [
        (ranks[0], "gradient of '0.weight': expected 0.5, got 1.0" + words)
    ]


def test_findings_with_other_values_are_kept_apart() -> None:
    """Each rank has its own argument."""
    record = judged(a_report(0, a_finding(rank=0)), a_report(1, a_finding(rank=1, got="3.0")))

    assert [item.rank for item in record.findings] == [0, 1]


def test_a_finding_that_a_rank_makes_twice_is_said_once() -> None:
    """Two checks may see the same."""
    record = judged(a_report(0, a_finding(), a_finding()), a_report(1))

    assert [item.message for item in record.findings] == [a_finding().message]


def test_a_finding_without_a_rank_stays_without() -> None:
    """Such as one about the whole job."""
    assert judged(a_report(0, a_finding(rank=None)), a_report(1)).findings[0].rank is None


def test_endless_findings_are_cut_and_the_cut_is_said() -> None:
    """The first divergence is what matters."""
    many = [a_finding(step=step) for step in range(MAX_FINDINGS + 3)]
    record = judged(a_report(0, *many), a_report(1))

    assert len(record.findings) == MAX_FINDINGS
    assert record.notes == ["3 further findings were left out of this record"]


# Undeclared flags.


def test_an_undeclared_flag_that_works_is_under_declared() -> None:
    """The verdict is PASS, and the report mentions it."""
    record = judged(a_report(0), a_report(1), needs=("frozen_mixed",))

    assert record.verdict is Verdict.PASS
    assert record.notes == ["under-declared: frozen_mixed"]


def test_an_undeclared_flag_that_trains_wrongly_fails_loud_refusal() -> None:
    """R000 first, with the place of the first divergence; the finding itself stays."""
    record = judged(a_report(0, a_finding()), a_report(1), needs=("frozen_mixed", "shared_across_units"))

    assert record.verdict is Verdict.FAIL
    assert [item.requirement for item in record.findings] == ["R000", "R003"]
    assert record.findings[0].message == (
        "frozen_mixed, shared_across_units is neither declared nor refused, and training gave wrong results: "
        "gradient of '0.weight': expected 0.5, got 1.0"
    )
    assert record.findings[0].where() == record.findings[1].where()


def test_a_declared_flag_that_trains_wrongly_fails_its_own_requirement() -> None:
    """No talk of refusal."""
    record = judged(a_report(0, a_finding()), a_report(1), needs=("frozen_mixed",), declared="frozen_mixed")

    assert [item.requirement for item in record.findings] == ["R003"]


# Digests.


def with_digests(rank: int, digest: str, label: str = "params step 2 0.weight", **changes: Any) -> RankReport:
    """A rank that has one digest."""
    return a_report(rank, digests={label: digest}, digest_requirements={"params": "R007"}, **changes)


def test_equal_digests_pass() -> None:
    """They also pass if a rank has none of that label."""
    assert judged(with_digests(0, "aa"), with_digests(1, "aa"), a_report(2)).verdict is Verdict.PASS


def test_a_rank_that_differs_is_named() -> None:
    """Step, name and rank come from the label and from the minority; long digests are cut."""
    record = judged(with_digests(0, "a" * 90), with_digests(1, "b" * 90), with_digests(2, "a" * 90))

    assert record.findings == [
        Finding(
            requirement="R007",
            check="equality over ranks",
            message="params step 2 0.weight differs between ranks: ranks 0, 2 aaaaaaaaaaaa | rank 1 bbbbbbbbbbbb",
            step=2,
            fqn="0.weight",
            rank=1,
            got="b" * 80,
            expected="a" * 80,
            bound="bitwise",
            likely="ranks drift apart: rank 1 and ranks 0, 2 hold different values",
        )
    ]


def test_of_several_groups_that_differ_the_one_with_the_lowest_rank_is_named() -> None:
    """Not the largest of them, nor the one with the lowest digest."""
    digests = ["cc", "aa", "bb", "bb", "bb", "aa"]
    record = judged(*(with_digests(rank, digest) for rank, digest in enumerate(digests)))

    assert [(item.rank, item.got, item.expected) for item in record.findings] == [(0, "cc", "bb")]


def test_of_two_ranks_the_first_is_taken_as_right() -> None:
    """At least one rank has to be."""
    assert judged(with_digests(0, "aa"), with_digests(1, "bb")).findings[0].rank == 1


def test_the_longest_prefix_names_the_requirement() -> None:
    """By default it is the one that the case is about."""
    label = "buffers step 0 bn.running_mean"
    demands = {"buffers": "R130", "buffers step": "R133"}
    reports = [a_report(rank, digests={label: str(rank)}, digest_requirements=demands) for rank in (0, 1)]
    unnamed = [a_report(rank, digests={label: str(rank)}) for rank in (0, 1)]

    assert judged(*reports).findings[0].requirement == "R133"
    assert judged(*unnamed).findings[0].requirement == "R001"


def test_a_label_without_step_or_name_is_understood() -> None:
    """Whatever can be read from it is."""
    labels = {"params": (None, None), "params step 3": (3, None), "params 0.weight": (None, "0.weight")}
    findings = [judged(with_digests(0, "a", label), with_digests(1, "b", label)).findings[0] for label in labels]

    assert [(finding.step, finding.fqn) for finding in findings] == list(labels.values())


@pytest.mark.parametrize(
    ("theirs", "index", "got", "expected"),
    [
        (["a", "x", "c"], 1, "x", "b"),
        (["a", "b"], 2, "none", "c"),
        (["a", "b", "c", "d"], 3, "d", "none"),
    ],
)
def test_schedules_that_differ_show_the_first_collective(
    theirs: list[str], index: int, got: str, expected: str
) -> None:
    """A changed, a missing and an additional one."""
    ours = ["a", "b", "c"]
    reports = [
        a_report(rank, digests={"schedule": str(lines)}, digest_requirements={"schedule": "R067"}, schedule=lines)
        for rank, lines in enumerate([ours, theirs])
    ]
    (finding,) = judged(*reports).findings

    assert finding.requirement == "R067"
    assert finding.message == (
        f"collective {index} differs between ranks: expected {expected} as on rank 0, got {got} on rank 1"
    )
    assert finding.likely == "ranks issue different collectives"


def test_other_digests_do_not_show_schedules() -> None:
    """Parameters may differ between ranks whose schedules differ for good reasons."""
    record = judged(with_digests(0, "aa", schedule=["a"]), with_digests(1, "bb", schedule=["b"]))

    assert [item.message for item in record.findings] == [
        "params step 2 0.weight differs between ranks: rank 0 aa | rank 1 bb"
    ]


def test_a_schedule_digest_without_lines_still_speaks() -> None:
    """The digest alone is evidence."""
    reports = [a_report(rank, digests={"schedule": str(rank)}) for rank in (0, 1)]

    assert judged(*reports).findings[0].message.startswith("schedule differs between ranks")


# Results that cannot be determined.


def test_what_no_rank_can_tell_is_not_run() -> None:
    """NOT_RUN_ENV; what is absent is taken from the ranks where they name it."""
    here = [a_report(rank, comparisons=0, not_run="no device sleep") for rank in (0, 1)]
    reports = [a_report(rank, comparisons=0, not_run="x", measurements={"absent": ["cuda"]}) for rank in (0, 1)]

    assert (judged(*here).verdict, judged(*here).reason) == (Verdict.NOT_RUN_ENV, "no device sleep")
    assert judged(*here).measurements == {"absent": ["unnamed"]}
    assert judged(*reports).measurements == {"absent": ["cuda"]}


def test_a_rank_that_is_not_run_without_a_reason_says_so() -> None:
    """An empty reason counts as no reason."""
    record = judged(*(a_report(rank, comparisons=0, not_run="") for rank in (0, 1)))

    assert (record.verdict, record.reason) == (Verdict.NOT_RUN_ENV, "no reason given")


def test_ranks_that_disagree_about_the_environment_are_the_suites_error() -> None:
    """One says not here, another runs."""
    record = judged(a_report(0), a_report(1, comparisons=0, not_run="no device"))

    assert record.verdict is Verdict.ERROR_SUITE
    assert record.reason == "ranks disagree on whether to run: rank 1 did not (no device), rank 0 did"


def test_findings_outrank_an_absent_environment() -> None:
    """A finding counts whatever else is absent."""
    record = judged(a_report(0, a_finding()), a_report(1, not_run="no device"))

    assert record.verdict is Verdict.FAIL


def test_references_that_disagree_outrank_findings() -> None:
    """References that disagree accuse no implementation; the findings stay, with a note."""
    record = judged(a_report(0, a_finding()), a_report(1, inconclusive="DDP and float64 differ by 3 ulps"))

    assert (record.verdict, record.reason) == (Verdict.INCONCLUSIVE, "rank 1: DDP and float64 differ by 3 ulps")
    assert [item.requirement for item in record.findings] == ["R003"]
    assert record.notes == ["1 findings were kept, but the references behind them disagree"]


def test_an_inconclusive_case_need_not_compare() -> None:
    """It stopped before."""
    reports = [a_report(rank, comparisons=0, inconclusive="differ") for rank in (0, 1)]

    record = judged(*reports)

    assert (record.verdict, record.notes) == (Verdict.INCONCLUSIVE, [])


# What is kept.


def test_measurements_are_merged_where_ranks_agree() -> None:
    """One figure for all, or one for each rank."""
    record = judged(
        a_report(0, measurements={"floor": 1e-7, "held": 10, "only": 1}),
        a_report(1, measurements={"floor": 1e-7, "held": 12}),
    )

    assert record.measurements == {"floor": 1e-7, "held": {"rank 0": 10, "rank 1": 12}, "only": {"rank 0": 1}}


def test_the_record_keeps_what_a_reader_needs() -> None:
    """Notes once, the slowest training, rank 0's environment and schedule."""
    record = judged(
        a_report(0, notes=["shim", "bound"], seconds={"training": 0.2}, environment={"seed": 7}, schedule=["ag"]),
        a_report(1, notes=["shim"], seconds={"training": 0.4}, environment={"seed": 8}, schedule=["rs"]),
    )

    assert record.notes == ["shim", "bound"]
    assert record.training_seconds == 0.4
    assert (record.environment, record.schedule) == ({"seed": 7}, ["ag"])
    assert record.repro == "fsdp-conformance run --implementation torch-fsdp2 --case R001/probe-ws2"
