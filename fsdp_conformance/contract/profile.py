"""
A profile: the frozen list of cases from which a certificate is computed, with its hash.

    python -m fsdp_conformance.contract.profile --check core-2026.11
    python -m fsdp_conformance.contract.profile --write core-2026.11
    python -m fsdp_conformance.contract.profile --write components-2026.11
    python -m fsdp_conformance.contract.profile --write quick-2026.11     (the cases that ci/quick has chosen)
    python -m fsdp_conformance.contract.profile --write own-model-2026.11
    python -m fsdp_conformance.contract.profile --write sample --only R001/exact-probe-ws2 ... --not-certifying

Shipped are `core` and `components`, which certify, and `sample`, `quick` and `own-model`, which do not. From the first
follow `base`, `full` (core and components) and a profile for each extension (the base and that extension). A name
without a date means the newest: `base` is base-2026.11.

A released profile never changes: new cases wait for the next one. The hash covers everything except titles, which are
for people. A profile that the suite does not ship makes a private run, which certifies nothing. This is the only module
here that imports the suites, and only for these commands.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib
import json
import pkgutil
import sys
import unittest
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fsdp_conformance import codec
from fsdp_conformance.contract.case import Case, case_of
from fsdp_conformance.contract.requirement import Contract, Level, load
from fsdp_conformance.contract.scopes import BASE, scope_of
from fsdp_conformance.errors import ConfigError, ConformanceError, SuiteError, UsageError
from fsdp_conformance.run_settings import OWN_MODEL
from fsdp_conformance.suggestions import near

#: Increases when the *meaning* of running a case changes, not when cases are added.
INTERPRETATION = 1

#: The package whose modules define the cases.
SUITES = "fsdp_conformance.suites"

PROFILES = Path(__file__).parent / "profiles"

#: Chapters that judge a single component. Third parties rarely expose one, so these have a separate profile.
COMPONENT_CHAPTERS = frozenset({"AA", "AB", "AC", "AD", "AE"})

#: The prefixes of the names of those profiles, of the others, and of the quick selection from these.
COMPONENTS = "components-"
CORE = "core-"
QUICK = "quick-"

#: The kind of profile that has the cases of both.
FULL = "full"

#: New names of profiles by the old ones. `smoke` is only the command that checks an adapter.
RENAMED = {"smoke": "sample"}

#: Profiles that are derived from a core, besides those of its extensions.
_DERIVED = (BASE[0], FULL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One case of a profile: what a certificate must know about it."""

    id: str
    requirements: tuple[str, ...]
    world_size: int
    level: Level
    """Of the primary requirement."""
    needs: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    scope: tuple[str, ...] = BASE
    """The part of a certificate that the case belongs to: see `contract.scopes`."""
    refereed: bool = True
    """False if the ranks of the case judge by themselves: see `Case.live`."""
    faults: tuple[str, ...] = ()
    """Descriptions of faults that may have nothing to strike, so that the case does not apply: see `Case.faults`."""
    title: str = ""
    """Not part of the hash."""

    @property
    def primary(self) -> str:
        """The requirement that the case tests."""
        return self.requirements[0]

    def case(self) -> Case:
        """The case as far as a profile describes it: without axes, kills and deadline. Imports no suite."""
        return Case(
            id=self.id,
            requirements=self.requirements,
            chapter=load()[self.primary].chapter,
            world_size=self.world_size,
            title=self.title,
            needs=self.needs,
            environment=self.environment,
            live="" if self.refereed else "it has no referee",
            faults=self.faults,
        )

    def hashed(self) -> dict[str, Any]:
        """The fields that the hash covers."""
        return {key: value for key, value in codec.plain(self).items() if key != "title"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """A frozen list of cases."""

    name: str
    interpretation: int
    entries: tuple[Entry, ...]
    """By id, in order."""
    certifies: bool = True
    """False for a selection that is only meant for a quick check."""
    by_id: Mapping[str, Entry] = field(init=False, repr=False, compare=False)
    _sha256: str = field(default="", init=False, repr=False, compare=False)
    """Computed at its first use: a run asks for it six times."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_id", {entry.id: entry for entry in self.entries})

    @property
    def sha256(self) -> str:
        """The hash of everything that a verdict depends on."""
        if not self._sha256:
            object.__setattr__(self, "_sha256", self._hash())
        return self._sha256

    def _hash(self) -> str:
        content = {
            "name": self.name,
            "interpretation": self.interpretation,
            "certifies": self.certifies,
            "cases": [entry.hashed() for entry in self.entries],
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping; `profile_from_json` is its inverse."""
        return {
            "name": self.name,
            "interpretation": self.interpretation,
            "certifies": self.certifies,
            "sha256": self.sha256,
            "cases": [codec.plain(entry) for entry in self.entries],
        }

    def to_text(self) -> str:
        """The text of its file: JSON with one case a line, so that a diff shows the cases that changed."""
        facts = self.to_json()
        cases = [json.dumps(case, ensure_ascii=False) for case in facts.pop("cases")]
        return json_lines(facts, "cases", cases, brackets="[]")


def json_lines(facts: Mapping[str, Any], name: str, rows: Iterable[str], *, brackets: str) -> str:
    """
    A JSON object with one line for each fact, and then one for each row of the list or object called `name`.

    `rows` are JSON already; `brackets` are those around them, "[]" or "{}".
    """
    lines = [f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in facts.items()]
    whole = f"{brackets[0]}\n" + ",\n".join(rows) + f"\n{brackets[1]}"
    return "{\n" + ",\n".join([*lines, f"{json.dumps(name)}: {whole}"]) + "\n}\n"


def names() -> list[str]:
    """The profiles that have their own name; there is one more for each extension."""
    return sorted([*_files(), *(f"{kind}-{_date(core)}" for core in _cores() for kind in _DERIVED)])


def newest() -> list[str]:
    """The profiles of the newest date that certify all of the suite or a half of it, the smallest first."""
    date = _date(_cores()[-1])
    return [f"{CORE}{date}", f"{COMPONENTS}{date}", f"{FULL}-{date}"]


@functools.cache
def shipped(name: str) -> str | None:
    """
    The hash of the shipped profile with that name, or None if there is none. Only shipped profiles can certify.
    """
    profile = _shipped(name)
    return profile.sha256 if profile is not None else None


def known_cases(profile: Profile) -> list[str]:
    """The ids of all cases of the profile, and of every shipped one: what a list of expectations can name."""
    return sorted({case_id for each in (profile, *map(load_profile, _files())) for case_id in each.by_id})


def load_profile(name: str) -> Profile:
    """
    The profile with that name, with or without its date, or in the file with that path.

    Raises UsageError if it does not exist, or if its content does not match its hash.
    """
    if name.endswith(".json"):
        return _read(Path(name), named=name)
    if name in RENAMED:
        raise UsageError(
            f"the profile {name} is called {RENAMED[name]} now: use --profile {RENAMED[name]}. To check an adapter "
            "alone, use the command `fsdp-conformance smoke`"
        )
    profile = _shipped(name) or _shipped(f"{name}-{_date(_cores()[-1])}")
    if profile is None:
        choices = [*names(), *(f"{extension}-{_date(core)}" for core in _cores() for extension in _extensions(core))]
        close = near(name, choices, count=1, cutoff=0.4)
        raise UsageError(
            f"profile must be one of {', '.join(names())}, an extension such as offload, or the path of a .json file, "
            f"got {name!r}.{f' Did you mean {close[0]!r}?' if close else ''}"
        )
    return profile


def _read(path: Path, *, named: str) -> Profile:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        why = error.strerror or error
        raise UsageError(f"profile must be a file that can be read, got {named!r}: {why}") from error
    return profile_from_json(text, where=str(path))


def _files() -> list[str]:
    """The profiles that are shipped as files."""
    return sorted(path.stem for path in PROFILES.glob("*.json"))


def _cores() -> list[str]:
    """The core profiles, the newest last."""
    return [name for name in _files() if name.startswith(CORE)]


def _date(name: str) -> str:
    return name.partition("-")[2]


@functools.cache
def _shipped(name: str) -> Profile | None:
    """The profile with that full name, read from its file or derived from the core of the same date."""
    if name in _files():
        return _read(PROFILES / f"{name}.json", named=name)
    core = next((each for each in _cores() if name.endswith(f"-{_date(each)}")), None)
    if core is None:
        return None
    kind, whole = name.removesuffix(f"-{_date(core)}"), load_profile(core)
    if kind == FULL:
        parts = load_profile(f"{COMPONENTS}{_date(core)}")
        entries = sorted([*whole.entries, *parts.entries], key=lambda entry: entry.id)
    elif kind == BASE[0] or kind in _extensions(core):
        entries = [entry for entry in whole.entries if entry.scope in (BASE, (kind,))]
    else:
        return None
    return Profile(name=name, interpretation=whole.interpretation, entries=tuple(entries))


@functools.cache
def _extensions(core: str) -> list[str]:
    """The extensions that a core profile has cases of."""
    return sorted({entry.scope[0] for entry in load_profile(core).entries if len(entry.scope) == 1} - set(BASE))


def profile_from_json(text: str, *, where: str) -> Profile:
    """The profile in a file's text. Raises UsageError if it is invalid or was modified."""
    try:
        data = json.loads(text)
        profile = Profile(
            name=data["name"],
            interpretation=data["interpretation"],
            certifies=data["certifies"],
            entries=codec.typed(tuple[Entry, ...], data["cases"]),
        )
        stated = data["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{where} is not a profile: {type(error).__name__}: {error}") from error
    if profile.sha256 != stated:
        raise UsageError(
            f"sha256 of the content: expected {stated[:12]}, got {profile.sha256[:12]} [{where}]. "
            "Profiles are written by `python -m fsdp_conformance.contract.profile --write`, never by hand."
        )
    return profile


def collect_cases(package: str = SUITES) -> list[Case]:
    """
    Every case in the package's modules, by id. Imports them, and therefore torch.

    Raises SuiteError for duplicate ids.
    """
    root = importlib.import_module(package)
    places: dict[str, tuple[Case, str]] = {}
    problems = []
    for module_info in sorted(pkgutil.iter_modules(root.__path__, f"{package}."), key=lambda info: info.name):
        module = importlib.import_module(module_info.name)
        for place, case in _cases_in(vars(module), module.__name__):
            if case.id in places:
                problems.append(f"{case.id} is bound to {places[case.id][1]} and to {place}")
            places[case.id] = (case, place)
    if problems:
        raise SuiteError("; ".join(problems))
    return [case for case, _ in (places[case_id] for case_id in sorted(places))]


def _cases_in(names_of_module: Mapping[str, Any], module: str) -> Iterable[tuple[str, Case]]:
    for value in names_of_module.values():
        # A class imported from another suite belongs to that suite.
        if isinstance(value, type) and issubclass(value, unittest.TestCase) and value.__module__ == module:
            for name in dir(value):
                case = case_of(getattr(value, name, None))
                if case is not None:
                    yield f"{module}.{value.__qualname__}.{name}", case


def profile_of(
    name: str,
    cases: Iterable[Case],
    *,
    only: Sequence[str] = (),
    certifies: bool = True,
    contract: Contract | None = None,
) -> Profile:
    """
    The profile made of these cases.

    `only` lists the ids to take; if empty, a components profile takes all cases of the component chapters, and any
    other profile takes the rest. Raises ConfigError for unknown requirements and for ids without a case.
    """
    contract = contract or load()
    by_id = {case.id: case for case in cases}
    problems = [f"no suite has a case with id {case_id!r}" for case_id in only if case_id not in by_id]
    chosen = [by_id[case_id] for case_id in sorted(set(only) & by_id.keys() if only else by_id)]
    if not only:
        of_components = name.startswith(COMPONENTS)
        chosen = [case for case in chosen if (case.chapter in COMPONENT_CHAPTERS) is of_components]
        chosen = [case for case in chosen if case.is_own is (name == OWN_MODEL)]
    certifies = certifies and not name.startswith(QUICK) and name != OWN_MODEL
    problems += [
        f"{case.id}: requirement must be one of the contract's, got {requirement!r}"
        for case in chosen
        for requirement in case.requirements
        if requirement not in contract.requirements
    ]
    if problems:
        raise ConfigError(problems, where=f"profile {name}")
    entries = tuple(
        Entry(
            id=case.id,
            requirements=case.requirements,
            world_size=case.world_size,
            level=contract[case.requirements[0]].level,
            needs=case.needs,
            environment=case.environment,
            scope=scope_of(contract[case.requirements[0]], case.needs),
            refereed=not case.live,
            faults=case.faults,
            title=case.title,
        )
        for case in chosen
    )
    return Profile(name=name, interpretation=INTERPRETATION, entries=entries, certifies=certifies)


def difference(ours: Profile, theirs: Profile) -> list[str]:
    """The differences between two profiles, including titles, one sentence each."""
    problems = []
    for label, left, right in (
        ("interpretation", ours.interpretation, theirs.interpretation),
        ("certifies", ours.certifies, theirs.certifies),
    ):
        if left != right:
            problems.append(f"{label}: {left} in the profile, {right} from the suites")
    problems += [f"{case_id} is not in the profile" for case_id in theirs.by_id.keys() - ours.by_id.keys()]
    problems += [f"{case_id} is in no suite" for case_id in ours.by_id.keys() - theirs.by_id.keys()]
    for case_id in ours.by_id.keys() & theirs.by_id.keys():
        mine, other = asdict(ours.by_id[case_id]), asdict(theirs.by_id[case_id])
        problems += [
            f"{case_id}: {key}: {mine[key]!r} in the profile, {other[key]!r} in the suites"
            for key in mine
            if mine[key] != other[key]
        ]
    return sorted(problems)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check profiles. Exit status 0, 1 if a profile differs from the suites, or the error's own."""
    parser = argparse.ArgumentParser(prog="python -m fsdp_conformance.contract.profile", description=__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", metavar="NAME", help="write profiles/NAME.json from the suites")
    action.add_argument("--check", metavar="NAME", help="compare profiles/NAME.json with the suites")
    parser.add_argument("--only", nargs="+", default=[], metavar="ID", help="take only these cases")
    parser.add_argument("--not-certifying", action="store_true", help="the profile cannot certify")
    parser.add_argument("--suites", default=SUITES, metavar="PACKAGE", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        cases = collect_cases(options.suites)
        if options.write:
            path = options.output or PROFILES / f"{options.write}.json"
            only = options.only
            if not only and options.write.startswith(QUICK) and path.exists():
                # Chosen once for each date, by ci/quick: what cases kill changes more often.
                only = list(_read(path, named=str(path)).by_id)
            profile = profile_of(options.write, cases, only=only, certifies=not options.not_certifying)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(profile.to_text(), encoding="utf-8")
            print(f"{path}: {len(profile.entries)} cases, sha256 {profile.sha256[:12]}")
            return 0
        return _check(load_profile(str(options.output or options.check)), cases)
    except ConformanceError as error:
        print(f"profile: {error}", file=sys.stderr)
        return error.exit_status


def _check(profile: Profile, cases: Sequence[Case]) -> int:
    only = () if profile.certifies else tuple(set(profile.by_id) & {case.id for case in cases})
    problems = difference(profile, profile_of(profile.name, cases, only=only, certifies=profile.certifies))
    for problem in problems:
        print(problem)
    print(
        f"{profile.name}: {len(profile.entries)} cases, "
        + (f"{len(problems)} differences" if problems else "matches the suites")
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
