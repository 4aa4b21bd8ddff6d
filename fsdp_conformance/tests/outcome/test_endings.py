"""The judge on ranks that did not get through their body: which verdict, and which rank is the headline."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_conformance.judge import Observed, judge
from fsdp_conformance.outcome.records import CaseRecord, Finding, RankExit, RankReport
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.tests.report.evidence import (
    LOST_PEER,
    TIMED_OUT,
    a_case,
    a_finding,
    a_report,
    an_error,
    an_exit,
    exits,
    failed,
    stuck,
)
from fsdp_conformance.verdict import Verdict

GONE = {"reported": False}


def judged(
    *ranks: tuple[RankReport | None, RankExit], declared: str = "", level: str | None = None, **case: Any
) -> CaseRecord:
    """The verdict on a case whose ranks came to these ends."""
    return judge(
        a_case(world_size=len(ranks), **case),
        Observed(
            reports=[report for report, _ in ranks],
            exits=[end for _, end in ranks],
            declared=frozenset(declared.split()),
        ),
        RunSettings(),
        level=level,
    )


def raised(rank: int, message: str = "boom", **error: Any) -> tuple[RankReport, RankExit]:
    """A rank whose body raised."""
    return failed(rank, an_error(message, **error)), an_exit(rank, code=10)


def well(rank: int) -> tuple[RankReport, RankExit]:
    """A rank that got through."""
    return a_report(rank), an_exit(rank)


def test_a_rank_that_the_watchdog_of_nccl_aborted_is_not_the_culprit() -> None:
    """HANG, and the headline is the rank that did not come. A rank that aborted for another reason is a crash."""
    text = "[rank0]: [E ProcessGroupNCCL.cpp:629] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(...)"
    aborted = an_exit(0, code=-6, reported=False, output=text)
    record = judged((None, aborted), (None, stuck(1)))

    assert (record.verdict, record.findings[0].rank) == (Verdict.HANG, 1)
    assert record.consequences == ["rank 0 was aborted by NCCL's watchdog, whose collective had passed its deadline"]
    other = judged((None, an_exit(0, code=-6, reported=False, output="std::bad_alloc")), (None, stuck(1)))
    assert (other.verdict, other.findings[0].rank) == (Verdict.CRASH, 0)


# An exception of the implementation.


def test_an_exception_where_it_had_to_train_fails_the_requirement_of_the_case() -> None:
    """FAIL: the exception is the argument, and its traceback is kept."""
    record = judged(well(0), raised(1, "shape mismatch\nsecond line", kind="builtins.ValueError"))

    assert record.verdict is Verdict.FAIL
    assert record.reason == "rank 1 raised ValueError: shape mismatch"
    assert record.findings == [
        Finding(
            requirement="R001",
            check="training",
            message=record.reason,
            rank=1,
            likely="only rank 1 raised: the others lost it as a peer, or had gone on",
        )
    ]
    assert record.traceback == "Traceback: shape mismatch\nsecond line"


def test_the_first_rank_to_raise_is_the_headline() -> None:
    """The first is the earliest, not the lowest rank; the other is a consequence."""
    record = judged(raised(0, "late", time=5.0), raised(1, "early", time=2.0))

    assert record.reason == "rank 1 raised RuntimeError: early"
    assert record.consequences == ["rank 0 raised RuntimeError: late"]


def test_a_lost_peer_is_a_consequence_whatever_the_clock_says() -> None:
    """A peer notices a dead rank before the controller does."""
    record = judged(raised(0, LOST_PEER, time=1.0), (None, an_exit(1, code=-11, time=1.2, **GONE)))

    assert record.verdict is Verdict.CRASH
    assert record.reason == "rank 1 was killed by SIGSEGV before it reported"
    assert record.consequences == [f"rank 0 lost a peer: RuntimeError: {LOST_PEER}"]


def test_an_unexplained_lost_peer_fails() -> None:
    """One rank left the training early and well: ranks issue different numbers of collectives."""
    record = judged(well(0), raised(1, LOST_PEER))

    assert record.verdict is Verdict.FAIL
    assert [item.requirement for item in record.findings] == ["R001"]


def test_words_about_a_peer_in_an_error_of_its_own_are_no_consequence() -> None:
    """Only backend classes say that a peer is gone."""
    record = judged(
        raised(0, "broken pipe in the tokenizer", kind="builtins.ValueError", time=1.0), raised(1, "x", time=2.0)
    )

    assert record.reason == "rank 0 raised ValueError: broken pipe in the tokenizer"


def test_an_exception_after_findings_is_the_headline() -> None:
    """A declared feature should not raise; the findings before the exception stay."""
    culprit = failed(0, an_error("boom"), a_finding())
    record = judged((culprit, an_exit(0)), raised(1, LOST_PEER))

    assert record.reason == "rank 0 raised RuntimeError: boom"
    assert [item.check for item in record.findings] == ["training", "gradient parity"]


def test_the_digests_of_a_rank_that_failed_are_not_compared() -> None:
    """It recorded only part of them."""
    schedules = [{"schedule": "aa"}, {"schedule": "bb"}]
    record = judged(
        (a_report(0, digests=schedules[0]), an_exit(0)),
        (failed(1, an_error(), digests=schedules[1]), an_exit(1, code=10)),
    )

    assert [item.check for item in record.findings] == ["training"]


def test_an_earlier_death_explains_a_later_exception() -> None:
    """Causes are weighed by time, whatever their kind."""
    record = judged((None, an_exit(0, code=-9, time=1.0, **GONE)), raised(1, "no peer left", time=2.0))

    assert (record.verdict, record.reason) == (Verdict.CRASH, "rank 0 was killed by SIGKILL before it reported")


# Blame.


@pytest.mark.parametrize(
    ("blame", "verdict"),
    [
        ("adapter", Verdict.ERROR_ADAPTER),
        ("suite", Verdict.ERROR_SUITE),
        ("unheard-of", Verdict.ERROR_SUITE),
        ("environment", Verdict.NOT_RUN_ENV),
        ("implementation", Verdict.FAIL),
    ],
)
def test_the_verdict_follows_the_blame(blame: str, verdict: Verdict) -> None:
    """The verdict follows from whoever is to blame; an unknown blame is an error of the suite."""
    record = judged(raised(0, blame=blame), raised(1, blame=blame, time=2.0))

    assert record.verdict is verdict
    assert bool(record.findings) == (verdict is Verdict.FAIL)


def test_an_absent_environment_that_a_rank_names_is_kept() -> None:
    """The certificate compares it with what the manifest names."""
    record = judged(raised(0, blame="environment", capability="cuda"), well(1))
    unnamed = judged(raised(0, blame="environment"), well(1))

    assert record.measurements["absent"] == ["cuda"]
    assert unnamed.measurements["absent"] == ["unnamed"]


def test_only_a_missing_environment_names_what_is_absent() -> None:
    """An exception of the implementation names nothing that a certificate could excuse."""
    assert judged(raised(0), raised(1, time=2.0)).measurements == {}


def test_one_problem_is_the_message() -> None:
    """Only several are listed."""
    record = judged(raised(0, "wrong device", blame="adapter", problems=("wrong device",)), raised(1, LOST_PEER))

    assert record.reason == "rank 0 raised RuntimeError: wrong device"


def test_all_problems_of_an_adapter_are_in_the_reason() -> None:
    """The protocol's validator reports all at once."""
    problems = ("no parameter '0.weight'", "'0.bias' is a shard")
    record = judged(raised(0, blame="adapter", problems=problems), raised(1, LOST_PEER, time=2.0))

    assert record.verdict is Verdict.ERROR_ADAPTER
    assert record.reason == "rank 0: no parameter '0.weight'; '0.bias' is a shard"


