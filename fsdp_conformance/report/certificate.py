"""
The certificate: computed from the run file and the profile by set equality, never from what a test says about itself.

A certificate consists of scopes (`contract.scopes`): a base, which every sharded engine must pass, and extensions. A
scope is granted if each of its cases was executed exactly once, by fresh ranks, and passed, and if each verdict follows
from the evidence in its record (`judge.evidence`). An implementation is CERTIFIED if the base is granted and nothing is
wrong with the run as a whole. Everything else is a reason against it or a remark, and all of them are listed. The end
of a run and `verify`, which has only the file, use the same function.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Any

from msgspec import Meta

from fsdp_conformance import __version__, codec, stress
from fsdp_conformance.adapters.allowances import DEFAULT_PADDING, excesses
from fsdp_conformance.adapters.registry import bundled_as, identity
from fsdp_conformance.capability import CAPABILITIES, Asked, offered
from fsdp_conformance.contract import Contract, Level, load
from fsdp_conformance.contract.fingerprint import suite_sha256
from fsdp_conformance.contract.profile import COMPONENT_CHAPTERS, INTERPRETATION, Entry, Profile, shipped
from fsdp_conformance.contract.scopes import ADVICE, BASE, PAIRS, title
from fsdp_conformance.contract.selection import narrowing_options
from fsdp_conformance.judge import LOUD_REFUSAL, contradictions, is_excused, shutdown_problems
from fsdp_conformance.listing import some
from fsdp_conformance.outcome.records import ABSENT, INAPPLICABLE, SCENARIO, UNDECLARED, CaseRecord, RequirementId
from fsdp_conformance.plan import SIMULATED
from fsdp_conformance.report.pairs import pair_coverage
from fsdp_conformance.report.run_content import RunFile
from fsdp_conformance.run_settings import DEFAULTS, SHARED_DEVICES, RunSettings, impossible, settings_from_json
from fsdp_conformance.scenarios import fresh
from fsdp_conformance.scenarios.axes import PROCESSES_ALONE
from fsdp_conformance.status import Status
from fsdp_conformance.verdict import ACCUSING, CERTIFIABLE, Verdict

#: How many ids a reason names, and how many avoided combinations are listed one by one.
_NAMED = 3

#: Verdict to the number of cases that have it.
Counts = Annotated[
    dict[str, Annotated[int, Meta(extra_json_schema={"minimum": 1})]],
    Meta(extra_json_schema={"propertyNames": {"$ref": "#/$defs/Verdict"}}),
]


class State(StrEnum):
    """The state of a case, or of a scope, after a run. A scope is in the first state that one of its cases is in."""

    FAILED = "failed"
    UNJUDGED = "not judged"
    """The suite failed, the references disagree, or the record contradicts itself."""
    LEFT_OUT = "not run"
    """The run did not execute it."""
    DECLINED = "declined"
    """The implementation does not offer it."""
    NOT_HERE = "not on this machine"
    PASSED = "passed"
    INAPPLICABLE = "does not apply"
    """The case disturbs what the implementation never does. Last: a scope is passed by its other cases."""


_STATE = {
    Verdict.PASS: State.PASSED,
    Verdict.UNSUPPORTED: State.DECLINED,
    Verdict.NOT_RUN_ENV: State.NOT_HERE,
    Verdict.DISABLED: State.LEFT_OUT,
    **dict.fromkeys(ACCUSING, State.FAILED),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Scope:
    """One scope of a certificate."""

    names: tuple[str, ...]
    state: State
    cases: int
    passed: int
    example: str = ""
    """The first case that keeps the scope from being granted."""

    @property
    def title(self) -> str:
        """The scope in words."""
        return title(self.names)


@dataclass(frozen=True, kw_only=True, slots=True)
class Certificate:
    """The certificate of a run; without one, the reasons why there is none."""

    certified: bool
    private: bool
    """True if the profile, or the cases, are not shipped with the suite, so that nothing can be certified."""
    profile: str
    scopes: tuple[Scope, ...]
    """The base first, then extensions, then their combinations, each by name."""
    subject: dict[str, str]
    """The implementation and the suite that judged it: versions and hashes."""
    declarations: tuple[str, ...]
    """The adapter's declarations that loosen a check or change what runs, one phrase each."""
    unobserved: tuple[RequirementId, ...]
    """Ids of the mandatory requirements that no case was seen to meet, from the whole register."""
    reasons: tuple[str, ...]
    """Why it is not certified; empty if it is."""
    remarks: tuple[str, ...]
    """Further remarks: SHOULD requirements that failed, reruns, scaled deadlines."""
    counts: Counts
    """Number of cases for each verdict that occurs."""
    executed: int
    """Distinct cases of the profile that have a verdict."""
    expected: int
    """Cases of the profile."""
    status: Status
    """Exit status: 0 certified and nothing failed; 3 if only this machine is to blame, 4 if only the suite is."""

    @property
    def word(self) -> str:
        """CERTIFIED, NOT CERTIFIED, or PRIVATE RUN."""
        if self.private:
            return "PRIVATE RUN"
        return "CERTIFIED" if self.certified else "NOT CERTIFIED"

    @property
    def on_shared_devices(self) -> bool:
        """True if ranks shared devices."""
        return any(reason.startswith(_SHARING) for reason in self.reasons)

    @property
    def extensions(self) -> list[Scope]:
        """The scopes of a single extension, or of a single component."""
        return [scope for scope in self.scopes if len(scope.names) == 1 and scope.names != BASE]

    @property
    def combinations(self) -> list[Scope]:
        """The scopes of several extensions."""
        return [scope for scope in self.scopes if len(scope.names) > 1]

    @property
    def only_incomplete(self) -> bool:
        """True if nothing failed, and there is no certificate because the run did not cover the whole profile."""
        return (
            bool(self.reasons)
            and all(reason.startswith(("incomplete", _PRIVATE)) for reason in self.reasons)
            and ACCUSING.isdisjoint(self.counts)
        )

    def to_json(self) -> dict[str, Any]:
        """The certificate as it comes back from a run file."""
        content: dict[str, Any] = json.loads(codec.encode(codec.plain(self)))
        return content


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shown:
    """The state of one case after a run."""

    entry: Entry
    state: State
    verdict: Verdict | None = None
    reason: str = ""
    """Why the case does not count as passed, without its id."""
    remark: str = ""
    refuses: bool = False
    """
    It rules out a certificate whatever its scope: its record was edited, or it trained to wrong results on a model that
    needs nothing that has to be declared, so nothing excuses it.
    """


