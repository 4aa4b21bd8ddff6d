"""The certificate: what earns it, and every reason against it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from fsdp_conformance import contract
from fsdp_conformance.case import Case
from fsdp_conformance.config import RunSettings
from fsdp_conformance.contract.profile import INTERPRETATION, Profile, profile_of
from fsdp_conformance.outcome import CaseRecord
from fsdp_conformance.report.certificate import Certificate, certify
from fsdp_conformance.report.runfile import RunFile
from fsdp_conformance.tests.report.evidence import a_case, a_finding, a_record
from fsdp_conformance.verdict import Verdict

PARITY, SHARDS = "R001/probe-ws2", "R188/probe-ws2"

#: R001 and R188 are mandatory, R093 is of level C, R070 of level S.
CASES = (
    a_case(requirements=["R001"]),
    a_case(requirements=["R188"]),
    a_case(requirements=["R093"], needs=("no_sync",)),
    a_case(requirements=["R070"]),
)


def a_profile(*cases: Case, **options: Any) -> Profile:
    """A certifying profile of these cases."""
    return profile_of("core-test", cases or CASES, **options)


def a_run(*records: CaseRecord, profile: Profile | None = None, flags: str = "no_sync", **changes: Any) -> RunFile:
    """A whole run of fresh ranks with these records; every other case of the profile passes."""
    profile = profile or a_profile()
    given = {record.case: record for record in records}
    settings = {**asdict(RunSettings(implementation="mine", profile=profile.name)), **changes.pop("settings", {})}
    header = {
        "interpretation": INTERPRETATION,
        "profile": {"name": profile.name, "sha256": profile.sha256, "cases": len(profile.entries)},
        "implementation": {"spec": "mine", "name": "mine", "version": "1", "capabilities": flags.split(), "shims": []},
        "settings": settings,
    }
    passed = [
        given.get(entry.id) or a_record(entry.id, requirements=list(entry.requirements)) for entry in profile.entries
    ]
    extra = [record for record in records if record.case not in profile.by_id]
    return RunFile(path="run.jsonl", **{"header": header, "records": [*passed, *extra], **changes})


def certified(*records: CaseRecord, profile: Profile | None = None, **changes: Any) -> Certificate:
    """The certificate of such a run."""
    profile = profile or a_profile()
    return certify(a_run(*records, profile=profile, **changes), profile)


def only_reason(certificate: Certificate) -> str:
    """The one reason against it."""
    assert not certificate.certified
    (reason,) = certificate.reasons
    return reason


# What earns it.


def test_a_whole_run_that_passed_is_certified() -> None:
    """Every case once, by fresh ranks, and each passed."""
    certificate = certified()

    assert (certificate.certified, certificate.word, certificate.status) == (True, "CERTIFIED", 0)
    assert (certificate.reasons, certificate.remarks) == ((), ())
    assert (certificate.executed, certificate.expected, certificate.counts) == (4, 4, {"PASS": 4})


# What was run.


def test_a_case_that_was_not_run_is_missing() -> None:
    """Set equality: what does not run cannot pass."""
    run = a_run()
    del run.records[1]
    certificate = certify(run, a_profile())

    assert only_reason(certificate) == "incomplete: 1 of 4 cases were not run: R070/probe-ws2"
    assert (certificate.executed, certificate.only_incomplete, certificate.status) == (3, True, 1)


def test_nothing_run_is_no_success() -> None:
    """The commonest lie of a suite."""
    certificate = certified(records=[])

    assert certificate.reasons[0] == (
        "incomplete: 4 of 4 cases were not run: R001/probe-ws2, R070/probe-ws2, R093/probe-ws2 and 1 more"
    )
    assert certificate.status == 1


def test_an_empty_profile_certifies_nobody() -> None:
    """Nor does a manifest of nothing."""
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
    certificate = certify(a_run(profile=a_profile(*CASES[:2])), a_profile(*CASES[:2], a_case(world_size=3)))

    assert any(reason.startswith("profile of the run: expected core-test ") for reason in certificate.reasons)


def test_another_interpretation_is_a_reason() -> None:
    """What a case means has changed since."""
    run = a_run()
    run.header["interpretation"] = 0

    assert only_reason(certify(run, a_profile())) == f"interpretation: expected {INTERPRETATION}, got 0"


def test_a_selection_certifies_nobody() -> None:
    """Even if all of it passed."""
    reason = only_reason(certified(profile=a_profile(certifies=False)))

    assert reason == "incomplete: the profile core-test is a selection, which cannot certify"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"cases": ["R001"]}, "incomplete: --case left cases out"),
        ({"world_sizes": [2]}, "incomplete: --world-size left cases out"),
        ({"reuse_ranks": True}, "incomplete: --reuse-ranks, and a certificate needs fresh ranks for every case"),
    ],
)
def test_options_that_narrow_a_run_are_reasons(settings: dict[str, Any], reason: str) -> None:
    """Whatever the cases said."""
    certificate = certified(settings=settings)

    assert (only_reason(certificate), certificate.only_incomplete) == (reason, True)


def test_ranks_that_were_reused_are_a_reason() -> None:
    """Also where the settings do not say so."""
    reason = only_reason(certified(a_record(PARITY, requirements=["R001"], ranks="reused")))

    assert reason == "incomplete: --reuse-ranks, and a certificate needs fresh ranks for every case"


def test_an_implementation_that_nobody_described_is_a_reason() -> None:
    """A certificate says for whom it is."""
    run = a_run()
    run.header["implementation"] = None

    assert "incomplete: the implementation is not described" in certify(run, a_profile()).reasons


def test_a_damaged_file_is_a_reason() -> None:
    """Its problems are."""
    assert only_reason(certified(problems=["line 3 was edited"])) == "line 3 was edited"


def test_a_case_without_verdict_is_a_reason() -> None:
    """It began, and nobody knows how it ended."""
    assert only_reason(certified(started=["R002/lost-ws2"])) == ("incomplete: R002/lost-ws2 started but did not finish")


def test_a_note_can_refuse_and_another_remarks() -> None:
    """Reruns refuse; what is only worth knowing does not."""
    refusing = {"text": "not comparable: reruns", "refuses": True}
    remarking = {"text": "long deadlines", "refuses": False}

    assert only_reason(certified(notes=[refusing])) == "not comparable: reruns"
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
    """With the first of them, and how many more."""
    cases = [a_case(world_size=size, requirements=["R001"]) for size in range(1, 7)]
    records = [a_record(case.id, Verdict.HANG, requirements=["R001"]) for case in cases]

    assert only_reason(certified(*records, profile=a_profile(*cases))) == (
        "HANG: R001/probe-ws1, R001/probe-ws2, R001/probe-ws3 and 3 more"
    )


def test_the_implementation_is_to_blame_before_the_suite() -> None:
    """What was seen of it was seen."""
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


def test_three_cases_are_named_without_a_count() -> None:
    """There are no more."""
    cases = [a_case(world_size=size, requirements=["R001"]) for size in (1, 2, 3)]
    records = [a_record(case.id, Verdict.HANG, requirements=["R001"]) for case in cases]

    assert only_reason(certified(*records, profile=a_profile(*cases))).endswith("R001/probe-ws3")


def test_one_comparison_is_enough() -> None:
    """It can fail."""
    assert certified(a_record(PARITY, requirements=["R001"], comparisons=1)).certified


def test_a_disabled_case_leaves_the_run_incomplete() -> None:
    """The user switched it off."""
    certificate = certified(a_record(PARITY, Verdict.DISABLED, requirements=["R001"]))

    assert certificate.reasons == ("incomplete: DISABLED: R001/probe-ws2",)
    assert certificate.only_incomplete


def test_a_pass_without_a_comparison_is_none() -> None:
    """However it came into the file."""
    reason = only_reason(certified(a_record(PARITY, requirements=["R001"], comparisons=0)))

    assert reason == "R001/probe-ws2 passed without a comparison: R001/probe-ws2"


@pytest.mark.parametrize("change", [{"world_size": 3}, {"requirements": ["R001", "R002"]}])
def test_a_record_that_is_not_of_its_case_is_a_reason(change: dict[str, Any]) -> None:
    """Ranks and requirements are the profile's."""
    reason = only_reason(certified(a_record(PARITY, **{"requirements": ["R001"], **change})))

    assert reason.startswith("ran with a world size or requirements that are not those in the profile: R001/probe-ws2")