def test_references_that_disagree_judge_no_engine() -> None:
    """The exception class decides, whoever is blamed."""
    record = judged(
        raised(0, "DDP and float64 differ", kind="fsdp_conformance.errors.ReferencesDisagree", blame="suite"), well(1)
    )

    assert record.verdict is Verdict.INCONCLUSIVE


# Deaths.


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-9, "was killed by SIGKILL"),
        (-6, "was killed by SIGABRT"),
        (-99, "was killed by signal 99"),
        (3, "exited with code 3"),
        (0, "exited with code 0"),
    ],
)
def test_a_process_that_ends_without_a_report_crashed(code: int, words: str) -> None:
    """Any exit before the report is a failure, even with exit code 0."""
    record = judged(well(0), (None, an_exit(1, code=code, **GONE)))

    assert record.verdict is Verdict.CRASH
    assert record.reason == f"rank 1 {words} before it reported"
    assert [(item.requirement, item.check, item.rank) for item in record.findings] == [("R001", "process end", 1)]


def test_the_schedule_in_the_record_is_rank_0s() -> None:
    """Where rank 0 died, no other rank's is taken for it."""
    record = judged((None, an_exit(0, code=-9, **GONE)), (a_report(1, schedule=["reduce_scatter"]), an_exit(1)))

    assert record.schedule == []


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_any_rank_counts(rank: int) -> None:
    ranks: list[tuple[RankReport | None, RankExit]] = [well(0), well(1), well(2)]
    ranks[rank] = (None, an_exit(rank, code=-9, **GONE))

    assert judged(*ranks).verdict is Verdict.CRASH


