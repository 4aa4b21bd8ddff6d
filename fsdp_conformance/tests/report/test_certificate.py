"""The certificate: what earns it, and every reason against it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fsdp_conformance.contract.profile import INTERPRETATION, Profile, profile_of
from fsdp_conformance.judge import Observed, judge, keep_evidence
from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.report.certificate import Scope, State, certify
from fsdp_conformance.report.terminal import verdict_words
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.tests.report.certificates import (
    CASES,
    PARITY,
    SHARDS,
    SHARED,
    a_profile,
    a_run,
    certificate_of,
    certified,
    only_reason,
    states,
    unfollowed,
    unsupported,
)
from fsdp_conformance.tests.report.evidence import LOADED, a_case, a_finding, a_record, a_report, exits
from fsdp_conformance.verdict import Verdict

# What earns it.


def test_a_whole_run_that_passed_is_certified() -> None:
    """Every case once, by fresh ranks, and each passed."""
    certificate = certified()

    assert (certificate.certified, certificate.word, certificate.status) == (True, "CERTIFIED", 0)
    assert (certificate.reasons, certificate.remarks) == ((), ())
    assert states(certificate) == {"base": "passed", "accumulation": "passed"}
    assert (certificate.executed, certificate.expected, certificate.counts) == (4, 4, {"PASS": 4})


# What was run.


def test_a_case_that_was_not_run_is_missing() -> None:
    """Set equality: what does not run cannot pass."""
    run = a_run()
    run.started.remove(run.records.pop(1).case)
    certificate = certificate_of(run)

    assert only_reason(certificate) == "incomplete: 1 of 4 cases were not run: R070/probe-ws2"
    assert (certificate.executed, certificate.only_incomplete, certificate.status) == (3, True, 1)


def test_nothing_run_is_no_success() -> None:
    """The commonest lie of a suite."""
    certificate = certified(records=[], started=[])

    assert certificate.reasons[0] == (
        "incomplete: 4 of 4 cases were not run: R001/probe-ws2, R070/probe-ws2, R093/probe-ws2 and 1 more"
    )
    assert certificate.status == 1


def test_an_empty_profile_certifies_nothing() -> None:
    """A manifest without cases does not certify anything either."""
    profile = Profile(name="core-test", interpretation=INTERPRETATION, entries=())

    assert only_reason(certified(profile=profile)) == "incomplete: the profile has no cases"


def test_a_case_that_is_not_in_the_profile_is_a_reason() -> None:
    """The suites and the profile belong together."""
    assert only_reason(certified(a_record("R002/extra-ws2"))) == "not in the profile: R002/extra-ws2"


def test_a_case_that_ran_twice_is_not_comparable() -> None:
    """A rerun to green hides a flake."""
    assert only_reason(certified(records=[*a_run().records, a_record(PARITY, requirements=["R001"])])) == (
        "not comparable: R001/probe-ws2 ran more than once"
    )


def test_another_profile_is_a_reason() -> None:
    """Same name, other content."""
    certificate = certificate_of(a_run(profile=a_profile(*CASES[:2])), a_profile(*CASES[:2], a_case(world_size=3)))

    mine, other = a_profile(*CASES[:2], a_case(world_size=3)), a_profile(*CASES[:2])
    assert (
        f"profile of the run: expected core-test {mine.sha256[:12]}, got core-test {other.sha256[:12]}"
        in certificate.reasons
    )


def test_another_interpretation_is_a_reason() -> None:
    """The meaning of a case has changed since."""
    run = a_run()
    run.header["interpretation"] = 0

    assert only_reason(certificate_of(run)) == f"interpretation: expected {INTERPRETATION}, got 0"


def test_a_selection_certifies_nothing() -> None:
    reason = only_reason(certified(profile=a_profile(certifies=False)))

    assert reason == "incomplete: the profile core-test is a selection, which cannot certify"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"cases": ["R001"]}, "incomplete: --case left cases out"),
        ({"world_sizes": [3]}, "incomplete: --world-size left cases out"),
        ({"reuse_ranks": True}, "incomplete: --reuse-ranks, and a certificate needs fresh ranks for every case"),
        ({"ranks": "simulated"}, "incomplete: simulated ranks do not exercise a real backend"),
        ({"share_devices": True, "device": "sim"}, SHARED),
        ({"stress_seed": 0}, "incomplete: --stress, and a certificate needs ranks that nothing disturbs"),
    ],
)
def test_options_that_narrow_a_run_are_reasons(settings: dict[str, Any], reason: str) -> None:
    """The verdicts on the cases make no difference."""
    certificate = certified(settings=settings, flags="no_sync any_accelerator")

    assert (only_reason(certificate), certificate.only_incomplete) == (reason, True)


def test_a_selection_of_all_cases_leaves_none_out() -> None:
    certificate = certified(settings={"world_sizes": [2, 4], "cases": ["R*"]}, flags="no_sync any_accelerator")

    assert certificate.certified, certificate.reasons


def test_ranks_that_were_reused_are_a_reason() -> None:
    """They are a reason even if the settings do not mention it."""
    reasons = certified(a_record(PARITY, requirements=["R001"], ranks="reused")).reasons

    assert "incomplete: --reuse-ranks, and a certificate needs fresh ranks for every case" in reasons


def test_ranks_that_shared_devices_are_a_reason() -> None:
    """They are a reason even if the settings do not mention it, and the line with the verdict names them."""
    certificate = certified(a_record(PARITY, requirements=["R001"], ranks="sharing devices"))

    assert SHARED in certificate.reasons
    assert verdict_words(certificate) == "NOT CERTIFIED (ranks shared devices)"
    assert verdict_words(certified(settings={"ranks": "simulated"})) == "NOT CERTIFIED"


def test_ranks_that_were_provoked_are_a_reason() -> None:
    """They are a reason even if the settings do not mention it."""
    record = a_record(PARITY, requirements=["R001"])
    record.measurements["stress"] = {"late completion": 3}

    assert only_reason(certified(record)) == "incomplete: --stress, and a certificate needs ranks that nothing disturbs"


def test_a_stress_run_says_what_struck() -> None:
    """The note has the seed, the strikes on all ranks, and what never struck."""
    record = a_record(PARITY, requirements=["R001"])
    record.measurements["stress"] = {"rank 0": {"late completion": 3}, "rank 1": {"late completion": 4}}
    remark = certified(record, settings={"stress_seed": 7}).remarks[0]

    assert remark.startswith("stress with seed 7: late completion 7 times; never struck: completion out of order, ")


def test_a_run_with_failures_says_how_many_struck() -> None:
    """Only cases that reached the ranks count."""
    record = a_record(PARITY, requirements=["R001"])
    record.measurements["stress failure"] = "all_gather #3 of training"
    settings = {"stress_seed": 7, "stress_failure": "kill"}

    assert "stress failure kill: struck 1 of 1 cases" in certified(record, settings=settings).remarks


def test_an_implementation_without_a_description_is_a_reason() -> None:
    """A certificate says for whom it is."""
    run = a_run()
    run.header["implementation"] = None

    assert "incomplete: the implementation is not described" in certificate_of(run).reasons


def test_a_damaged_file_is_a_reason() -> None:
    """Its problems are."""
    assert only_reason(certified(problems=["line 3 was edited"])) == "line 3 was edited"


def test_a_case_without_verdict_is_a_reason() -> None:
    """It began, and the file does not show how it ended."""
    run = a_run()
    run.started.append("R002/lost-ws2")

    assert only_reason(certificate_of(run)) == "incomplete: R002/lost-ws2 started but did not finish"


def test_a_note_can_refuse_and_another_remarks() -> None:
    """Reruns refuse; what is only worth knowing does not."""
    refusing = {"text": "not comparable: reruns", "refuses": True}
    remarking = {"text": "long deadlines", "refuses": False}

    refused = certified(notes=[refusing])
    assert (only_reason(refused), refused.remarks) == ("not comparable: reruns", ())
    assert certified(notes=[remarking]).remarks == ("long deadlines",)


# Verdicts.


@pytest.mark.parametrize(
    ("verdict", "status"),
    [
        (Verdict.FAIL, 1),
        (Verdict.HANG, 1),
        (Verdict.CRASH, 1),
        (Verdict.ERROR_ADAPTER, 1),
        (Verdict.ERROR_SUITE, 4),
        (Verdict.INCONCLUSIVE, 1),
        (Verdict.XFAIL, 1),
        (Verdict.XPASS, 1),
    ],
)
def test_a_verdict_that_is_in_the_way(verdict: Verdict, status: int) -> None:
    """The reason names it and the case; the status says who has to act."""
    findings = [a_finding("R001")] if verdict is Verdict.FAIL else []
    certificate = certified(a_record(PARITY, verdict, *findings, requirements=["R001"]))

    assert only_reason(certificate) == f"{verdict}: {PARITY}"
    assert (certificate.status, certificate.only_incomplete) == (status, False)


def test_cases_in_the_way_for_one_reason_are_one_reason() -> None:
    """The reason has the first of them, and the number of the others."""
    cases = [a_case(world_size=size, requirements=["R001"]) for size in range(1, 7)]
    records = [a_record(case.id, Verdict.HANG, requirements=["R001"]) for case in cases]

    assert only_reason(certified(*records, profile=a_profile(*cases))) == (
        "HANG: R001/probe-ws1, R001/probe-ws2, R001/probe-ws3 and 3 more"
    )


def test_the_implementation_is_to_blame_before_the_suite() -> None:
    """A finding against the implementation outranks an error of the suite."""
    certificate = certified(
        a_record(PARITY, Verdict.FAIL, a_finding("R001"), requirements=["R001"]),
        a_record(SHARDS, Verdict.ERROR_SUITE, requirements=["R188"]),
    )

    assert certificate.status == 1


def test_a_run_that_is_also_incomplete_is_not_only_that() -> None:
    """Something is held against the implementation."""
    failing = a_record(PARITY, Verdict.FAIL, a_finding("R001"), requirements=["R001"])

    assert not certified(failing, settings={"cases": ["R001"]}).only_incomplete
    assert not certified().only_incomplete


def test_a_failed_extension_is_a_failure_of_a_partial_run_too() -> None:
    """It is not a reason against the base, and the run still has failures."""
    parity, extension = a_case(requirements=["R001"]), a_case(requirements=["R137"], needs=["offload"])
    failing = a_record(extension.id, Verdict.FAIL, a_finding("R137"), requirements=["R137"])
    certificate = certified(failing, profile=a_profile(parity, extension), settings={"cases": ["R137"]})

    assert all(reason.startswith("incomplete") for reason in certificate.reasons)
    assert not certificate.only_incomplete


def test_three_cases_are_named_without_a_count() -> None:
    """There are no more."""
    cases = [a_case(world_size=size, requirements=["R001"]) for size in (1, 2, 3)]
    records = [a_record(case.id, Verdict.HANG, requirements=["R001"]) for case in cases]

    assert only_reason(certified(*records, profile=a_profile(*cases))).endswith("R001/probe-ws3")


def test_one_comparison_is_enough() -> None:
    """It can fail."""
    reports = [a_report(rank, comparisons=1) for rank in range(2)]
    assert certified(a_record(PARITY, comparisons=2, elements=20, evidence=reports)).certified


def test_a_disabled_case_leaves_the_run_incomplete() -> None:
    """The user switched it off."""
    certificate = certified(a_record(PARITY, Verdict.DISABLED, requirements=["R001"]))

    assert certificate.reasons == ("incomplete: DISABLED: R001/probe-ws2",)
    assert certificate.only_incomplete


def test_a_pass_without_a_comparison_is_none() -> None:
    """However it came into the file."""
    reports = [a_report(rank, comparisons=0) for rank in range(2)]
    reason = only_reason(certified(a_record(PARITY, comparisons=0, elements=0, evidence=reports)))

    assert reason == (
        "the record contradicts itself (stated PASS, but its evidence yields ERROR_SUITE: rank 0 made no comparison): "
        "R001/probe-ws2"
    )


@pytest.mark.parametrize("change", [{"world_size": 3}, {"requirements": ["R001", "R002"]}])
def test_a_record_that_is_not_of_its_case_is_a_reason(change: dict[str, Any]) -> None:
    """Ranks and requirements are the profile's."""
    reason = only_reason(certified(a_record(PARITY, **{"requirements": ["R001"], **change})))

    assert reason.startswith("ran with a world size or requirements that are not those in the profile: R001/probe-ws2")