def certify(
    run: RunFile, profile: Profile, contract: Contract | None = None, *, trusted: Mapping[str, str] | None = None
) -> Certificate:
    """
    The certificate that a run has earned for a profile.

    `trusted` maps the names of profiles that can certify to their hashes; by default those that the suite ships.
    """
    contract = contract or load()
    private = profile.sha256 != (shipped(profile.name) if trusted is None else trusted.get(profile.name))
    records = {record.case: record for record in run.records}
    reasons = [*_run_problems(run), *_manifest_problems(run, profile, private=private)]
    settings = settings_from_json(run.header.get("settings") or {})
    shown = [_shown(records.get(entry.id), entry, run, settings) for entry in profile.entries]
    blocking = [item for item in shown if item.refuses or (item.entry.scope == BASE and item.reason)]
    reasons += _gathered(blocking)
    scopes = _scopes(shown)
    if all(scope.names != BASE and scope.state is not State.PASSED for scope in scopes) and profile.entries:
        reasons.append("no component was passed completely")
    if any(scope.names == BASE and scope.state is State.INAPPLICABLE for scope in scopes):
        reasons.append("no case of the base applies")
    return Certificate(
        certified=not reasons,
        private=private or any(reason.startswith(_PRIVATE) for reason in reasons),
        profile=profile.name,
        scopes=scopes,
        subject=_subject(run),
        declarations=tuple(_declarations(run)),
        unobserved=_unobserved(shown, profile, contract),
        reasons=tuple(reasons),
        remarks=tuple(dict.fromkeys([*_pairs(run), *_remarks(run), *(item.remark for item in shown if item.remark)])),
        counts={verdict.value: count for verdict, count in _counts(run.records).items()},
        executed=len(records.keys() & profile.by_id.keys()),
        expected=len(profile.entries),
        status=_status(reasons, blocking, shown),
    )