def test_a_rank_that_the_controller_ended_after_a_death_is_a_consequence() -> None:
    """It waited for the dead one."""
    record = judged((None, stuck(0, time=5.0)), (None, an_exit(1, code=-9, time=6.0, **GONE)))

    assert record.verdict is Verdict.CRASH
    assert record.consequences == ["rank 0 did not report in time and was terminated"]


@pytest.mark.parametrize(
    ("end", "note"),
    [
        (an_exit(1, code=-6), "rank 1 was killed by SIGABRT at shutdown, after it had reported"),
        (an_exit(1, code=1), "rank 1 exited with code 1 at shutdown, after it had reported"),
        (
            an_exit(1, code=-9, ended_by_controller=True),
            "rank 1 did not shut down after it had reported and was terminated",
        ),
    ],
)
def test_a_death_after_the_report_is_said_and_not_judged(end: RankExit, note: str) -> None:
    """The results are in: never a failure of the implementation, never hidden."""
    record = judged(well(0), (a_report(1), end))

    assert record.verdict is Verdict.PASS
    assert record.notes == [note]


def test_the_exit_code_of_a_rank_that_raised_is_no_note() -> None:
    """It is how such a rank leaves."""
    assert judged(raised(0), raised(1, time=2.0)).notes == []


# The suite's own work.


@pytest.mark.parametrize("peer", [TIMED_OUT, LOST_PEER])
def test_a_rank_kept_late_by_the_suite_explains_its_peers(peer: str) -> None:
    """The verdict is ERROR_SUITE: although the peers timed out, the implementation is not accused."""
    late = an_exit(1, suite_was_late=True)

    record = judged(raised(0, peer), (a_report(1), late))

    assert record.verdict is Verdict.ERROR_SUITE
    assert record.reason == "rank 1 did not finish the suite's own work (not the implementation's) in time"
    assert not record.findings


def test_a_failure_of_its_own_counts_although_the_suite_was_late() -> None:
    """An exception of the implementation, and a death, are causes."""
    late = an_exit(1, suite_was_late=True)

    assert judged(raised(0), (a_report(1), late)).verdict is Verdict.FAIL
    died = judged(well(0), (None, an_exit(1, code=-9, suite_was_late=True, **GONE)))
    assert died.verdict is Verdict.CRASH


# Hangs.


def test_a_rank_that_never_answers_hangs() -> None:
    """HANG, with the last collective; stacks and collectives of all ranks are in the record."""
    ends = [
        stuck(0, last_collectives=["forward all_gather [0,1]"]),
        stuck(1, last_collectives=["backward barrier [0,1]"]),
    ]
    record = judged((None, ends[0]), (None, ends[1]))

    assert record.verdict is Verdict.HANG
    assert record.reason == (
        "rank 0 did not report in time and was terminated; its last collective: forward all_gather [0,1]"
    )
    assert record.exits == ends
    assert record.findings == [
        Finding(
            requirement="R001",
            check="deadline",
            message=record.reason,
            rank=0,
            call="forward all_gather [0,1]",
            likely=(
                "ranks issue different collectives; the last of each: "
                "rank 0 forward all_gather [0,1] | rank 1 backward barrier [0,1]"
            ),
        )
    ]


def test_a_rank_without_collectives_differs_from_one_that_waits() -> None:
    """It is listed as having none, and the finding names no call."""
    record = judged((None, stuck(0)), (None, stuck(1, last_collectives=["forward all_gather [0,1]"])))

    (finding,) = record.findings
    assert (finding.rank, finding.call) == (0, None)
    assert finding.likely == (
        "ranks issue different collectives; the last of each: rank 0 none | rank 1 forward all_gather [0,1]"
    )


def test_ranks_that_wait_in_the_same_collective_have_no_likely_cause() -> None:
    """Nothing tells them apart."""
    ends = [stuck(rank, last_collectives=["forward all_gather [0,1]"]) for rank in (0, 1)]

    assert judged((None, ends[0]), (None, ends[1])).findings[0].likely is None


