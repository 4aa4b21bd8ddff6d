"""Which cases kill which known-wrong engines: see ci/kill-matrix."""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from fsdp_conformance import codec, contract
from fsdp_conformance.adapters import registry
from fsdp_conformance.errors import SuiteError
from fsdp_conformance.mutants import MUTANTS, kill
from fsdp_conformance.selftest import BoundCase, bound_case, bound_cases, run_case

#: How many mutants a case must kill that are not written for it alone.
ENOUGH = 2


@dataclass(frozen=True, slots=True)
class Pair:
    """A case on a known-wrong engine, and what came of it."""

    case: str
    mutant: str
    verdict: str
    killed: bool
    text: str


def tried(case: str, mutant: str) -> Pair:
    """Run a pair and return it with its result."""
    expected = MUTANTS[mutant]
    try:
        record = run_case(bound_case(case), expected.spec)
    except SuiteError as error:
        return Pair(case, mutant, "ERROR_SUITE", False, str(error))
    killed = kill.reason(record, expected)
    text = kill.survival(record, expected) if killed is None else killed.sentence()
    return Pair(case, mutant, str(record.verdict), killed is not None, text)


@dataclass(frozen=True, slots=True)
class Task:
    """The mutants that one case is tried on, in this order."""

    case: str
    named: tuple[str, ...]
    """The mutants that it names: all of them are tried."""
    others: tuple[str, ...] = ()
    """Mutants that it does not name. They are tried until `missing` of them are killed."""
    missing: int = 0
    shared: frozenset[str] = frozenset()
    """Those of `named` that cases of other methods name as well, so that they count as missing ones."""

    def pairs(self) -> Iterator[Pair]:
        """Try them."""
        missing = self.missing
        for mutant in self.named:
            pair = tried(self.case, mutant)
            missing -= pair.killed and mutant in self.shared
            yield pair
        for mutant in self.others:
            if missing <= 0:
                return
            pair = tried(self.case, mutant)
            missing -= pair.killed
            yield pair


def planned(cases: Sequence[BoundCase], others: int, there: Sequence[Pair] = ()) -> Iterator[Task]:
    """
    Yield the tasks: each case on the mutants that it names, and on at most `others` that it does not name.

    `there`: pairs that were tried already, which are not tried again. A case that kills enough mutants
    which other methods name or kill needs no others.
    """
    done: dict[str, set[str]] = defaultdict(set)
    for pair in there:
        done[pair.case].add(pair.mutant)
    methods, naming = _methods(bound_cases())
    general = general_kills(there, methods, naming)
    kills = Counter(pair.mutant for pair in there if pair.killed)
    for bound in cases:
        id_ = bound.case.id
        named = tuple(name for name in bound.case.kills if name not in done[id_])
        missing = ENOUGH - len(general.get(id_, ())) if others else 0
        able = [name for name in _likeliest(bound, kills) if name not in done[id_]] if missing > 0 else []
        budget = max(0, others - len(done[id_].difference(bound.case.kills)))
        shared = frozenset(name for name in named if naming[name] - {methods[id_]})
        yield Task(id_, named, tuple(able[:budget]), missing, shared)


def _likeliest(bound: BoundCase, kills: Counter[str]) -> list[str]:
    """
    The mutants that a case does not name and that declare what it needs, those that it is likely to kill first.

    Those are, in turn, a defect that a requirement of the case or its chapter names, and one that many cases name or
    killed (`kills`).
    """
    case = bound.case
    able = [
        name
        for name in MUTANTS
        if name not in case.kills and _declared(name).issuperset(case.needs) and _is_related(bound, name)
    ]
    popularity = _popularity()
    chapter = contract.load().chapter
    chapters = set(map(chapter, case.requirements))

    def order(name: str) -> tuple[bool, int, bool, int, str]:
        about = MUTANTS[name].requirements
        shared = len(set(about).intersection(case.requirements))
        return (
            case.requirements[0] not in about,
            -shared,
            chapter(about[0]) not in chapters,
            -popularity[name],
            name,
        )

    popular = sorted(able, key=lambda name: (-popularity[name] - kills[name], name))
    in_turn = itertools.chain.from_iterable(zip(sorted(able, key=order), popular, strict=True))
    return list(dict.fromkeys(in_turn))


@cache
def _declared(mutant: str) -> frozenset[str]:
    return frozenset(registry.load(MUTANTS[mutant].spec).declared())


@cache
def _popularity() -> Counter[str]:
    """How many methods name each mutant."""
    return Counter(name for _, name in {(method(bound), name) for bound in bound_cases() for name in bound.case.kills})


def _is_related(bound: BoundCase, mutant: str) -> bool:
    """Components are judged by their own cases, and whole engines by the others."""
    part = "reference-components"
    engines = {MUTANTS[name].engine for name in bound.case.kills}
    return (MUTANTS[mutant].engine == part) == (part in engines)


