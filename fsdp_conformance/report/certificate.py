"""
The certificate: computed from the run file and the profile by set equality, never from what a test says about itself.

An implementation is CERTIFIED if every case of the profile was executed exactly once, by fresh ranks, each verdict is
one that a certificate allows, and every mandatory requirement was seen to hold at least once. Anything else is a
reason against it, and all reasons are listed. The end of a run and `verify`, which has only the file, use the same
function.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from typing import Any

from fsdp_conformance.config import SIMULATED
from fsdp_conformance.contract import Contract, Level, load
from fsdp_conformance.contract.profile import INTERPRETATION, Entry, Profile
from fsdp_conformance.contract.selection import OPTIONS
from fsdp_conformance.outcome import CaseRecord
from fsdp_conformance.report.runfile import RunFile
from fsdp_conformance.status import Status
from fsdp_conformance.verdict import Verdict

#: Verdicts that blame the implementation or its adapter.
_ACCUSING = frozenset({Verdict.FAIL, Verdict.HANG, Verdict.CRASH, Verdict.ERROR_ADAPTER})

#: How many ids a reason names.
_NAMED = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Certificate:
    """What a run certifies; if nothing, why not."""

    certified: bool
    profile: str
    reasons: tuple[str, ...]
    """Why it is not certified; empty if it is."""
    remarks: tuple[str, ...]
    """What else to know: SHOULD requirements that failed, requirements that this machine cannot show, shims."""
    counts: dict[str, int]
    """Number of cases for each verdict that occurs."""
    executed: int
    """Distinct cases of the profile that have a verdict."""
    expected: int
    """Cases of the profile."""
    status: Status
    """Exit status: 0 certified, 1 not, 3 if only this machine is to blame, 4 if only the suite is."""

    @property
    def word(self) -> str:
        """CERTIFIED or NOT CERTIFIED."""
        return "CERTIFIED" if self.certified else "NOT CERTIFIED"

    @property
    def only_incomplete(self) -> bool:
        """True if the only reason against a certificate is that the run did not cover the whole profile."""
        return bool(self.reasons) and all(reason.startswith("incomplete") for reason in self.reasons)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}


def certify(run: RunFile, profile: Profile, contract: Contract | None = None) -> Certificate:
    """The certificate that a run has earned for a profile."""
    contract = contract or load()
    records = {record.case: record for record in run.records}
    reasons = [*_run_problems(run), *_manifest_problems(run, profile)]
    blocked: list[tuple[CaseRecord, str]] = []
    remarks = _remarks(run)
    declared = {record.case: _declared(run, record.device) for record in run.records}
    for entry in profile.entries:
        record = records.get(entry.id)
        if record is not None:
            reason, remark = _objection(record, entry, declared[entry.id], contract)
            remarks += [remark] if remark else []
            if reason:
                blocked.append((record, reason))
    unshown, elsewhere = _unshown(profile, records, declared, contract)
    only_machine = not reasons and not unshown
    reasons += [*_gathered(blocked), *unshown]
    remarks += elsewhere
    return Certificate(
        certified=not reasons,
        profile=profile.name,
        reasons=tuple(reasons),
        remarks=tuple(dict.fromkeys(remarks)),
        counts={verdict.value: count for verdict, count in _counts(run.records).items()},
        executed=len(records.keys() & profile.by_id.keys()),
        expected=len(profile.entries),
        status=_status(reasons, {record.verdict for record, _ in blocked}, only_machine=only_machine),
    )


def _declared(run: RunFile, device: str) -> frozenset[str]:
    """The flags that the implementation declares on a case's device: a run on the CPU has simulated cases, too."""
    described: Mapping[str, Any] = run.header.get("implementation") or {}
    device = device or (run.header.get("settings") or {}).get("device", "")
    declined = (described.get("declines_on") or {}).get(device, ())
    return frozenset(described.get("capabilities", ())) - frozenset(declined)