# Level S.


def test_a_should_that_is_not_met_is_printed_and_does_not_refuse() -> None:
    """The finding concerns nothing else."""
    certificate = certified(unfollowed("R070/probe-ws2"))

    assert certificate.certified
    assert certificate.remarks[0].startswith("SHOULD, not met: R070/probe-ws2: R070 (gradient parity)")


@pytest.mark.parametrize("others", [["R000"], ["R070", "R000"], []])
def test_a_should_case_that_shows_something_mandatory_refuses(others: list[str]) -> None:
    """Wrong numbers are wrong wherever they are seen; a FAIL without findings is not excused either."""
    findings = [a_finding(name) for name in others]
    certificate = certified(a_record("R070/probe-ws2", Verdict.FAIL, *findings, requirements=["R070"]))

    assert only_reason(certificate) == "FAIL: R070/probe-ws2"


def test_a_should_case_that_hangs_refuses() -> None:
    """No engine may hang."""
    certificate = certified(a_record("R070/probe-ws2", Verdict.HANG, a_finding("R070"), requirements=["R070"]))

    assert not certificate.certified


# Declining.


def test_what_is_declined_is_absent_from_the_certificate() -> None:
    """The base stands without it."""
    certificate = certified(unsupported("R093/probe-ws2"), flags="")

    assert certificate.certified
    assert certificate.counts == {"PASS": 3, "UNSUPPORTED": 1}
    assert states(certificate) == {"base": "passed", "accumulation": "declined"}


