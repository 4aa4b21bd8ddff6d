"""
The results of an engine's runs, case by case, small enough to keep in a repository.

Run files hold the evidence of every rank, some hundred megabytes. A tally is made from runs that verify; it keeps the
verdict on each case, and a digest of what the case asked for, which tells later whether the verdict still speaks of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from fsdp_conformance.capability import offered
from fsdp_conformance.contract.profile import Entry, Profile, json_lines, load_profile
from fsdp_conformance.diagnosis.severity import Severity, severity_of
from fsdp_conformance.errors import RunFileError, UsageError
from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.report.terminal import verdict_words
from fsdp_conformance.report.verify import Verification
from fsdp_conformance.verdict import Verdict

#: The layout of a tally's file.
FORMAT = 1

#: Hexadecimal digits of a digest. Two of them equal by accident once in four billion changes of a case.
_DIGITS = 8

#: What the runs of one tally must have in common.
_ONE_OF_EACH = ("name", "version", "adapter", "torch", "device", "suite")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """The result of a run for one case."""

    verdict: Verdict
    digest: str
    """`digest_of` the case as it was run."""
    failed: tuple[str, ...] = ()
    """The requirements that its findings name."""
    severity: Severity | None = None
    """Of a failure; None if the tally is from before there were severities."""

    def words(self) -> str:
        """ "PASS 1a2b3c4d", "FAIL 1a2b3c4d silent R003 R004"."""
        return " ".join((self.verdict, self.digest, *([self.severity] if self.severity else []), *self.failed))


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One run of the tally."""

    profile: str
    words: str
    """CERTIFIED or not, and for what."""
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Tally:
    """The results of one engine's runs."""

    name: str
    version: str
    adapter: str
    """The hash of the adapter's source."""
    torch: str
    device: str
    suite: str
    """The hash of the suite."""
    date: str
    """Of the first run."""
    declared: tuple[str, ...]
    """The flags that the adapter declared, sorted."""
    declines_on: Mapping[str, tuple[str, ...]]
    """Type of device to flags that it does not offer there."""
    adds_on: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Type of device to flags that it offers only there."""
    runs: tuple[Part, ...]
    cases: Mapping[str, Shown] = field(repr=False)
    """By case id, in order."""

    def declares(self, device: str) -> frozenset[str]:
        """The flags that the adapter declared on a type of device."""
        return offered(device, self.declared, adds_on=self.adds_on, declines_on=self.declines_on)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping; `tally_from_json` is its inverse."""
        content = self._content()
        return {"format": FORMAT, "sha256": _sha256(content), **content}

    def to_text(self) -> str:
        """The text of its file: JSON with the cases of one requirement a line."""
        facts = self.to_json()
        rows = [
            ", ".join(f"{json.dumps(case)}: {json.dumps(words)}" for case, words in members)
            for _, members in groupby(facts.pop("cases").items(), key=lambda item: item[0].partition("/")[0])
        ]
        return json_lines(facts, "cases", rows, brackets="{}")

    def _content(self) -> dict[str, Any]:
        return {
            **{key: getattr(self, key) for key in (*_ONE_OF_EACH, "date")},
            "declared": list(self.declared),
            "declines_on": {device: list(flags) for device, flags in self.declines_on.items()},
            **({"adds_on": {device: list(flags) for device, flags in self.adds_on.items()}} if self.adds_on else {}),
            "runs": [{"profile": run.profile, "words": run.words, "seconds": run.seconds} for run in self.runs],
            "cases": {case: shown.words() for case, shown in self.cases.items()},
        }

    def without(self, cases: Iterable[str]) -> Tally:
        """The tally without these cases."""
        dropped = set(cases)
        values: dict[str, Any] = {name: getattr(self, name) for name in self.__dataclass_fields__}
        remaining = {case: shown for case, shown in self.cases.items() if case not in dropped}
        return Tally(**{**values, "cases": remaining})


def added(former: Tally, later: Tally) -> Tally:
    """
    The results of both; where both have a case, the later one counts.

    Raises UsageError unless they are of the same engine, version, adapter, torch and device. The suite may have grown:
    `Shown.digest` tells for each case whether it is still the one that was run.
    """
    for key in _ONE_OF_EACH:
        before, now = getattr(former, key), getattr(later, key)
        if key != "suite" and before != now:
            raise UsageError(
                f"{key} must be {before}, as in the runs of {later.name} so far, got {now}. "
                "Run all cases again, and replace those runs."
            )
    values: dict[str, Any] = {name: getattr(former, name) for name in former.__dataclass_fields__}
    cases = dict(sorted({**former.cases, **later.cases}.items()))
    return Tally(**{**values, "suite": later.suite, "runs": (*former.runs, *later.runs), "cases": cases})