# Level S.


def test_a_should_that_is_not_met_is_printed_and_does_not_refuse() -> None:
    """The finding concerns nothing else."""
    certificate = certified(a_record("R070/probe-ws2", Verdict.FAIL, a_finding("R070"), requirements=["R070"]))

    assert certificate.certified
    assert certificate.remarks[0].startswith("SHOULD, not met: R070/probe-ws2: R070 (gradient parity)")


@pytest.mark.parametrize("others", [["R000"], ["R070", "R000"], []])
def test_a_should_case_that_shows_something_mandatory_refuses(others: list[str]) -> None:
    """Wrong numbers are wrong wherever they are seen; a FAIL without findings is no excuse either."""
    findings = [a_finding(name) for name in others]
    certificate = certified(a_record("R070/probe-ws2", Verdict.FAIL, *findings, requirements=["R070"]))

    assert only_reason(certificate) == "FAIL: R070/probe-ws2"


def test_a_should_case_that_hangs_refuses() -> None:
    """Nobody may hang."""
    certificate = certified(a_record("R070/probe-ws2", Verdict.HANG, a_finding("R070"), requirements=["R070"]))

    assert not certificate.certified


# UNSUPPORTED.


def unsupported(case: str) -> CaseRecord:
    """A case that the implementation declined."""
    return a_record(case, Verdict.UNSUPPORTED, requirements=[case[:4]])