def _shown(record: CaseRecord | None, entry: Entry, run: RunFile, settings: RunSettings) -> _Shown:
    """The state of the case, from its record."""
    if record is None:
        return _Shown(entry=entry, state=State.LEFT_OUT)
    shown = _Shown(entry=entry, state=_STATE.get(record.verdict, State.UNJUDGED), verdict=record.verdict)
    if record.world_size != entry.world_size or tuple(record.requirements) != entry.requirements:
        reason = "ran with a world size or requirements that are not those in the profile"
        return replace(shown, state=State.UNJUDGED, reason=reason, refuses=True)
    lies = contradictions(record, entry.case(), declared=lambda device: _declared(run, device), settings=settings)
    lies = lies or _another_subject(record, run) or _another_scenario(record, run, settings)
    if lies:
        reason = f"the record contradicts itself ({'; '.join(lies)})"
        return replace(shown, state=State.UNJUDGED, reason=reason, refuses=True)
    if untidy := shutdown_problems(record):
        return replace(shown, state=State.UNJUDGED, reason=f"ended badly ({'; '.join(untidy)})")
    match record.verdict:
        case Verdict.PASS:
            return shown
        case Verdict.FAIL if is_excused(record):
            return replace(shown, state=State.PASSED, remark=f"SHOULD, not met: {record.case}: {record.reason}")
        case Verdict.UNSUPPORTED if record.measurements.get(INAPPLICABLE):
            return replace(shown, state=State.INAPPLICABLE, remark=f"does not apply: {record.case}: {record.reason}")
        case Verdict.UNSUPPORTED:
            flags = ", ".join(map(str, record.measurements.get(UNDECLARED, ()))) or "something unnamed"
            return replace(shown, reason=f"declined ({flags})")
        case Verdict.NOT_RUN_ENV:
            absent = ", ".join(map(str, record.measurements.get(ABSENT, ()))) or "something unnamed"
            return replace(shown, reason=f"NOT_RUN_ENV (this machine lacks {absent})")
        case Verdict.DISABLED:
            return replace(shown, reason="incomplete: DISABLED")
    refuses = shown.state is State.FAILED and _is_silent(record, entry)
    return replace(shown, reason=str(record.verdict), refuses=refuses)


def _is_silent(record: CaseRecord, entry: Entry) -> bool:
    """
    True if a failure counts whatever is declared (R000).

    A case that asks for a capability only through its model runs for every engine. To declare that capability must not
    turn wrong numbers into the failure of an extension.
    """
    if entry.scope in (BASE, ADVICE, PAIRS):
        return entry.scope == ADVICE
    names_refusal = any(finding.requirement == LOUD_REFUSAL for finding in record.findings)
    by_model = all(flag in CAPABILITIES and CAPABILITIES[flag].asked is Asked.MODEL for flag in entry.needs)
    refused = bool(record.findings) and record.findings[0].check == "refusal"
    return names_refusal or (by_model and bool(entry.needs) and not refused)


def _another_subject(record: CaseRecord, run: RunFile) -> list[str]:
    """How what was judged, and what the ranks had loaded, differs from what the header says."""
    environment: Mapping[str, Any] = run.header.get("environment") or {}
    implementation: Mapping[str, Any] = run.header.get("implementation") or {}
    adapter = implementation.get("identity")
    problems = []
    if record.adapter != adapter and (record.adapter or record.verdict in CERTIFIABLE or is_excused(record)):
        problems.append(
            f"it was judged on the adapter {record.adapter[:12] or 'of no name'}, but the header names {adapter!s:.12}"
        )
    if record.verdict is not Verdict.PASS:
        return problems
    stated = {"torch": environment.get("torch"), "adapter": adapter}
    problems += [
        f"its ranks loaded {name} {str(record.environment.get(name))[:12]}, but the header says {str(expected)[:12]}"
        for name, expected in stated.items()
        if record.environment.get(name) != expected
    ]
    if record.case not in run.started:
        problems.append("it has a verdict but never started")
    return problems