def test_the_silent_rank_explains_the_time_outs_of_its_peers() -> None:
    """The rank that never answered is the headline, although its peer spoke earlier."""
    record = judged(raised(0, TIMED_OUT, time=3.0), (None, stuck(1, time=8.0)))

    assert record.verdict is Verdict.HANG
    assert record.reason.startswith("rank 1 did not report in time")


def test_a_stopped_rank_explains_a_stuck_one() -> None:
    """SIGSTOP is recognised by the first words of the stack."""
    record = judged((None, stuck(0, time=1.0)), (None, stuck(1, time=2.0, stack="stopped (state T in /proc/PID/stat)")))

    assert record.reason == "rank 1 was stopped by a signal and never reported"


def test_time_outs_on_every_rank_are_a_hang() -> None:
    """A collective's deadline is a deadline. The whole message is kept: a backend may say much."""
    message = f"{TIMED_OUT}\nrank 0 waits in all_gather"
    record = judged(raised(0, message, time=3.1), raised(1, message, time=3.0))

    assert record.verdict is Verdict.HANG
    assert record.reason == f"rank 1 timed out in a collective: RuntimeError: {TIMED_OUT}"
    assert record.findings == [
        Finding(requirement="R001", check="deadline", message=record.reason, rank=1, detail=message)
    ]


def test_an_exception_explains_a_time_out_of_a_peer() -> None:
    """The peer waited for the rank that raised."""
    record = judged(raised(0, TIMED_OUT, time=3.0), raised(1, "boom", time=4.0))

    assert (record.verdict, record.reason) == (Verdict.FAIL, "rank 1 raised RuntimeError: boom")


def test_a_rank_that_still_runs_hangs() -> None:
    """Without an exit code and a report, there is no other evidence of it."""
    assert judged(well(0), (None, an_exit(1, code=None, **GONE))).verdict is Verdict.HANG


def test_a_hang_instead_of_a_refusal_fails_loud_refusal() -> None:
    """A feature that is not declared has to be refused with an exception, not with a hang."""
    record = judged((None, stuck(0)), (None, stuck(1)), needs=("unused_divergent", "frozen_mixed"))

    assert record.verdict is Verdict.HANG
    assert [(item.requirement, item.message) for item in record.findings] == [
        (
            "R000",
            (
                "rank 0 did not report in time and was terminated; "
                "unused_divergent, frozen_mixed is not declared, so every rank should have refused it by an exception"
            ),
        )
    ]


@pytest.mark.parametrize(("message", "verdict"), [(TIMED_OUT, Verdict.HANG), (LOST_PEER, Verdict.FAIL)])
def test_an_exception_about_a_peer_refuses_nothing(message: str, verdict: Verdict) -> None:
    """A rank that timed out did not refuse what is not declared, although an exception ended it."""
    record = judged(raised(0, message), raised(1, message), needs=("unused_divergent",))

    assert (record.verdict, record.findings[0].requirement) == (verdict, "R000")


# Refusals.


def refused(rank: int, message: str = "no", capability: str | None = None, **error: Any) -> tuple[RankReport, RankExit]:
    """A rank whose implementation refused."""
    return raised(rank, message, blame="refusal", capability=capability, **error)


def test_an_undeclared_flag_that_every_rank_refuses_is_unsupported() -> None:
    """UNSUPPORTED with the flag and the words."""
    record = judged(refused(0, "frozen parameters"), refused(1, "frozen parameters"), needs=("frozen_mixed",))

    assert record.verdict is Verdict.UNSUPPORTED
    assert record.reason == "frozen_mixed is not declared and was refused: frozen parameters"
    assert record.measurements["undeclared"] == ["frozen_mixed"]
    assert record.findings == []


def test_a_refusal_that_names_no_flag_is_one_of_all_that_are_undeclared() -> None:
    """They are listed; one that is named is the only one."""
    needs = ("frozen_mixed", "shared_across_units")
    unnamed = judged(refused(0), refused(1), needs=needs)
    record = judged(refused(0, capability=needs[1]), refused(1, capability=needs[1]), needs=needs)

    assert unnamed.reason == "frozen_mixed, shared_across_units is not declared and was refused: no"
    assert unnamed.measurements == {"undeclared": list(needs)}
    assert record.reason == "shared_across_units is not declared and was refused: no"
    assert record.measurements == {"undeclared": ["shared_across_units"]}