def _counts(records: Iterable[CaseRecord]) -> dict[Verdict, int]:
    counted = Counter(record.verdict for record in records)
    return {verdict: counted[verdict] for verdict in Verdict if counted[verdict]}


def _run_problems(run: RunFile) -> list[str]:
    """Why the run as a whole proves nothing, whatever its verdicts are."""
    settings: Mapping[str, Any] = run.header.get("settings") or {}
    problems = list(run.problems)
    if run.unfinished():
        problems.append(f"incomplete: {_some(run.unfinished())} started but did not finish")
    for option, key in OPTIONS.items():
        if settings.get(key):
            problems.append(f"incomplete: {option} left cases out")
    if settings.get("reuse_ranks") or any(record.ranks == "reused" for record in run.records):
        problems.append("incomplete: --reuse-ranks, and a certificate needs fresh ranks for every case")
    if settings.get("ranks") == "simulated":
        problems.append("incomplete: simulated ranks do not exercise a real backend")
    problems += [note["text"] for note in run.notes if note.get("refuses")]
    if not run.header.get("implementation"):
        problems.append("incomplete: the implementation is not described")
    return problems


def _manifest_problems(run: RunFile, profile: Profile) -> list[str]:
    """How the cases that ran differ from those of the profile."""
    stated: Mapping[str, Any] = run.header.get("profile") or {}
    problems = []
    if not profile.certifies:
        problems.append(f"incomplete: the profile {profile.name} is a selection, which cannot certify")
    if (stated.get("name"), stated.get("sha256")) != (profile.name, profile.sha256):
        problems.append(
            f"profile of the run: expected {profile.name} {profile.sha256[:12]}, "
            f"got {stated.get('name')} {str(stated.get('sha256'))[:12]}"
        )
    if profile.interpretation != INTERPRETATION or run.header.get("interpretation") != INTERPRETATION:
        problems.append(f"interpretation: expected {INTERPRETATION}, got {run.header.get('interpretation')}")
    if not profile.entries:
        problems.append("incomplete: the profile has no cases")
    times = Counter(record.case for record in run.records)
    missing = [entry.id for entry in profile.entries if entry.id not in times]
    if missing:
        problems.append(f"incomplete: {len(missing)} of {len(profile.entries)} cases were not run: {_some(missing)}")
    strange = [case for case in times if case not in profile.by_id]
    if strange:
        problems.append(f"not in the profile: {_some(strange)}")
    twice = [case for case, count in times.items() if count > 1]
    if twice:
        problems.append(f"not comparable: {_some(twice)} ran more than once")
    return problems


def _objection(record: CaseRecord, entry: Entry, declared: frozenset[str], contract: Contract) -> tuple[str, str]:
    """Why a record rules out a certificate, and what to remark if it does not."""
    if record.world_size != entry.world_size or tuple(record.requirements) != entry.requirements:
        return "ran with a world size or requirements that are not those in the profile", ""
    match record.verdict:
        case Verdict.PASS:
            return ("", "") if record.comparisons > 0 else (f"{record.case} passed without a comparison", "")
        case Verdict.UNSUPPORTED:
            excused = any(flag not in declared for flag in entry.needs) or entry.level is not Level.MUST
            return ("", "") if excused else (f"UNSUPPORTED, but {entry.primary} is mandatory", "")
        case Verdict.NOT_RUN_ENV:
            absent = list(record.measurements.get("absent", ()))
            if absent and set(absent) <= set(entry.environment):
                return "", ""
            return f"NOT_RUN_ENV (this machine lacks {', '.join(map(str, absent)) or 'something unnamed'})", ""
        case Verdict.FAIL if _only_should(record, contract):
            return "", f"SHOULD, not met: {record.case}: {record.reason}"
        case Verdict.DISABLED:
            return "incomplete: DISABLED", ""
    return str(record.verdict), ""


def _only_should(record: CaseRecord, contract: Contract) -> bool:
    """True if all requirements that were seen to fail are SHOULD requirements."""
    levels = [contract[item.requirement].level for item in record.findings if item.requirement in contract.requirements]
    return len(levels) == len(record.findings) > 0 and set(levels) == {Level.SHOULD}