def _another_scenario(record: CaseRecord, run: RunFile, settings: RunSettings) -> list[str]:
    """How the scenario that a case has trained differs from those that the seed of the run draws for it."""
    draw = fresh.CASES.get(record.case)
    if draw is None or not record.evidence:
        return []
    declared = _declared(run, record.device)
    if record.ranks == "simulated":
        declared -= PROCESSES_ALONE
    described: Mapping[str, Any] = run.header.get("implementation") or {}
    drawn = fresh.candidates(draw, settings.scenario_seed, declared, described.get("avoids") or ())
    if any(record.measurements.get(SCENARIO) == scenario.to_json() for scenario in drawn):
        return []
    return [f"its scenario is none of those that the seed {settings.scenario_seed} draws for it"]


def _declared(run: RunFile, device: str) -> frozenset[str]:
    """The flags that the implementation declares on a device: a run on the CPU has simulated cases, too."""
    described: Mapping[str, Any] = run.header.get("implementation") or {}
    return offered(
        device,
        described.get("capabilities", ()),
        adds_on=described.get("adds_on") or {},
        declines_on=described.get("declines_on") or {},
    )


def _counts(records: Iterable[CaseRecord]) -> dict[Verdict, int]:
    counted = Counter(record.verdict for record in records)
    return {verdict: counted[verdict] for verdict in Verdict if counted[verdict]}


def _scopes(shown: Sequence[_Shown]) -> tuple[Scope, ...]:
    """Every scope of the profile, and the state that it is in."""
    members: dict[tuple[str, ...], list[_Shown]] = {}
    for item in shown:
        if item.entry.scope != ADVICE:
            members.setdefault(item.entry.scope, []).append(item)
    scopes = []
    for names in sorted(members, key=lambda names: (names != BASE, len(names), names)):
        items = members[names]
        state = next(state for state in State if any(item.state is state for item in items))
        scopes.append(
            Scope(
                names=names,
                state=state,
                cases=len(items),
                passed=sum(item.state is State.PASSED for item in items),
                example="" if state is State.PASSED else next(item.entry.id for item in items if item.state is state),
            )
        )
    return tuple(scopes)


def _subject(run: RunFile) -> dict[str, str]:
    """The implementation and the suite that judged it."""
    header = run.header
    implementation: Mapping[str, Any] = header.get("implementation") or {}
    environment: Mapping[str, Any] = header.get("environment") or {}
    subject = {
        "implementation": implementation.get("name"),
        "version": implementation.get("version"),
        "adapter": implementation.get("identity"),
        "suite": header.get("suite"),
        "suite_sha256": header.get("suite_sha256"),
        "torch": environment.get("torch"),
        "python": environment.get("python"),
    }
    return {key: str(value or "") for key, value in subject.items()}


def _pairs(run: RunFile) -> Iterator[str]:
    """How many pairs of values the rows of the run cover."""
    device = str((run.header.get("settings") or {}).get("device") or "cpu")
    coverage = pair_coverage(run.records, run.header.get("implementation") or {}, device)
    if coverage is not None:
        yield coverage.sentence()