def test_a_scope_that_is_passed_needs_no_example() -> None:
    """It says how many cases it rests on."""
    assert certified().scopes == (
        Scope(names=("base",), state=State.PASSED, cases=2, passed=2),
        Scope(names=("accumulation",), state=State.PASSED, cases=1, passed=1),
    )


def test_a_scope_that_was_not_run_is_not_passed() -> None:
    """The reason makes no difference: the user switched its case off, or the case never ran."""
    run = a_run()
    gone = next(record for record in run.records if record.case.startswith("R093"))
    run.records.remove(gone)
    run.started.remove(gone.case)
    disabled = certified(a_record("R093/probe-ws2", Verdict.DISABLED))

    for certificate in (certificate_of(run), disabled):
        assert states(certificate) == {"base": "passed", "accumulation": "not run"}


@pytest.mark.parametrize("verdict", [Verdict.INCONCLUSIVE, Verdict.ERROR_SUITE, Verdict.XFAIL, Verdict.XPASS])
def test_what_was_not_judged_is_not_granted(verdict: Verdict) -> None:
    """It is not held against the implementation either."""
    certificate = certified(a_record("R093/probe-ws2", verdict))

    assert certificate.certified
    assert states(certificate)["accumulation"] == "not judged"
    assert certificate.status == (4 if verdict is Verdict.ERROR_SUITE else 0)