def test_a_flag_that_the_model_asked_for_counts_as_asked() -> None:
    """Reports name what plans and models asked for."""
    ranks = [(failed(rank, an_error(blame="refusal"), asked=["shared_across_units"]), an_exit(rank)) for rank in (0, 1)]

    assert judged(*ranks).verdict is Verdict.UNSUPPORTED
    assert judged(*ranks, declared="shared_across_units").verdict is Verdict.FAIL


def test_any_exception_refuses_what_is_not_declared() -> None:
    """An engine's own ValueError is a refusal too."""
    record = judged(raised(0, "cannot"), raised(1, LOST_PEER, time=2.0), needs=("frozen_mixed",))

    assert record.verdict is Verdict.UNSUPPORTED


def test_a_declared_flag_that_is_refused_is_a_defect() -> None:
    """Declaring is a promise."""
    record = judged(refused(0, capability="no_sync"), refused(1, capability="no_sync"), declared="no_sync")

    assert record.verdict is Verdict.FAIL
    assert record.reason == "refused although no_sync is declared: no"
    assert record.findings == [Finding(requirement="R001", check="wrongful refusal", message=record.reason, rank=0)]


def test_a_mandatory_requirement_that_is_refused_is_a_defect() -> None:
    """The case asks for nothing optional."""
    record = judged(refused(0), refused(1))

    assert record.verdict is Verdict.FAIL
    assert record.reason == "refused although everything the case asks for is declared or mandatory: no"


def test_refusing_something_else_than_what_is_undeclared_is_a_defect() -> None:
    """The reason given must be the case's."""
    record = judged(refused(0, capability="zero2"), refused(1, capability="zero2"), needs=("frozen_mixed",))

    assert record.verdict is Verdict.FAIL
    assert record.reason == "refused although the case does not ask for zero2: no"


@pytest.mark.parametrize(("level", "verdict"), [("C", Verdict.UNSUPPORTED), ("M", Verdict.FAIL), ("S", Verdict.FAIL)])
def test_only_a_conditional_requirement_lets_the_implementation_name_the_flag(level: str, verdict: Verdict) -> None:
    """Otherwise every mandatory case could be escaped by naming a flag."""
    record = judged(refused(0, capability="full_buffers"), refused(1, capability="full_buffers"), level=level)

    assert record.verdict is verdict


def test_the_level_is_the_contracts() -> None:
    """R005 is conditional, R001 mandatory; an unknown id is judged as mandatory."""
    ranks = [refused(0, capability="full_buffers"), refused(1, capability="full_buffers")]

    assert judged(*ranks, requirements=("R005",)).verdict is Verdict.UNSUPPORTED
    assert judged(*ranks, requirements=("R001",)).verdict is Verdict.FAIL
    assert judged(*ranks, requirements=("R999",)).verdict is Verdict.FAIL


def test_a_name_that_is_no_flag_excuses_nothing() -> None:
    """Only flags of the contract can be declined."""
    record = judged(refused(0, capability="mondays"), refused(1, capability="mondays"), level="C")

    assert record.verdict is Verdict.FAIL


def test_a_refusal_that_is_wrong_comes_before_what_was_found() -> None:
    """It is why the case ended."""
    ranks = [(failed(rank, an_error(blame="refusal"), a_finding(rank=rank)), an_exit(rank)) for rank in (0, 1)]

    assert [item.check for item in judged(*ranks).findings] == ["wrongful refusal", "gradient parity"]


def test_ranks_that_disagree_about_refusing_fail() -> None:
    """One refuses, another trains: the job hangs or drifts."""
    record = judged(refused(0), well(1), needs=("frozen_mixed",))

    assert record.verdict is Verdict.FAIL
    assert record.reason == "rank 0 refused (no), but rank 1 went on training: all ranks must refuse"
    assert record.findings[0].requirement == "R000"


def test_a_refusal_with_a_peer_that_was_ended_is_a_refusal() -> None:
    """The peer waited for the rank that refused."""
    record = judged(refused(0), (None, stuck(1)), needs=("frozen_mixed",))

    assert record.verdict is Verdict.UNSUPPORTED
    assert record.consequences == ["rank 1 did not report in time and was terminated"]


@pytest.mark.parametrize("blame", ["implementation", "refusal"])
def test_an_exception_after_wrong_numbers_is_no_refusal(blame: str) -> None:
    """It trained on to wrong results first."""
    ranks = [(failed(rank, an_error(blame=blame), a_finding(rank=rank)), an_exit(rank)) for rank in (0, 1)]
    record = judged(*ranks, needs=("frozen_mixed",))

    assert record.verdict is Verdict.FAIL
    assert record.findings[0].requirement == "R000"
    assert record.findings[0].check == "loud refusal"


