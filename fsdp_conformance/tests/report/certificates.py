"""Runs of a small profile whose base is R001 and R188, and their certificates."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fsdp_conformance.contract.case import Case
from fsdp_conformance.contract.fingerprint import suite_sha256
from fsdp_conformance.contract.gate import is_refereed, ranks_of
from fsdp_conformance.contract.profile import INTERPRETATION, Profile, profile_of
from fsdp_conformance.judge import Observed, judge, keep_evidence
from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.report.certificate import Certificate, certify
from fsdp_conformance.report.run_content import RunFile
from fsdp_conformance.run_settings import RunSettings, settings_from_json
from fsdp_conformance.tests.report.evidence import DESCRIBED, LOADED, a_case, a_finding, a_record, a_report, exits
from fsdp_conformance.verdict import Verdict

PARITY, SHARDS = "R001/probe-ws2", "R188/probe-ws2"

SHARED = (
    "incomplete: --share-devices, so ranks shared devices and communicated over gloo: the run says nothing about ranks "
    "with a device each, or about their backend"
)

#: R001 and R188 are mandatory and need nothing: the base. R093 is of level C: an extension. R070 is of level S.
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
    usual = RunSettings(implementation=DESCRIBED["spec"], profile=profile.name)
    settings = {**asdict(usual), **changes.pop("settings", {})}
    header = {
        "interpretation": INTERPRETATION,
        "suite": "0.1",
        "suite_sha256": suite_sha256(),
        "profile": {"name": profile.name, "sha256": profile.sha256, "cases": len(profile.entries)},
        "implementation": {**DESCRIBED, "capabilities": flags.split()},
        "environment": {"torch": LOADED["torch"], "python": "3.11.7"},
        "settings": settings,
    }
    passed = [
        given.get(entry.id) or a_record(entry.id, requirements=list(entry.requirements)) for entry in profile.entries
    ]
    extra = [record for record in records if record.case not in profile.by_id]
    ran = settings_from_json(settings)
    for record in passed:
        if record.case not in given:
            record.ranks, record.device = ranks_of(ran), ran.device
            record.refereed = is_refereed(profile.by_id[record.case].case(), ran, ran.device)
    started = [record.case for record in (*passed, *extra)]
    return RunFile(path="run.jsonl", **{"header": header, "records": [*passed, *extra], "started": started, **changes})


def certified(*records: CaseRecord, profile: Profile | None = None, **changes: Any) -> Certificate:
    """The certificate of such a run, for a profile that is trusted."""
    profile = profile or a_profile()
    return certificate_of(a_run(*records, profile=profile, **changes), profile)


def certificate_of(run: RunFile, profile: Profile | None = None) -> Certificate:
    """The certificate of a run for a profile that is trusted."""
    profile = profile or a_profile()
    return certify(run, profile, trusted={profile.name: profile.sha256})


def states(certificate: Certificate) -> dict[str, str]:
    """Each scope's title and state."""
    return {scope.title: scope.state.value for scope in certificate.scopes}


def only_reason(certificate: Certificate) -> str:
    """The one reason against it."""
    assert not certificate.certified
    (reason,) = certificate.reasons
    return reason


def unsupported(case: str, **changes: Any) -> CaseRecord:
    """A case that the implementation declined."""
    flags = {"R093": ["no_sync"], "R172": ["bucketing"], "R166": ["reducer"]}
    measured = {"undeclared": flags[case[:4]]} if case[:4] in flags else {}
    return a_record(case, Verdict.UNSUPPORTED, requirements=[case[:4]], **{"measurements": measured, **changes})


def unfollowed(case: str) -> CaseRecord:
    """A case of a recommendation that the implementation does not follow, with its evidence."""
    primary = case[:4]
    reports = [a_report(0, a_finding(primary)), a_report(1)]
    record = judge(a_case(requirements=[primary]), Observed(reports=reports, exits=exits(2)), RunSettings())
    record.environment, record.adapter, record.refereed = dict(LOADED), LOADED["adapter"], True
    return keep_evidence(record, reports)