def test_a_record_of_another_world_size_is_not_judged() -> None:
    """This holds for extensions too."""
    certificate = certified(a_record("R093/probe-ws2", world_size=3))

    assert states(certificate)["accumulation"] == "not judged"


def test_a_mandatory_case_is_not_excused_by_the_name_of_a_recommendation() -> None:
    """Its findings are about what it binds; that they name something else was edited."""
    certificate = certified(a_record(PARITY, Verdict.FAIL, a_finding("R070")))

    assert (states(certificate)["base"], certificate.status) == ("failed", 1)


def test_every_flag_that_was_declined_is_named() -> None:
    """If none was declined, the text states that."""
    profile = a_profile(*CASES, a_case(requirements=["R033"], environment=("accelerator",)))
    flags = ["zero3", "any_accelerator"]
    record = unsupported("R033/probe-ws2", device="sim", measurements={"undeclared": flags})
    nothing = unsupported("R033/probe-ws2", device="sim", measurements={})
    profile = a_profile(*CASES, a_case(requirements=["R033"], needs=("zero3",), environment=("accelerator",)))
    (scope,) = [scope for scope in certified(record, profile=profile).scopes if "zero-3" in scope.names]

    assert scope.state is State.DECLINED
    assert "declined for another reason than that zero3, any_accelerator is not declared" in only_reason(
        certified(nothing, profile=profile)
    )