def _gathered(blocked: Sequence[tuple[CaseRecord, str]]) -> list[str]:
    """One reason for all cases that rule out a certificate for the same reason."""
    by_reason: dict[str, list[str]] = {}
    for record, reason in blocked:
        by_reason.setdefault(reason, []).append(record.case)
    return [f"{reason}: {_some(cases)}" for reason, cases in by_reason.items()]


def _unshown(
    profile: Profile,
    records: Mapping[str, CaseRecord],
    declared: Mapping[str, frozenset[str]],
    contract: Contract,
) -> tuple[list[str], list[str]]:
    """
    Mandatory requirements that no case was seen to meet: as reasons, or as remarks if there is an excuse.

    Excuses are that only another machine can show a requirement, and that its own flag is not declared.
    """
    reasons, remarks = [], []
    bound: dict[str, list[Entry]] = {}
    for entry in profile.entries:
        for name in entry.requirements:
            bound.setdefault(name, []).append(entry)
    for name, entries in bound.items():
        requirement = contract.requirements.get(name)
        if requirement is None or requirement.level is not Level.MUST:
            continue
        found = [(entry, records[entry.id].verdict) for entry in entries if entry.id in records]
        verdicts = {verdict for _, verdict in found}
        # Cases that failed or were not run are reasons already.
        if len(found) < len(entries) or not verdicts <= {Verdict.UNSUPPORTED, Verdict.NOT_RUN_ENV}:
            continue
        refused = [
            frozenset(entry.needs) - declared[entry.id] for entry, verdict in found if verdict is Verdict.UNSUPPORTED
        ]
        own = [missing & set(requirement.flags) for missing in refused]
        if not refused:
            remarks.append(f"{name} ({requirement.name}) cannot be shown on this machine")
        elif all(own):
            flags = ", ".join(sorted(frozenset().union(*own)))
            remarks.append(f"{name} ({requirement.name}) was not shown: {flags} not declared")
        else:
            reasons.append(
                f"{name} ({requirement.name}) is mandatory but was not shown: all of its cases are UNSUPPORTED"
            )
    return reasons, remarks


def _remarks(run: RunFile) -> list[str]:
    implementation: Mapping[str, Any] = run.header.get("implementation") or {}
    remarks = [f"shim: {shim}" for shim in implementation.get("shims", ())]
    scale = (run.header.get("settings") or {}).get("deadline_scale", 1.0)
    if scale != 1.0:
        remarks.append(f"deadlines were multiplied by {scale:g}")
    absent = sum(record.verdict is Verdict.NOT_RUN_ENV for record in run.records)
    if absent:
        remarks.append(f"{absent} case{'s were' if absent > 1 else ' was'} not run for lack of a device or backend")
    simulated = sum(record.device == SIMULATED and record.comparisons > 0 for record in run.records)
    if simulated and (run.header.get("settings") or {}).get("device") != SIMULATED:
        remarks.append(f"{simulated} case{'s' if simulated > 1 else ''} ran on the simulated accelerator")
    remarks += [note["text"] for note in run.notes if not note.get("refuses")]
    return remarks


def _status(reasons: Sequence[str], verdicts: Set[Verdict], *, only_machine: bool) -> Status:
    """Who has to act: the implementer, the owner of the machine, or the suite's maintainers."""
    if not reasons:
        return Status.CERTIFIED
    if verdicts & _ACCUSING:
        return Status.NOT_CERTIFIED
    if Verdict.ERROR_SUITE in verdicts:
        return Status.SUITE
    return Status.ENVIRONMENT if only_machine and verdicts == {Verdict.NOT_RUN_ENV} else Status.NOT_CERTIFIED


def _some(ids: Sequence[str]) -> str:
    """The first few ids, and the number of others."""
    more = len(ids) - _NAMED
    return ", ".join(ids[:_NAMED]) + (f" and {more} more" if more > 0 else "")