def tally(runs: Sequence[Verification], profile: Profile | None = None) -> Tally:
    """
    The results of several runs together: runs of one engine, in one version, on one machine's versions and device.

    Raises RunFileError for a run that did not finish, was edited or is of another list of cases than the profile of
    that name is now, and UsageError for runs that do not belong together or contradict each other.
    """
    problems = [f"{each.run.path}: {'; '.join(each.discrepancies)}" for each in runs if each.discrepancies]
    if problems:
        raise RunFileError(f"a tally needs runs that verify: {'; '.join(problems)}")
    facts = [_facts(each) for each in runs]
    for key in _ONE_OF_EACH:
        distinct = sorted({fact[key] for fact in facts})
        if len(distinct) != 1:
            raise UsageError(f"the runs of one tally must have the same {key}, got {', '.join(distinct) or 'no run'}")
    cases: dict[str, Shown] = {}
    for each in runs:
        for case, shown in _cases(each, profile or _profile_now(each)):
            if cases.setdefault(case, shown) != shown:
                raise UsageError(
                    f"two runs must agree on {case}, got {cases[case].words()} and {shown.words()} "
                    f"[{each.run.path}]. Name one of them only."
                )
    return Tally(
        **{key: facts[0][key] for key in _ONE_OF_EACH},
        date=min(fact["date"] for fact in facts),
        declared=tuple(_described(runs[0]).get("capabilities") or ()),
        declines_on=_by_device(_described(runs[0]).get("declines_on")),
        adds_on=_by_device(_described(runs[0]).get("adds_on")),
        runs=tuple(map(_part, runs)),
        cases=dict(sorted(cases.items())),
    )


def _by_device(flags: Mapping[str, Iterable[str]] | None) -> dict[str, tuple[str, ...]]:
    return {device: tuple(names) for device, names in (flags or {}).items()}


def tallies_of(runs: Sequence[Verification]) -> list[Tally]:
    """One tally for each engine, in the order of their first runs. Raises like `tally`."""
    by_name: dict[str, list[Verification]] = {}
    for each in runs:
        by_name.setdefault(_facts(each)["name"], []).append(each)
    return [tally(members) for members in by_name.values()]


def tally_from_json(text: str, *, where: str) -> Tally:
    """The tally in a file's text. Raises UsageError if it is invalid or was modified."""
    try:
        data = json.loads(text)
        stated, layout = data.pop("sha256"), data.pop("format")
        result = Tally(
            **{key: str(data[key]) for key in (*_ONE_OF_EACH, "date")},
            declared=tuple(data["declared"]),
            declines_on=_by_device(data["declines_on"]),
            adds_on=_by_device(data.get("adds_on")),
            runs=tuple(Part(**run) for run in data["runs"]),
            cases={case: _shown(words) for case, words in data["cases"].items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{where} is not a tally of runs: {type(error).__name__}: {error}") from error
    if layout != FORMAT:
        raise UsageError(f"format must be {FORMAT}, got {layout!r} [{where}]")
    if _sha256(data) != stated:
        raise UsageError(
            f"sha256 of the content: expected {stated!s:.12}, got {_sha256(data)[:12]} [{where}]. "
            "Tallies are written from run files by ci/scoreboard, never by hand."
        )
    return result


def digest_of(entry: Entry) -> str:
    """A short hash of what the case asks for and judges: a verdict with another hash is about another case."""
    parts = [entry.id, entry.requirements, entry.world_size, entry.needs, entry.environment]
    return hashlib.sha256(json.dumps(parts, separators=(",", ":")).encode()).hexdigest()[:_DIGITS]


def _sha256(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _shown(words: str) -> Shown:
    verdict, digest, *rest = words.split(" ")
    severity = Severity(rest.pop(0)) if rest and rest[0] in list(Severity) else None
    return Shown(verdict=Verdict(verdict), digest=digest, failed=tuple(rest), severity=severity)


def _described(verification: Verification) -> Mapping[str, Any]:
    return verification.run.header.get("implementation") or {}


def _facts(verification: Verification) -> dict[str, str]:
    header, environment = verification.run.header, verification.run.header.get("environment") or {}
    return {
        "name": str(_described(verification).get("name", "?")),
        "version": str(_described(verification).get("version", "")),
        "adapter": str(_described(verification).get("source_sha256", "")),
        "torch": str(environment.get("torch", "?")),
        "device": str(environment.get("device", "?")),
        "suite": str(header.get("suite_sha256", "")),
        "date": str(header.get("started", ""))[:10],
    }


def _part(verification: Verification) -> Part:
    return Part(
        profile=verification.certificate.profile,
        words=verdict_words(verification.certificate),
        seconds=round(float((verification.run.footer or {}).get("seconds") or 0.0), 1),
    )


def _profile_now(verification: Verification) -> Profile:
    """The run's profile as this checkout has it, which must be what the run had."""
    profile = verification.profile
    ran = str((verification.run.header.get("profile") or {}).get("sha256", ""))
    if profile.sha256 != ran or profile.sha256 != load_profile(profile.name).sha256:
        raise RunFileError(
            f"{verification.run.path}: the run must be of {profile.name} as it is shipped now "
            f"({profile.sha256[:12]}), got {ran[:12]}. Run it again."
        )
    return profile


def _cases(verification: Verification, profile: Profile) -> Iterable[tuple[str, Shown]]:
    for record in verification.run.records:
        # What `explore` has drawn and a user has kept belongs to no profile.
        if record.case in profile.by_id:
            digest = digest_of(profile.by_id[record.case])
            yield (
                record.case,
                Shown(verdict=record.verdict, digest=digest, failed=_failed(record), severity=severity_of(record)),
            )


def _failed(record: CaseRecord) -> tuple[str, ...]:
    """The requirements that the findings name, each once, in order; none for a verdict that follows from no finding."""
    return tuple(dict.fromkeys(finding.requirement for finding in record.findings))