def test_every_contradiction_is_named() -> None:
    """All of them at once."""
    record = a_record(PARITY, findings=[a_finding()], comparisons=9)

    assert only_reason(certified(record)) == (
        "the record contradicts itself (PASS with 1 finding; stated 9 comparisons, but its ranks made 8): "
        "R001/probe-ws2"
    )


def test_a_silent_failure_of_a_feature_that_was_refused_elsewhere_counts() -> None:
    """R000 is named by the finding, although the case needs a flag that the plan asks for."""
    failing = a_record("R093/probe-ws2", Verdict.FAIL, a_finding("R000"))

    assert only_reason(certified(failing)) == "FAIL: R093/probe-ws2"


def test_an_extension_is_granted_completely_or_not_at_all() -> None:
    """One case of two is not half of it."""
    profile = a_profile(*CASES, a_case(requirements=["R093"], needs=("no_sync",), world_size=3))
    certificate = certified(a_record("R093/probe-ws3", Verdict.FAIL, a_finding("R093")), profile=profile)
    (accumulation,) = certificate.extensions

    assert (accumulation.state, accumulation.passed, accumulation.cases) == (State.FAILED, 1, 2)
    assert accumulation.example == "R093/probe-ws3"


def test_a_failed_extension_leaves_the_base_and_is_an_error_of_the_run() -> None:
    """To declare more never makes the certificate worse; the exit status says that something failed."""
    failing = certified(a_record("R093/probe-ws2", Verdict.FAIL, a_finding("R093")))
    declining = certified(unsupported("R093/probe-ws2"), flags="")

    assert (failing.certified, declining.certified) == (True, True)
    assert [scope.state for scope in failing.extensions] == [State.FAILED]
    assert (failing.status, declining.status) == (1, 0)


@pytest.mark.parametrize(("device", "excused"), [("cpu", True), ("cuda", False)])
def test_a_flag_that_is_declined_on_the_device_of_the_run_is_not_declared(device: str, excused: bool) -> None:
    """An implementation may offer less on one device than on another."""
    run = a_run(unsupported("R093/probe-ws2", device=device), settings={"device": device})
    for record in run.records:
        record.device = device
    run.header["implementation"]["declines_on"] = {"cpu": ["no_sync"]}
    state = State.DECLINED if excused else State.UNJUDGED

    assert [scope.state for scope in certificate_of(run).extensions] == [state]


@pytest.mark.parametrize(("device", "declared"), [("cuda", True), ("cpu", False)])
def test_a_flag_that_is_offered_on_one_device_only(device: str, declared: bool) -> None:
    """It cannot be declined there, and elsewhere it is not declared."""
    run = a_run(unsupported("R093/probe-ws2", device=device), settings={"device": device})
    for record in run.records:
        record.device = device
    implementation = run.header["implementation"]
    implementation["capabilities"] = [flag for flag in implementation["capabilities"] if flag != "no_sync"]
    implementation["adds_on"] = {"cuda": ["no_sync"]}
    state = State.UNJUDGED if declared else State.DECLINED

    assert [scope.state for scope in certificate_of(run).extensions] == [state]