def _declarations(run: RunFile) -> list[str]:
    """The adapter's declarations that loosen a check or change what runs."""
    described: Mapping[str, Any] = run.header.get("implementation") or {}
    phrases = [f"shim: {shim}" for shim in described.get("shims", ())]
    if described.get("padding"):
        phrases.append(
            f"padding: up to {described['padding']:.0%} more bytes on the wire than the shards have"
            + (", as for every adapter that declares nothing else" if described["padding"] == DEFAULT_PADDING else "")
        )
    if described.get("accumulation", "local") != "local":
        phrases.append(f"accumulation: micro-batches are {described['accumulation']} one by one")
    if described.get("max_unsharded"):
        units = f"{described['max_unsharded']} unit{'s' if described['max_unsharded'] > 1 else ''}"
        phrases.append(f"max_unsharded: up to {units} below the root with full parameters at once")
    if described.get("kept_buffers"):
        phrases.append(
            f"kept_buffers: up to {described['kept_buffers']} times the largest unit in buffers between steps"
        )
    phrases += _avoided(described.get("avoids") or ())
    phrases += [f"environment: {key}={value}" for key, value in (described.get("environment") or {}).items()]
    phrases += [
        f"declines on {device}: {', '.join(flags)}" for device, flags in (described.get("declines_on") or {}).items()
    ]
    return phrases


def _avoided(combinations: Sequence[Mapping[str, str]]) -> list[str]:
    """A phrase for each combination if there are few, and otherwise one that counts them by their axes."""
    if len(combinations) <= _NAMED:
        return [f"avoids: {' and '.join(f'{axis} {value}' for axis, value in each.items())}" for each in combinations]
    counts = Counter(" with ".join(sorted(each)) for each in combinations)
    axes = ", ".join(axes if count == 1 else f"{axes} ({count})" for axes, count in counts.most_common())
    return [f"avoids: {len(combinations)} combinations, which the run file's header lists: {axes}"]


#: What a header must say for a certificate to name what was judged.
_NAMED_IN_HEADER = {
    "implementation": "the implementation's name",
    "adapter": "the identity of the adapter",
    "suite": "the suite's version",
    "suite_sha256": "the suite's hash",
    "torch": "the version of torch",
    "python": "the version of Python",
}


#: Settings that no reason and no other remark is about, in words.
_UNUSUAL = {
    "seed": "the seed of the ranks",
    "num_threads": "threads per rank",
    "simulator": "a simulated accelerator for cases that need one (--no-simulator)",
}

#: How the reason begins against a run that another version of the suite has made.
OTHER_VERSION = "another version: this run was made by"

#: How a reason begins that concerns a profile or cases that the suite does not ship.
_PRIVATE = "private:"

#: How the reason begins that a run with --share-devices certifies nothing.
_SHARING = "incomplete: --share-devices, so ranks shared devices and communicated over gloo:"


def _run_problems(run: RunFile) -> list[str]:
    """Why the run as a whole proves nothing, whatever its verdicts are."""
    settings: Mapping[str, Any] = run.header.get("settings") or {}
    problems = [*run.problems, *run.misplaced, *_of_another_version(run), *_header_problems(run)]
    if run.unfinished():
        problems.append(f"incomplete: {some(run.unfinished(), _NAMED)} started but did not finish")
    often = [case for case, count in Counter(run.interrupted).items() if count > 1]
    if often:
        problems.append(f"{some(often, _NAMED)} began more than twice, because the run was stopped each time")
    if settings.get("workload"):
        problems.append(f"{_PRIVATE} --workload {settings['workload']}: the model is the user's, not of this suite")
    if settings.get("reuse_ranks") or any(record.ranks == "reused" for record in run.records):
        problems.append("incomplete: --reuse-ranks, and a certificate needs fresh ranks for every case")
    if settings.get("share_devices") or any(record.ranks == SHARED_DEVICES for record in run.records):
        problems.append(f"{_SHARING} the run says nothing about ranks with a device each, or about their backend")
    if settings.get("ranks") == "simulated":
        problems.append("incomplete: simulated ranks do not exercise a real backend")
    if settings.get("stress_seed") is not None or any(stress.MEASUREMENT in item.measurements for item in run.records):
        problems.append("incomplete: --stress, and a certificate needs ranks that nothing disturbs")
    if settings.get("fresh_seed") is not None:
        problems.append("incomplete: --fresh-seed, and a certificate needs scenarios that could not be foreseen")
    problems += [note["text"] for note in run.notes if note.get("refuses")]
    if not run.header.get("implementation"):
        problems.append("incomplete: the implementation is not described")
    else:
        subject = _subject(run)
        missing = [words for key, words in _NAMED_IN_HEADER.items() if subject[key] in ("", "absent")]
        if missing:
            problems.append(f"the header does not name what was judged: {', '.join(missing)} is missing")
    return problems


