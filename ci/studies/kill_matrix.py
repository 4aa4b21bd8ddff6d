"""Which cases kill which known-wrong engines: see ci/kill-matrix."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

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
    """What comes of a pair."""
    known = MUTANTS[mutant]
    try:
        record = run_case(bound_case(case), known.spec)
    except SuiteError as error:
        return Pair(case, mutant, "ERROR_SUITE", False, str(error))
    found = kill.reason(record, known)
    text = kill.survival(record, known) if found is None else found.sentence()
    return Pair(case, mutant, str(record.verdict), found is not None, text)


def planned(cases: Sequence[BoundCase], others: int) -> Iterator[tuple[str, str]]:
    """Each case with the mutants that it names, and with others that offer what it needs."""
    for bound in cases:
        yield from ((bound.case.id, mutant) for mutant in bound.case.kills)
    if not others:
        return
    declared = {name: registry.load(known.spec).declared() for name, known in MUTANTS.items()}
    for bound in cases:
        able = [
            name
            for name in MUTANTS
            if name not in bound.case.kills and declared[name].issuperset(bound.case.needs) and _is_related(bound, name)
        ]
        chance = random.Random(bound.case.id)
        yield from ((bound.case.id, mutant) for mutant in chance.sample(able, min(others, len(able))))


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


def report(pairs: Sequence[Pair], cases: Sequence[BoundCase]) -> int:
    """Print the figures. Returns the exit status."""
    methods = {bound.case.id: method(bound) for bound in cases}
    named: dict[str, set[str]] = defaultdict(set)
    for bound in cases:
        for mutant in bound.case.kills:
            named[mutant].add(methods[bound.case.id])
    pairs = [pair for pair in pairs if pair.case in methods and pair.mutant in MUTANTS]
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
    """The pairs in a file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [Pair(**json.loads(line)) for line in lines]


def run(pairs: Sequence[tuple[str, str]], path: Path, workers: int) -> None:
    """Try the pairs, and add a line for each."""
    context = multiprocessing.get_context("spawn")
    with path.open("a", encoding="utf-8") as file, ProcessPoolExecutor(workers, mp_context=context) as pool:
        for done in as_completed([pool.submit(tried, *pair) for pair in pairs]):
            file.write(json.dumps(_as_json(done.result())) + "\n")
            file.flush()


def _as_json(pair: Pair) -> dict[str, Any]:
    return {name: getattr(pair, name) for name in Pair.__slots__}


def main(words: Sequence[str] | None = None) -> int:
    """Run what is missing, and report."""
    parser = argparse.ArgumentParser(prog="ci/kill-matrix")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--others", type=int, default=0)
    parser.add_argument("--case", default="*")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--only-read", action="store_true")
    options = parser.parse_args(words)
    cases = [bound for bound in bound_cases() if fnmatchcase(bound.case.id, options.case)]
    if not options.only_read:
        there = {(pair.case, pair.mutant) for pair in read(options.output)}
        run([pair for pair in planned(cases, options.others) if pair not in there], options.output, options.workers)
    return report(read(options.output), list(bound_cases()))


if __name__ == "__main__":
    sys.exit(main())