def test_the_base_cannot_be_declined() -> None:
    """Nothing that the case needs is left undeclared, so the record does not hold; a refusal would be a FAIL."""
    certificate = certified(unsupported(PARITY))

    assert only_reason(certificate) == (
        "the record contradicts itself (UNSUPPORTED, but every flag that the case needs is declared): R001/probe-ws2"
    )


def test_an_accelerator_that_is_declined_is_declined_and_not_absent() -> None:
    """The machine has the simulated one; without the flag the base stays incomplete."""
    profile = a_profile(*CASES, a_case(requirements=["R033"], environment=("accelerator",)))
    record = unsupported("R033/probe-ws2", device="sim", measurements={"undeclared": ["any_accelerator"]})

    assert only_reason(certified(record, profile=profile)) == "declined (any_accelerator): R033/probe-ws2"


@pytest.mark.parametrize("declared", ["", "frozen_mixed"])
def test_wrong_numbers_on_a_model_that_everybody_trains_refuse_the_base(declared: str) -> None:
    """R000: a flag that only the model asks for excuses a refusal, and nothing else."""
    profile = a_profile(*CASES, a_case(requirements=["R112"], needs=("frozen_mixed",)))
    finding = a_finding("R003" if declared else "R000")
    failing = a_record("R112/probe-ws2", Verdict.FAIL, finding)

    assert only_reason(certified(failing, profile=profile, flags=f"no_sync {declared}")) == "FAIL: R112/probe-ws2"


def test_a_declared_model_that_is_refused_costs_the_extension_only() -> None:
    """The refusal is loud."""
    profile = a_profile(*CASES, a_case(requirements=["R112"], needs=("frozen_mixed",)))
    failing = a_record("R112/probe-ws2", Verdict.FAIL, a_finding("R112", check="refusal"))
    certificate = certified(failing, profile=profile, flags="no_sync frozen_mixed")

    assert certificate.certified
    assert states(certificate)["freezing"] == "failed"


def test_combinations_are_scopes_of_their_own() -> None:
    """An engine that fails two features together has each of them."""
    profile = a_profile(
        *CASES,
        a_case(requirements=["R151"], needs=("hsdp",)),
        a_case(requirements=["R084"], needs=("hsdp", "mixed_precision")),
    )
    failing = a_record("R084/probe-ws2", Verdict.FAIL, a_finding("R084"))
    certificate = certified(failing, profile=profile, flags="no_sync hsdp mixed_precision")

    assert states(certificate) == {
        "base": "passed",
        "accumulation": "passed",
        "hybrid": "passed",
        "hybrid + mixed-precision": "failed",
    }
    assert [scope.title for scope in certificate.combinations] == ["hybrid + mixed-precision"]


def test_components_are_certified_without_a_base() -> None:
    """Each of them has to be complete; without any, there is no certificate."""
    cases = [a_case(requirements=["R166"], needs=("reducer",)), a_case(requirements=["R172"], needs=("bucketing",))]
    profile = a_profile(*cases)
    one = certified(unsupported("R172/probe-ws2"), profile=profile, flags="reducer")
    none = certified(unsupported("R172/probe-ws2"), unsupported("R166/probe-ws2"), profile=profile, flags="")

    assert one.certified
    assert states(one) == {"bucketing": "declined", "reducer": "passed"}
    assert only_reason(none) == "no component was passed completely"


# What does not apply.


#: A fault of the cases that may not apply.
DELAY = "delay of 15 ms before every all_gather"
DELAYED = a_profile(*(replace(case, faults=(DELAY,)) for case in CASES))


def inapplicable(case: str) -> CaseRecord:
    """A case whose delay found no collective to strike, judged from the reports of its ranks."""
    unmet = {DELAY: ["all_gather"]}
    reports = [a_report(rank, unmet=unmet, schedule=["#1 issued all_reduce"]) for rank in range(2)]
    record = keep_evidence(
        judge(a_case(requirements=[case[:4]]), Observed(reports=reports, exits=exits(2)), RunSettings()), reports
    )
    record.environment, record.adapter, record.refereed = dict(LOADED), LOADED["adapter"], True
    return record