def _of_another_version(run: RunFile) -> Iterator[str]:
    """Why this version of the suite cannot confirm the run: other cases and checks may have made it."""
    stated = str(run.header.get("suite_sha256") or "")
    if stated and not run.is_of_this_suite:
        version = f"{run.header.get('suite')} {stated:.12}"
        yield (
            f"{OTHER_VERSION} {version} of the suite, and only that version can confirm it; this is {__version__} "
            f"{suite_sha256():.12}"
        )


def _header_problems(run: RunFile) -> Iterator[str]:
    """How the header contradicts itself."""
    described: Mapping[str, Any] = run.header.get("implementation") or {}
    environment: Mapping[str, Any] = run.header.get("environment") or {}
    settings = settings_from_json(run.header.get("settings") or {})
    for problem in impossible(settings):
        yield f"no run has such settings: {problem}"
    if environment.get("device", settings.device) != settings.device:
        yield (
            f"the header names two devices: {environment['device']} in its environment, {settings.device} in its "
            "settings"
        )
    if not described:
        return
    if described.get("spec", settings.implementation) != settings.implementation:
        yield (
            f"the header names two implementations: {described['spec']} in its description, "
            f"{settings.implementation} in its settings"
        )
    yield from (f"no adapter is loaded that declares this: {problem}" for problem in excesses(described))
    if "identity" in described and described["identity"] != identity(described):
        yield "the identity of the adapter does not follow from its name, version, class and hashes"
    if run.is_of_this_suite:
        yield from _bundled_problems(run.header)


def _bundled_problems(header: Mapping[str, Any]) -> Iterator[str]:
    """How the header contradicts what this suite knows of the adapters that it ships."""
    described = header["implementation"]
    bundled = bundled_as(described)
    by_name, by_code = bundled.get("name"), bundled.get("code")
    if by_code is None and by_name is not None:
        yield f"the adapter is called {by_name} like a bundled one, but is another class or file"
    if by_code is not None and by_name != by_code:
        yield f"the adapter is the bundled {by_code}, but is called {described.get('name')}"
    versions = {"torch": (header.get("environment") or {}).get("torch"), "reference": header.get("suite")}
    family = (by_code or "").partition("-")[0]
    if family in versions and described.get("version") != versions[family]:
        yield f"the version of {by_code} must be {versions[family]}, got {described.get('version')}"


def _manifest_problems(run: RunFile, profile: Profile, *, private: bool) -> list[str]:
    """How the cases that ran differ from those of the profile."""
    stated: Mapping[str, Any] = run.header.get("profile") or {}
    settings = settings_from_json(run.header.get("settings") or {})
    problems = [f"incomplete: {option} left cases out" for option in narrowing_options(profile, settings)]
    if private:
        problems.append(f"private: the profile {profile.name} {profile.sha256[:12]} is not shipped with this suite")
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
        problems.append(
            f"incomplete: {len(missing)} of {len(profile.entries)} cases were not run: {some(missing, _NAMED)}"
        )
    strange = [case for case in times if case not in profile.by_id]
    if strange:
        problems.append(f"not in the profile: {some(strange, _NAMED)}")
    twice = [case for case, count in times.items() if count > 1]
    if twice:
        problems.append(f"not comparable: {some(twice, _NAMED)} ran more than once")
    return problems


def _gathered(blocking: Sequence[_Shown]) -> list[str]:
    """One reason for all cases that rule out a certificate for the same reason."""
    by_reason: dict[str, list[str]] = {}
    for item in blocking:
        by_reason.setdefault(item.reason, []).append(item.entry.id)
    return [f"{reason}: {some(cases, _NAMED)}" for reason, cases in by_reason.items()]


