"""
`fsdp-conformance list`: the cases and whether they would run; or the requirements, or the capability flags.

No rank is started and no suite imported: the profile knows what a case needs. A child process surveys the
implementation and the machine without starting a device.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fsdp_conformance import codec, contract
from fsdp_conformance.capability import CAPABILITIES
from fsdp_conformance.cli import chosen_cases, messages
from fsdp_conformance.cli.arguments import settings_of
from fsdp_conformance.cli.own_workload import with_workload
from fsdp_conformance.cli.survey import survey
from fsdp_conformance.contract.case import Case
from fsdp_conformance.contract.gate import Gated
from fsdp_conformance.contract.profile import Profile, load_profile
from fsdp_conformance.plan import SIMULATED
from fsdp_conformance.status import Status


def main(arguments: argparse.Namespace) -> int:
    """Print the requested list."""
    if arguments.list_capabilities:
        _tell_capabilities(as_json=arguments.json)
        return Status.CERTIFIED
    settings = settings_of(arguments)
    profile = load_profile(settings.profile)
    if arguments.list_requirements:
        _tell_requirements(profile, as_json=arguments.json)
        return Status.CERTIFIED
    cases = chosen_cases.selected(profile, settings)
    settings = with_workload(settings)
    surveyed = survey(settings.device, settings.implementation)
    foreseen = chosen_cases.foreseen(cases, settings, surveyed)
    pairs = zip(cases, foreseen, strict=True)
    shown = sorted(
        ((case, gated) for case, gated in pairs if gated.record is not None or not arguments.not_run),
        key=lambda pair: (list(contract.CHAPTERS).index(pair[0].chapter), pair[0].id),
    )
    description = surveyed.description
    if arguments.json:
        messages.say_json(
            {
                "implementation": codec.plain(description),
                "device": settings.device,
                "profile": profile.name,
                "cases": [_case_json(case, gated) for case, gated in shown],
            }
        )
        return Status.CERTIFIED
    _print_cases(shown, settings.device, why=arguments.why or arguments.not_run)
    counted = Counter("would run" if gated.record is None else str(gated.record.verdict) for gated in foreseen)
    elsewhere = sum(gated.record is None and gated.device != settings.device for gated in foreseen)
    words = [
        f"{counted.pop('would run', 0)} would run" + (f", {elsewhere} of them on {SIMULATED}" if elsewhere else ""),
        *(f"{count} {what}" for what, count in sorted(counted.items())),
    ]
    messages.say(
        f"{len(cases)} of {messages.plural(len(profile.entries), 'case')} in {profile.name}, "
        f"for {description.name} {description.version} on {settings.device}: {' · '.join(words)}"
    )
    return Status.CERTIFIED


def _case_json(case: Case, gated: Gated) -> dict[str, Any]:
    """A case as the table shows it; "verdict" is None for one that would run."""
    return {
        "id": case.id,
        "chapter": case.chapter,
        "title": case.title,
        "world_size": case.world_size,
        "requirements": list(case.requirements),
        "device": gated.device,
        "verdict": None if gated.record is None else gated.record.verdict.value,
        "reason": "" if gated.record is None else gated.record.reason,
    }


def _print_cases(shown: Sequence[tuple[Case, Gated]], device: str, *, why: bool) -> None:
    width = max((len(case.id) for case, _ in shown), default=0)
    last = None
    for case, gated in shown:
        if case.chapter != last:
            print(f"{case.chapter}  {contract.CHAPTERS[case.chapter]}")
            last = case.chapter
        record = gated.record
        runs = "runs" if gated.device == device else f"runs on {gated.device}"
        would = runs if record is None else str(record.verdict)
        messages.say(f"  {case.id:<{width}}  {case.world_size} ranks  {would:<11}  {' '.join(case.requirements)}")
        if why:
            messages.say(f"    {case.title if record is None else record.reason}")


def _tell_requirements(profile: Profile, *, as_json: bool) -> None:
    requirements = contract.load().requirements
    counted = Counter(name for entry in profile.entries for name in entry.requirements)
    if as_json:
        listed = [{**asdict(item), "cases": counted[item.id]} for item in requirements.values()]
        messages.say_json({"profile": profile.name, "requirements": listed})
        return
    last = None
    for requirement in requirements.values():
        if requirement.chapter != last:
            print(f"{requirement.chapter}  {contract.CHAPTERS[requirement.chapter]}")
            last = requirement.chapter
        cases = messages.plural(counted[requirement.id], "case") if counted[requirement.id] else "no cases"
        messages.say(f"  {requirement.id}  {requirement.level.word:<16}  {requirement.name}  ({cases})")
    bound = sum(name in counted for name in requirements)
    messages.say(
        f"{len(requirements)} requirements, {bound} of them covered by the "
        f"{messages.plural(len(profile.entries), 'case')} in {profile.name}"
    )


def _tell_capabilities(*, as_json: bool) -> None:
    if as_json:
        messages.say_json({"capabilities": [asdict(flag) for flag in CAPABILITIES.values()]})
        return
    last = None
    for flag in CAPABILITIES.values():
        if flag.area != last:
            print(flag.area)
            last = flag.area
        messages.say(f"  {flag.name:<24} {flag.sentence} (asked by the {flag.asked})")
    print(messages.plural(len(CAPABILITIES), "flag"))
