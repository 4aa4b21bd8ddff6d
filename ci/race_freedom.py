"""Trainings that must not race and must compute the same as on the CPU: see ci/race-freedom."""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from fsdp_conformance.errors import EnvironmentUnavailable
from fsdp_conformance.plan import SIMULATED
from fsdp_conformance.simulator.device import build
from studies.stream_ranks import run_on_ranks
from studies.stream_study import ALL, Job, outcome_of, reference, study
from studies.stream_trainings import TRAININGS, Training

#: Trainings per launch.
BATCH = 30

#: The runs of a training on the simulated accelerator: which waits are dropped, and which memory may be reused.
RUNS = (((), "exact"), ((), "worst_case"), ((ALL,), "exact"))


def problems_of(training: Training, runs: Sequence[Sequence[dict[str, Any]]], references: list[dict[str, Any]]) -> str:
    """What is wrong with a training; `runs` has one entry for each of RUNS, by rank."""
    exact, worst, control = runs
    found = [shown["error"] for shown in (*exact, *worst) if shown["error"]]
    found += [line for shown in (*exact, *worst) for line in shown["hazards"]]
    if not any(shown["hazards"] for shown in control):
        found.append("no hazard was found without any waits")
    if not all(shown["accesses"] for shown in exact):
        found.append("no access was checked")
    for rank, (shown, expected) in enumerate(zip(exact, references, strict=True)):
        if shown["outcome"]:
            found += [f"rank {rank}: {line}" for line in outcome_of(shown["outcome"]).differences(outcome_of(expected))]
    return "; ".join(dict.fromkeys(found))


def check(trainings: Sequence[Training]) -> dict[str, tuple[str, Any]]:
    """For each name, what is wrong ("" if nothing), and the runs of rank 0."""
    by_size: dict[int, list[Training]] = defaultdict(list)
    for training in trainings:
        by_size[training.world_size].append(training)
    result: dict[str, tuple[str, Any]] = {}
    for world_size, all_of_size in sorted(by_size.items()):
        for start in range(0, len(all_of_size), BATCH):
            some = all_of_size[start : start + BATCH]
            names = [training.reference or training.name for training in some]
            on_cpu = run_on_ranks(reference, names, world_size=world_size, device_type="cpu", timeout_s=600)
            jobs = [Job(training.name, dropped, reuse) for training in some for dropped, reuse in RUNS]
            on_sim = run_on_ranks(study, jobs, world_size=world_size, device_type=SIMULATED, timeout_s=900)
            for index, training in enumerate(some):
                runs = [[of_rank[3 * index + number] for of_rank in on_sim] for number in range(len(RUNS))]
                references = [of_rank[index] for of_rank in on_cpu]
                result[training.name] = problems_of(training, runs, references), [run[0] for run in runs]
    return result


def table(trainings: Sequence[Training], shown: Mapping[str, Sequence[dict[str, Any]]]) -> str:
    """One line for each engine."""
    lines = [
        "| engine | trainings | on 4 ranks | accesses checked, rank 0 | hazards | hazards without waits, in each |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for engine in dict.fromkeys(training.engine for training in trainings):
        some = [training for training in trainings if training.engine == engine]
        runs = [shown[training.name] for training in some]
        hazards = {line for exact, worst, _ in runs for line in (*exact["hazards"], *worst["hazards"])}
        accesses = sum(exact["accesses"] + worst["accesses"] for exact, worst, _ in runs)
        control = [len(run["hazards"]) for _, _, run in runs]
        on_four = sum(training.world_size == 4 for training in some)
        cells = (engine, len(some), on_four, accesses, len(hazards), f"{min(control)} to {max(control)}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> int:
    """Run, print a line per training, and count those that pass."""
    parser = argparse.ArgumentParser(prog="ci/race-freedom")
    parser.add_argument("--training", action="append", default=[], metavar="PREFIX")
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    prefixes = tuple(arguments.training) or ("",)
    trainings = [training for training in TRAININGS.values() if training.name.startswith(prefixes)]
    if not trainings:
        parser.error(f"no training starts with {' or '.join(prefixes)}")
    try:
        build.require()
    except EnvironmentUnavailable as error:
        print(f"race-freedom: {error}", file=sys.stderr)
        return 3
    result = check(trainings)
    for training in trainings:
        problem, (exact, worst, control) = result[training.name]
        counted = len(set(exact["hazards"]) | set(worst["hazards"])), len(control["hazards"])
        if not arguments.markdown:
            size = f"{training.world_size:2} ranks {exact['accesses']:6} accesses"
            print(f"{training.name:34}{size} {counted[0]:3} hazards {counted[1]:3} in control")
        if problem:
            print(f"    {training.name}: {problem}")
    if arguments.markdown:
        print(table(trainings, {name: runs for name, (_, runs) in result.items()}))
    clean = sum(not problem for problem, _ in result.values())
    print(f"race-freedom: {clean} of {len(trainings)}")
    return 0 if clean == len(trainings) else 1


if __name__ == "__main__":
    sys.exit(main())
