"""Pages and tables generated from the contract, the capabilities and the exit statuses."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import groupby

from fsdp_conformance import contract, status
from fsdp_conformance.adapters.torch_like import TorchAdapter
from fsdp_conformance.capability import CAPABILITIES
from fsdp_conformance.contract import CHAPTERS, OBSERVATIONS, Requirement
from fsdp_conformance.contract.profile import Profile, load_profile
from fsdp_conformance.contract.scopes import BASE, extension_of
from pages import cuda_names, quick, scenarios, scoreboard

CORE = "core-2026.11"
COMPONENTS = "components-2026.11"

_REQUIREMENTS = """\
<!-- Written by `ci/docs --write`; edit fsdp_conformance/contract/requirements.toml instead. -->

# The requirements

This page lists everything that the suite requires of an engine: look here for what a failed requirement asks for. The
contract has {number} requirements: {levels}. *MUST* applies to every engine.
*MUST if declared* applies to engines that declare the [capability](capabilities.md); an engine that does not declare it
must reject its use with an error ([R000](#r000)). *SHOULD* is measured and reported, but never prevents a certificate.
{bound} of the requirements have cases so far.

`fsdp-conformance explain R003` prints the same text for one requirement, with the findings of your last run. The
data is in `fsdp_conformance/contract/requirements.toml`, and the reasons for the wording are in
`fsdp_conformance/contract/choices.md`.

| observed by | meaning |
|---|---|
{observations}

| chapter | | requirements | with cases |
|---|---|--:|--:|
{chapters}
"""

_CAPABILITIES = """\
<!-- Written by `ci/docs --write`; edit fsdp_conformance/capability.py instead. -->

# Capabilities

With a capability flag, an adapter declares something that its engine offers. A case that needs an undeclared flag is
UNSUPPORTED, not a failure. To declare flags, list them in `capabilities` or implement the optional method in the last
column; to remove inherited flags, list them in `declines`.

{plain} of the {number} cases of `{core}` need no flag at all. The tables count the cases that need each flag; a
case may need several, and runs only if all of them are declared. `fsdp-conformance list --not-run` shows which cases
your declarations leave out.

*Asked by* says what happens without the flag. For *plan* and *method*, the case does not run, because there is no way
to ask for the feature. For *model*, the case runs anyway, because the model itself needs the feature: the engine must
either raise an error or get the right result.

*Extension* is the part of a [certificate](reading-a-verdict.md#what-a-certificate-covers) that the flag's cases belong
to. The base has {base} cases, which need no flag.

A flag with a count of 0 may still be used: `cpu_compute` by every case on the CPU, the `init_` flags and
`any_accelerator` by every case on an accelerator, and `full_grads` and `full_buffers` wherever gradients and buffers
are compared.
"""

_CAPABILITY_TABLE = """
## {area}

| flag | meaning | asked by | extension | cases | declared by method |
|---|---|---|---|--:|---|
{rows}
"""

_NOT_YET = """
## Not yet

The contract names these flags, but no case needs them yet, so adapters cannot declare them:

| flag | meaning |
|---|---|
{rows}
"""


def requirements_page() -> str:
    """The text of docs/requirements.md: every requirement, by chapter."""
    requirements = contract.load().requirements
    bound = _bound(load_profile(CORE), load_profile(COMPONENTS))
    levels = Counter(requirement.level.word for requirement in requirements.values())
    uncovered = contract.uncovered()
    page = _REQUIREMENTS.format(
        number=len(requirements),
        levels=", ".join(f"{number} {level}" for level, number in levels.items()),
        bound=sum(name in bound for name in requirements),
        observations="\n".join(f"| {code} | {meaning} |" for code, meaning in OBSERVATIONS.items()),
        chapters="\n".join(_chapter_row(letter, requirements, bound) for letter in CHAPTERS),
    )
    for letter, members in groupby(requirements.values(), key=lambda requirement: requirement.chapter):
        page += f'\n<a id="chapter-{letter.lower()}"></a>\n\n## {letter}. {CHAPTERS[letter]}\n'
        for requirement in members:
            page += _requirement(requirement, bound.get(requirement.id, ()), uncovered.get(requirement.id, ""))
    return page


def _bound(*profiles: Profile) -> dict[str, list[str]]:
    """Maps each requirement id to the number of cases that bind it in each profile, such as `312 of core-2026.11`."""
    counts: dict[str, list[str]] = {}
    for profile in profiles:
        for name, number in Counter(name for entry in profile.entries for name in entry.requirements).items():
            counts.setdefault(name, []).append(f"{number} of {profile.name}")
    return counts


def _chapter_row(letter: str, requirements: Mapping[str, Requirement], bound: Mapping[str, list[str]]) -> str:
    members = [name for name, requirement in requirements.items() if requirement.chapter == letter]
    judged = sum(name in bound for name in members)
    return f"| [{letter}](#chapter-{letter.lower()}) | {CHAPTERS[letter]} | {len(members)} | {judged} |"


def _requirement(requirement: Requirement, cases: list[str] | tuple[()], uncovered: str) -> str:
    facts = [f"**{requirement.level.word}**", f"observed by {', '.join(requirement.observation)}"]
    if requirement.flags:
        facts.append("capabilities " + ", ".join(f"`{flag}`" for flag in requirement.flags))
    facts.append(f"cases: {', '.join(cases) or 'none'}")
    paragraphs = [
        f'<a id="{requirement.id.lower()}"></a>',
        f"### {requirement.id} {requirement.name}",
        requirement.sentence,
        " · ".join(facts),
    ]
    paragraphs += [f"*If it fails, look at:* {requirement.look_at}"] if requirement.look_at else []
    paragraphs += [f"*No case yet:* {uncovered}"] if uncovered else []
    paragraphs += [f"*Source:* {'; '.join(requirement.source)}"] if requirement.source else []
    return "".join(f"\n{paragraph}\n" for paragraph in paragraphs)


def capabilities_page() -> str:
    """The text of docs/capabilities.md: every capability flag, by area, with the number of cases that name it."""
    core, components = load_profile(CORE), load_profile(COMPONENTS)
    counts = Counter(flag for entry in (*core.entries, *components.entries) for flag in entry.needs)
    methods = _methods()
    page = _CAPABILITIES.format(
        plain=sum(not entry.needs for entry in core.entries),
        base=sum(entry.scope == BASE for entry in core.entries),
        number=len(core.entries),
        core=core.name,
    )
    for area in dict.fromkeys(flag.area for flag in CAPABILITIES.values()):
        rows = [
            f"| `{flag.name}` | {flag.sentence} | {flag.asked} | {extension_of(flag.name)} | {counts[flag.name]} "
            f"| {methods.get(flag.name, '')} |"
            for flag in CAPABILITIES.values()
            if flag.area == area
        ]
        page += _CAPABILITY_TABLE.format(area=area.capitalize(), rows="\n".join(rows))
    future = sorted(contract.load().future_flags.items())
    if not future:
        return page
    return page + _NOT_YET.format(rows="\n".join(f"| `{flag}` | {sentence} |" for flag, sentence in future))


def _methods() -> dict[str, str]:
    """Maps each flag to the optional methods that declare it."""
    methods: dict[str, list[str]] = {}
    for base in reversed(TorchAdapter.__mro__):
        for method, flag in vars(base).get("optional", {}).items():
            methods.setdefault(flag, []).append(f"`{method}`")
    return {flag: ", ".join(names) for flag, names in methods.items()}


def with_tables(text: str) -> str:
    """Return `text` with the tables from `<!-- exit statuses: COMMAND -->` or `<!-- quick -->` to `<!-- end -->`."""
    text = re.sub(r"<!-- exit statuses: (\w+) -->\n(.*?)<!-- end -->", _statuses, text, flags=re.DOTALL)
    return re.sub(r"<!-- quick -->\n(.*?)<!-- end -->", _quick, text, flags=re.DOTALL)


def _quick(match: re.Match[str]) -> str:
    del match
    return f"<!-- quick -->\n\n{quick.markdown()}\n<!-- end -->"


def _statuses(match: re.Match[str]) -> str:
    rows = "".join(f"| {int(one)} | {meaning} |\n" for one, meaning in status.meanings(match[1]).items())
    return f"<!-- exit statuses: {match[1]} -->\n\n| status | meaning |\n|---|---|\n{rows}\n<!-- end -->"


#: The pages that are generated as a whole.
GENERATED: Mapping[str, Callable[[], str]] = {
    "docs/requirements.md": requirements_page,
    "docs/capabilities.md": capabilities_page,
    "docs/scenarios.md": scenarios.page,
    "docs/scoreboard.md": scoreboard.page,
    "docs/simulated-cuda-names.md": cuda_names.page,
}