def _unobserved(shown: Sequence[_Shown], profile: Profile, contract: Contract) -> tuple[str, ...]:
    """
    The mandatory requirements of the whole register that no case was seen to meet.

    A profile of components is measured against the component chapters, any other against the rest.
    """
    of_components = all(entry.case().chapter in COMPONENT_CHAPTERS for entry in profile.entries)
    observed = {name for item in shown if item.state is State.PASSED for name in item.entry.requirements}
    return tuple(
        requirement.id
        for requirement in contract.requirements.values()
        if requirement.level is Level.MUST
        and (requirement.chapter in COMPONENT_CHAPTERS) is of_components
        and requirement.id not in observed
    )


def _remarks(run: RunFile) -> list[str]:
    remarks = []
    settings = settings_from_json(run.header.get("settings") or {})
    if not settings.smoke:
        remarks.append("the adapter was not checked before the run (--no-smoke)")
    remarks += [
        f"{words}: {getattr(settings, name)}, usually {getattr(DEFAULTS, name)}"
        for name, words in _UNUSUAL.items()
        if getattr(settings, name) != getattr(DEFAULTS, name)
    ]
    if run.parts:
        again = f"; started again: {', '.join(run.interrupted)}" if run.interrupted else ""
        times = "once" if len(run.parts) == 1 else f"{len(run.parts)} times"
        remarks.append(f"the run was stopped {times} and continued (--resume){again}")
    if settings.deadline_scale != 1.0:
        remarks.append(f"deadlines were multiplied by {settings.deadline_scale:g}")
    if settings.backend:
        remarks.append(f"process groups had the backend {settings.backend} alone (--backend)")
    if settings.slots_per_device != 1:
        number = f"up to {settings.slots_per_device}" if settings.slots_per_device else "several"
        remarks.append(f"{number} cases used a device at the same time (--slots-per-device)")
    if settings.stress_seed is not None:
        remarks.append(f"stress with seed {settings.stress_seed}: {stress.in_words(stress.strikes_of(run.records))}")
    if settings.stress_failure:
        strikes = [record.measurements[stress.STRUCK] for record in run.records if stress.STRUCK in record.measurements]
        remarks.append(
            f"stress failure {settings.stress_failure}: struck {sum(map(bool, strikes))} of {len(strikes)} cases"
        )
    if drawn := sum(record.case in fresh.CASES and record.comparisons > 0 for record in run.records):
        remarks.append(f"{drawn} cases trained what was drawn for this run, from the seed {settings.scenario_seed}")
    simulated = sum(record.device == SIMULATED and record.comparisons > 0 for record in run.records)
    if simulated and settings.device != SIMULATED:
        remarks.append(f"{simulated} case{'s' if simulated > 1 else ''} ran on the simulated accelerator")
    judged = [record for record in run.records if record.comparisons > 0]
    refereed = sum(record.refereed for record in judged)
    if refereed < len(judged):
        remarks.append(f"{len(judged) - refereed} of {len(judged)} cases were judged by their own ranks, not a referee")
    remarks += [note["text"] for note in run.notes if not note.get("refuses")]
    return remarks


def _status(reasons: Sequence[str], blocking: Sequence[_Shown], shown: Sequence[_Shown]) -> Status:
    """Who has to act: the implementer, the owner of the machine, or the suite's maintainers."""
    verdicts = {item.verdict for item in shown if item.reason}
    if verdicts & ACCUSING:
        return Status.NOT_CERTIFIED
    if Verdict.ERROR_SUITE in verdicts:
        return Status.SUITE
    if not reasons:
        return Status.CERTIFIED
    only_machine = len(reasons) == len(_gathered(blocking)) and {item.state for item in blocking} == {State.NOT_HERE}
    return Status.ENVIRONMENT if only_machine else Status.NOT_CERTIFIED