def test_a_case_that_needs_what_is_not_declared_may_be_unsupported() -> None:
    """That is what declaring is for."""
    certificate = certified(unsupported("R093/probe-ws2"), flags="")

    assert certificate.certified
    assert certificate.counts == {"PASS": 3, "UNSUPPORTED": 1}


@pytest.mark.parametrize(("device", "excused"), [("cpu", True), ("cuda", False)])
def test_a_flag_that_is_declined_on_the_device_of_the_run_is_not_declared(device: str, excused: bool) -> None:
    """An implementation may offer less on one device than on another."""
    profile = a_profile(*CASES[:2], a_case(requirements=["R001"], needs=("no_sync",), world_size=3))
    record = unsupported("R001/probe-ws3")
    record.device = device
    run = a_run(record, profile=profile, settings={"device": device})
    run.header["implementation"]["declines_on"] = {"cpu": ["no_sync"]}

    assert certify(run, profile).certified == excused


def test_a_conditional_requirement_may_be_refused() -> None:
    """Also where the profile's entry names no flag."""
    profile = a_profile(*CASES[:2], a_case(requirements=["R107"]))

    assert certified(unsupported("R107/probe-ws2"), profile=profile).certified


def test_a_mandatory_requirement_may_not_be_unsupported() -> None:
    """Nothing that the case needs is left undeclared."""
    certificate = certified(unsupported(PARITY))

    assert certificate.reasons[0] == "UNSUPPORTED, but R001 is mandatory: R001/probe-ws2"
    assert certificate.status == 1


def test_a_mandatory_requirement_must_be_seen_once() -> None:
    """Who declares nothing is not certified for refusing everything."""
    profile = a_profile(
        a_case(requirements=["R188"]),
        a_case(requirements=["R001"], needs=("cpu_compute",)),
        a_case(requirements=["R001"], needs=("cpu_compute",), world_size=3),
    )
    refused = [unsupported("R001/probe-ws2"), unsupported("R001/probe-ws3")]

    assert only_reason(certified(*refused, profile=profile)) == (
        "R001 (Losses equal DDP's) is mandatory but was not shown: all of its cases are UNSUPPORTED"
    )
    assert certified(refused[0], profile=profile).certified


def test_a_requirement_is_seen_in_any_case_that_binds_it() -> None:
    """Not only where it is the primary one."""
    profile = a_profile(a_case(requirements=["R001"], needs=("zero2",)), a_case(requirements=["R188", "R001"]))

    assert certified(unsupported(PARITY), profile=profile, flags="").certified


def test_a_requirement_is_excused_by_its_own_flag() -> None:
    """R090 speaks of 16-bit reductions: without them there is nothing to see, and that is said."""
    (flag,) = contract.load()["R090"].flags
    profile = a_profile(*CASES[:2], a_case(requirements=["R090"], needs=(flag,)))
    certificate = certified(unsupported("R090/probe-ws2"), profile=profile)

    assert certificate.certified
    assert certificate.remarks == (
        "R090 (16-bit reductions neither overflow nor underflow) was not shown: fp16 not declared",
    )