def method(bound: BoundCase) -> str:
    """The same for all cases of one test method."""
    return f"{bound.owner.__qualname__}: {bound.case.title}"


def general_kills(
    pairs: Iterable[Pair], methods: Mapping[str, str], named: Mapping[str, set[str]]
) -> dict[str, set[str]]:
    """
    For each case that was tried, the killed mutants that are not written for it alone.

    `methods`: case to method. `named`: mutant to the methods that name it.
    """
    killers: dict[str, set[str]] = defaultdict(set)
    killed: dict[str, set[str]] = defaultdict(set)
    for pair in pairs:
        killed[pair.case] |= {pair.mutant} if pair.killed else set()
        if pair.killed:
            killers[pair.mutant].add(methods[pair.case])
    return {
        case: {mutant for mutant in mutants if (killers[mutant] | named[mutant]) - {methods[case]}}
        for case, mutants in killed.items()
    }


def _methods(cases: Iterable[BoundCase]) -> tuple[dict[str, str], dict[str, set[str]]]:
    """Case to method, and mutant to the methods that name it."""
    methods, named = {}, defaultdict(set)
    for bound in cases:
        methods[bound.case.id] = method(bound)
        for mutant in bound.case.kills:
            named[mutant].add(methods[bound.case.id])
    return methods, named


def report(pairs: Sequence[Pair], cases: Sequence[BoundCase]) -> int:
    """Print the figures. Returns the exit status."""
    methods, named = _methods(cases)
    names = {bound.case.id: set(bound.case.kills) for bound in cases}
    survivors = [pair for pair in pairs if not pair.killed and pair.mutant in names[pair.case]]
    general = general_kills(pairs, methods, named)
    few: dict[str, list[str]] = defaultdict(list)
    for case, mutants in general.items():
        if len(mutants) < ENOUGH:
            few[methods[case]].append(f"{case} kills {', '.join(sorted(mutants)) or 'none'}")
    for pair in survivors:
        print(f"SURVIVED {pair.text}")
    for title, lines in sorted(few.items(), key=lambda item: item[1]):
        print(f"{len(lines)} of {title}\n    {lines[0]}")
    killing = {pair.case for pair in pairs if pair.killed}
    print(
        f"kill matrix: {len(pairs)} pairs, {sum(pair.killed for pair in pairs)} kills, {len(survivors)} survivors of "
        f"cases that name them; of {len(general)} cases {len(killing)} kill at least one mutant, and "
        f"{len(general) - sum(map(len, few.values()))} at least {ENOUGH} that are not written for them alone"
    )
    return 1 if few or survivors else 0


def read(path: Path) -> list[Pair]:
    """The pairs in a file whose cases and mutants still exist."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    cases = {bound.case.id for bound in bound_cases()}
    pairs = [Pair(**json.loads(line)) for line in lines]
    return [pair for pair in pairs if pair.case in cases and pair.mutant in MUTANTS]


def trusting(pairs: Iterable[Pair], cases: Iterable[BoundCase]) -> list[Pair]:
    """These pairs, and the mutants that cases name but were not tried on, as if they had been killed."""
    there = {(pair.case, pair.mutant): pair for pair in pairs}
    named = [(bound.case.id, mutant) for bound in cases for mutant in bound.case.kills]
    return [*there.values(), *(Pair(*pair, "", True, "not tried") for pair in named if pair not in there)]


def run(tasks: Sequence[Task], path: Path, workers: int) -> None:
    """Do the tasks, and add a line for each pair as soon as its task is done."""
    context = multiprocessing.get_context("spawn")
    with path.open("a", encoding="utf-8") as file, ProcessPoolExecutor(workers, mp_context=context) as pool:
        for done in as_completed([pool.submit(_all_of, task) for task in tasks]):
            for pair in done.result():
                file.write(json.dumps(codec.plain(pair)) + "\n")
            file.flush()


def _all_of(task: Task) -> list[Pair]:
    return list(task.pairs())


def main(words: Sequence[str] | None = None) -> int:
    """Run what is missing, and report."""
    parser = argparse.ArgumentParser(prog="ci/kill-matrix")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--others", type=int, default=0)
    parser.add_argument("--case", default="*")
    parser.add_argument("--one", action="store_true")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--only-read", action="store_true")
    parser.add_argument("--trust-named", action="store_true")
    options = parser.parse_args(words)
    cases = [bound for bound in bound_cases() if fnmatchcase(bound.case.id, options.case)]
    if options.one:
        cases = list({method(bound): bound for bound in reversed(cases)}.values())[::-1]

    def known() -> list[Pair]:
        pairs = read(options.output)
        return trusting(pairs, cases) if options.trust_named else pairs

    if not options.only_read:
        tasks = planned(cases, options.others, known())
        run([task for task in tasks if task.named or task.others], options.output, options.workers)
    return report(known(), list(bound_cases()))


if __name__ == "__main__":
    sys.exit(main())