# A rank that left on purpose.


def test_a_rank_that_stopped_at_its_findings_explains_a_lost_peer() -> None:
    """FAIL by the findings; the peer is folded."""
    culprit = failed(0, an_error(kind="fsdp_conformance.errors.RequirementFailed"), a_finding())
    record = judged((culprit, an_exit(0)), raised(1, LOST_PEER))

    assert record.verdict is Verdict.FAIL
    assert [item.requirement for item in record.findings] == ["R003"]
    assert record.consequences == [f"rank 1 lost a peer: RuntimeError: {LOST_PEER}"]


def test_findings_do_not_explain_a_rank_that_never_answered() -> None:
    """HANG; the findings are kept behind it."""
    record = judged((a_report(0, a_finding()), an_exit(0)), (None, stuck(1)))

    assert record.verdict is Verdict.HANG
    assert [item.check for item in record.findings] == ["deadline", "gradient parity"]


@pytest.mark.parametrize("peer", [raised(1, LOST_PEER), raised(1, TIMED_OUT), (None, stuck(1))])
def test_a_rank_that_says_not_here_explains_its_peers(peer: tuple[RankReport | None, RankExit]) -> None:
    """The verdict is NOT_RUN_ENV: the peers timed out while they waited for it."""
    record = judged((a_report(0, comparisons=0, not_run="no pinned memory"), an_exit(0, code=72)), peer)

    assert (record.verdict, record.reason) == (Verdict.NOT_RUN_ENV, "no pinned memory")
    assert record.notes == []


def test_a_rank_that_says_not_here_does_not_explain_an_exception() -> None:
    """A cause counts as a cause even if other ranks were left out."""
    here = (a_report(0, comparisons=0, not_run="no pinned memory"), an_exit(0, code=72))
    record = judged(here, raised(1, LOST_PEER, time=1.0), raised(2, "boom", time=2.0))

    assert (record.verdict, record.reason) == (Verdict.FAIL, "rank 2 raised RuntimeError: boom")


# Evidence that cannot be.


@pytest.mark.parametrize(("num_reports", "num_exits"), [(1, 2), (3, 2), (2, 3)])
def test_missing_evidence_is_the_suites_error(num_reports: int, num_exits: int) -> None:
    """A report and an exit for each rank, or nothing is judged."""
    reports = [a_report(rank) for rank in range(num_reports)]
    record = judge(a_case(world_size=3), Observed(reports=reports, exits=exits(num_exits)), RunSettings())

    assert record.verdict is Verdict.ERROR_SUITE
    assert record.reason == (f"expected 3 reports and 3 exits, got {num_reports} and {num_exits} [R001/probe-ws3]")


@pytest.mark.parametrize("order", [([1, 0], [0, 1]), ([0, 1], [1, 0]), ([0, 0], [0, 1])])
def test_evidence_out_of_order_is_the_suites_error(order: tuple[list[int], list[int]]) -> None:
    """Reports are read by their place."""
    reports, ends = ([a_report(rank) for rank in order[0]], [an_exit(rank) for rank in order[1]])
    record = judge(a_case(), Observed(reports=reports, exits=ends), RunSettings())

    assert record.verdict is Verdict.ERROR_SUITE


# What an exception says of its cause.


def test_an_exception_of_one_rank_depends_on_the_rank() -> None:
    """The finding reports that the others only lost it."""
    lost = failed(0, an_error(LOST_PEER, time=2.0)), an_exit(0, code=10)

    assert str(judged(lost, raised(1, "13 elements")).findings[0].likely).startswith("only rank 1 raised: ")


def test_an_exception_of_every_rank_does_not() -> None:
    """The message is the same everywhere, or another one on some ranks."""
    alike = judged(raised(0, "no such option"), raised(1, "no such option"))
    unlike = judged(raised(0, "12 elements"), raised(1, "13 elements"))

    assert alike.findings[0].likely == "every rank raised: the same exception"
    assert unlike.findings[0].likely == "every rank raised: not all the same exception"


def test_some_of_several_ranks_that_raise_say_nothing() -> None:
    """Two of three: neither the step nor one rank. A single rank has no others."""
    two_of_three = judged(raised(0), raised(1), well(2))

    assert two_of_three.findings[0].likely is None
    assert judged(raised(0)).findings[0].likely is None