@pytest.mark.parametrize(("declared", "excused"), [("", True), ("zero3", True), ("coll_volume", False)])
def test_each_unseen_case_is_excused_by_a_flag_of_the_requirement(declared: str, excused: bool) -> None:
    """R068 speaks of what `coll_volume` promises; that its case also needs `zero3` is the suite's affair."""
    profile = a_profile(*CASES[:2], a_case(requirements=["R068"], needs=("zero3", "coll_volume")))

    assert certified(unsupported("R068/probe-ws2"), profile=profile, flags=declared).certified == excused


def test_every_unseen_case_must_be_excused() -> None:
    """One that is refused for another reason is not excused by its neighbour."""
    cases = [
        a_case(requirements=["R068"], needs=(flag,), world_size=size)
        for size, flag in ((2, "coll_volume"), (3, "zero3"))
    ]
    refused = [unsupported(case.id) for case in cases]

    assert not certified(*refused, profile=a_profile(*CASES[:2], *cases), flags="").certified


# NOT_RUN_ENV.


def not_here(case: str, *absent: str) -> CaseRecord:
    """A case that this machine cannot tell."""
    return a_record(case, Verdict.NOT_RUN_ENV, requirements=[case[:4]], measurements={"absent": list(absent)})


CUDA_CASES = (*CASES[:2], a_case(requirements=["R018"], environment=("accelerator", "cuda")))


def test_what_the_profile_says_needs_a_device_may_be_left_to_another_machine() -> None:
    """Counted and printed; a mandatory requirement that this machine cannot show is named."""
    certificate = certified(not_here("R018/probe-ws2", "cuda"), profile=a_profile(*CUDA_CASES))

    assert certificate.certified
    assert certificate.remarks == (
        "1 case was not run for lack of a device or backend",
        "R018 (Parameters on several devices are refused) cannot be shown on this machine",
    )


@pytest.mark.parametrize(
    ("absent", "words"),
    [(["devices"], "devices"), (["cuda", "devices"], "cuda, devices"), ([], "something unnamed"), (["nccl"], "nccl")],
)
def test_what_the_profile_does_not_name_is_no_excuse(absent: list[str], words: str) -> None:
    """However good the reason; if nothing else is in the way the machine is."""
    certificate = certified(not_here("R018/probe-ws2", *absent), profile=a_profile(*CUDA_CASES))

    assert only_reason(certificate) == f"NOT_RUN_ENV (this machine lacks {words}): R018/probe-ws2"
    assert certificate.status == 3


def test_all_that_the_profile_names_may_be_absent() -> None:
    """As on a machine without any device."""
    assert certified(not_here("R018/probe-ws2", "accelerator", "cuda"), profile=a_profile(*CUDA_CASES)).certified


def test_cases_that_were_declined_and_cases_of_another_machine_are_weighed_together() -> None:
    """What is left for this machine is refused by a flag that is not the requirement's own."""
    cases = [
        a_case(requirements=["R001"], needs=("cpu_compute",)),
        a_case(requirements=["R001"], environment=("cuda",), world_size=3),
    ]
    found = [unsupported("R001/probe-ws2"), not_here("R001/probe-ws3", "cuda")]
    certificate = certified(*found, profile=a_profile(CASES[1], *cases))

    assert only_reason(certificate).startswith("R001 (Losses equal DDP's) is mandatory but was not shown")


def test_a_machine_that_was_also_narrowed_is_not_to_blame() -> None:
    """Another reason stands beside it."""
    certificate = certified(
        not_here("R018/probe-ws2", "devices"), profile=a_profile(*CUDA_CASES), settings={"cases": ["R018"]}
    )

    assert certificate.status == 1


# Remarks.


def test_shims_and_long_deadlines_are_printed() -> None:
    """What a reader of the certificate should know."""
    run = a_run(settings={"deadline_scale": 4.0})
    run.header["implementation"]["shims"] = ["patches torch.cuda.Event"]

    assert certify(run, a_profile()).remarks == (
        "shim: patches torch.cuda.Event",
        "deadlines were multiplied by 4",
    )


def test_a_certificate_is_json() -> None:
    """As the footer has it."""
    data = certified().to_json()

    assert data["certified"] is True
    assert data["reasons"] == []
    assert data["counts"] == {"PASS": 4}