def test_a_case_that_does_not_apply_is_not_held_against_the_base() -> None:
    """An engine that issues no all-gather cannot be disturbed by a late one. The others of the scope are its proof."""
    record = inapplicable(PARITY)
    certificate = certified(record, profile=DELAYED)

    assert (record.verdict, certificate.certified) == (Verdict.UNSUPPORTED, True)
    assert certificate.remarks[0].startswith(f"does not apply: {PARITY}: ")


def test_a_scope_is_not_passed_by_cases_that_do_not_apply() -> None:
    """Nothing was shown."""
    certificate = certified(inapplicable(PARITY), inapplicable(SHARDS), profile=DELAYED)

    assert states(certificate)["base"] == "does not apply"
    assert only_reason(certificate) == "no case of the base applies"


def test_only_evidence_makes_a_case_inapplicable() -> None:
    """The word alone is not enough."""
    record = unsupported(PARITY, measurements={"inapplicable": ["delay"]})

    assert "UNSUPPORTED, but every flag that the case needs is declared" in only_reason(certified(record))


# Private profiles.


def test_only_a_shipped_profile_certifies() -> None:
    """A private profile makes a private run, whatever its name is."""
    own = profile_of("core-2026.11", CASES[:1])
    certificate = certify(a_run(profile=own), own)

    assert (certificate.word, certificate.private, certificate.certified) == ("PRIVATE RUN", True, False)
    assert only_reason(certificate) == (
        f"private: the profile core-2026.11 {own.sha256[:12]} is not shipped with this suite"
    )


def test_what_the_register_demands_is_counted_in_full() -> None:
    """Mandatory requirements that no case of the profile has shown, and those that no case binds at all."""
    unobserved = certified().unobserved

    assert {"R000", "R002", "R160"} <= set(unobserved)
    assert not {"R001", "R188", "R070", "R093"} & set(unobserved)


# NOT_RUN_ENV.


def not_here(case: str, *absent: str) -> CaseRecord:
    """A case that this machine cannot tell."""
    return a_record(case, Verdict.NOT_RUN_ENV, requirements=[case[:4]], measurements={"absent": list(absent)})


CUDA_CASES = (*CASES[:2], a_case(requirements=["R018"], environment=("accelerator", "cuda")))


@pytest.mark.parametrize(
    ("absent", "words"),
    [(["devices"], "devices"), (["cuda", "devices"], "cuda, devices"), ([], "something unnamed"), (["nccl"], "nccl")],
)
def test_a_machine_that_cannot_run_the_base_cannot_certify(absent: list[str], words: str) -> None:
    """The status blames the machine."""
    certificate = certified(not_here("R018/probe-ws2", *absent), profile=a_profile(*CUDA_CASES))

    assert only_reason(certificate) == f"NOT_RUN_ENV (this machine lacks {words}): R018/probe-ws2"
    assert certificate.status == 3


def test_a_record_that_names_nothing_absent_blames_something_unnamed() -> None:
    """It comes from a rank that gave no name."""
    record = a_record("R018/probe-ws2", Verdict.NOT_RUN_ENV, requirements=["R018"])

    assert only_reason(certified(record, profile=a_profile(*CUDA_CASES))) == (
        "NOT_RUN_ENV (this machine lacks something unnamed): R018/probe-ws2"
    )


def test_an_extension_that_this_machine_cannot_run_is_absent() -> None:
    profile = a_profile(*CASES, a_case(requirements=["R137"], needs=("cpu_offload_params",), environment=("cuda",)))
    certificate = certified(not_here("R137/probe-ws2", "cuda"), profile=profile, flags="no_sync cpu_offload_params")

    assert (certificate.certified, certificate.status) == (True, 0)
    assert states(certificate)["offload"] == "not on this machine"


def test_a_machine_that_was_also_narrowed_is_not_to_blame() -> None:
    """Another reason is listed as well."""
    certificate = certified(
        not_here("R018/probe-ws2", "devices"), profile=a_profile(*CUDA_CASES), settings={"cases": ["R018"]}
    )

    assert certificate.status == 1
