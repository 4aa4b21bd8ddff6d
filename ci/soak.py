"""Repeated cases: see ci/soak."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from known_findings import is_known, known_findings

from fsdp_conformance.contract.profile import load_profile
from fsdp_conformance.mutants import VARIANTS
from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.report.expectations import Expectation
from fsdp_conformance.report.terminal import render_record
from fsdp_conformance.selftest import BoundCase, bound_cases, run_case
from fsdp_conformance.verdict import CERTIFIABLE, Verdict

#: One case of each kind of check and of each possible cause of a false alarm: exact and calibrated comparison, Adam,
#: accumulation, schedules, volume, delays, poisoned memory, shapes below the world size, digests across ranks.
CASES = (
    "R001/exact-probe-ws3",
    "R001/sgd-norm-mlp-ws2",
    "R004/adam-norm-mlp-ws2",
    "R007/same-on-every-rank-ws2",
    "R062/full-sharding-ws2",
    "R068/volume-ws2",
    "R073/everything-late-full-ws4",
    "R093/deferred-micro-batches3-ws2",
    "R123/poisoned-padding-ws3",
    "R155/called-three-times-ws2",
    "R188/it-shards-ws2",
)
#: Whose cases --base takes.
PROFILE = "core-2026.11"
#: The engines of --variants, besides the variants.
ENGINES = ("torch-fsdp2", "reference")


class Key(NamedTuple):
    """What is repeated."""

    implementation: str
    case: str


def chosen(names: list[str]) -> list[BoundCase]:
    """The cases with these ids or requirements, in the order of the suites."""
    found = [bound for bound in bound_cases() if bound.case.id in names or bound.case.requirements[0] in names]
    missing = [
        name for name in names if not any(name in (bound.case.id, bound.case.requirements[0]) for bound in found)
    ]
    if missing:
        sys.exit(f"soak: --case must be the id of a case or requirement, got {', '.join(missing)}")
    return found


def base_cases() -> list[BoundCase]:
    """The cases that every implementation must pass: those of the core profile that need no capability."""
    ids = {entry.id for entry in load_profile(PROFILE).entries}
    return [bound for bound in bound_cases() if bound.case.id in ids and not bound.case.needs]


def engines(arguments: argparse.Namespace) -> dict[str, str]:
    """What to run the cases on: name to what `--implementation` takes."""
    if not arguments.variants:
        return {name: name for name in arguments.implementation or ["torch-fsdp2"]}
    found = {name: name for name in ENGINES} | {name: variant.spec for name, variant in VARIANTS.items()}
    wanted = arguments.implementation or list(found)
    unknown = [name for name in wanted if name not in found]
    if unknown:
        sys.exit(f"soak: --implementation must be one of {', '.join(found)}, got {', '.join(unknown)}")
    return {name: found[name] for name in wanted}


def is_alarm(implementation: str, record: CaseRecord, known: Sequence[Expectation]) -> bool:
    """Whether a case that should have passed did not, for a reason that is not a known defect of the engine."""
    variant = VARIANTS.get(implementation)
    names = (implementation, *([variant.base] if variant is not None else []))
    return record.verdict not in CERTIFIABLE and not any(is_known(name, record, known) for name in names)


def earlier(path: Path | None) -> Iterator[dict[str, object]]:
    """The runs that are already in the results. A last line that was cut off is ended, and does not count."""
    if path is None or not path.exists():
        return
    text = path.read_text(encoding="utf-8")
    if text and not text.endswith("\n"):
        with path.open("a", encoding="utf-8") as file:
            file.write("\n")
    for line in text.splitlines():
        if line.startswith("{") and line.endswith("}"):
            with contextlib.suppress(json.JSONDecodeError):
                yield json.loads(line)


def main() -> int:
    """Run the cases, print what is remarkable, and return whether there was an alarm."""
    parser = argparse.ArgumentParser(prog="ci/soak")
    parser.add_argument("--repeat", type=int, default=200)
    parser.add_argument("--implementation", action="append", default=[])
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--case", action="append", default=[])
    parser.add_argument("--base", action="store_true")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    arguments = parser.parse_args()
    cases = base_cases() if arguments.base else chosen(arguments.case or list(CASES))
    specs, known = engines(arguments), known_findings()
    verdicts: dict[Key, Counter[Verdict]] = {Key(name, bound.case.id): Counter() for name in specs for bound in cases}
    alarms = 0
    for run in earlier(arguments.results):
        key = Key(str(run["implementation"]), str(run["case"]))
        if key in verdicts:
            verdicts[key][Verdict(str(run["verdict"]))] += 1
            alarms += bool(run["alarm"])
    began = time.monotonic()
    for turn in range(arguments.repeat):
        for bound in cases:
            for name, spec in specs.items():
                counted = verdicts[Key(name, bound.case.id)]
                if counted.total() > turn or time.monotonic() - began > 60 * arguments.minutes:
                    continue
                record = run_case(bound, spec)
                alarm = is_alarm(name, record, known)
                counted[record.verdict] += 1
                alarms += alarm
                if alarm:
                    # In full: an alarm that happens once in a thousand runs may not happen again.
                    print(f"{name}: {render_record(record)}", flush=True)
                _note(arguments.results, name, record, alarm=alarm)
    for (name, case), counted in verdicts.items():
        if not arguments.base or set(counted) - {Verdict.PASS}:
            told = " · ".join(f"{count} {verdict}" for verdict, count in counted.items())
            print(f"{name:24} {case:44} {told}", flush=True)
    runs = sum(counted.total() for counted in verdicts.values())
    print(f"soak: {alarms} alarms in {runs} runs")
    return 1 if alarms else 0


def _note(path: Path | None, implementation: str, record: CaseRecord, *, alarm: bool) -> None:
    """Append a run to the results, whole if it did not pass."""
    if path is None:
        return
    run: dict[str, object] = {
        "implementation": implementation,
        "case": record.case,
        "verdict": record.verdict,
        "alarm": alarm,
        "seconds": round(record.seconds, 3),
    }
    if record.verdict is not Verdict.PASS or any(end.exitcode for end in record.exits):
        run["record"] = record.to_json()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        print(json.dumps(run), file=file)


if __name__ == "__main__":
    sys.exit(main())
