#!/usr/bin/env python3
"""
Seconds and memory of the nested parity case on simulated ranks, next to ranks that are processes.

The case is the suites' own: full sharding of nested units on the exact probe, timed from starting the ranks to the
verdict. The probe is first proved exact at each world size, and the benchmark fails unless every verdict is PASS, which
means that all losses, gradients and parameters equal the references' bit for bit. Memory is the sum of the processes'
peak resident sets, which counts shared pages once per process, and the sum of their proportional sets (PSS, Linux)
after training, while all ranks are alive. The last line is the time of the largest simulated world of at most 64 ranks,
for the slower engine.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "cases"))

from nested_parity import PROBE, WORLD_SIZES, NestedParity

from fsdp_conformance.contract.case import case_of
from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.references.exactness import assert_exact
from fsdp_conformance.report.terminal import render_record
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.selftest import BoundCase, run_case
from fsdp_conformance.verdict import Verdict
from fsdp_conformance.workload.definition import Regime

#: The world size that the figure is about.
FIGURE_RANKS = 64

MB = 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The measurements of one case."""

    seconds: float
    """Seconds from starting the ranks to the verdict."""
    cpu_seconds: float
    """CPU seconds of all rank processes."""
    peak_bytes: int
    """Sum of the processes' peak resident set sizes, in bytes."""
    proportional_bytes: int
    """Sum of the processes' proportional set sizes at the end of training, in bytes."""


def measured(implementation: str, ranks: str, world_size: int) -> Measured:
    """Run the case on fresh ranks of that kind. Exits with the full finding unless the verdict is PASS."""
    name = f"test_nested_parity_ws{world_size}"
    case = case_of(getattr(NestedParity, name))
    assert case is not None, f"{name} is made of a case"
    record = run_case(BoundCase(case, NestedParity, name), implementation, base=RunSettings(ranks=ranks))
    if record.verdict is not Verdict.PASS:
        sys.exit(
            f"simulated: {implementation} on {world_size} ranks ({ranks}) is {record.verdict}\n{render_record(record)}"
        )
    used = processes(record)
    return Measured(
        seconds=record.seconds,
        cpu_seconds=sum(process["cpu seconds"] for process in used),
        peak_bytes=sum(process["peak bytes"] for process in used),
        proportional_bytes=sum(process["proportional bytes"] for process in used),
    )


def processes(record: CaseRecord) -> list[dict[str, Any]]:
    """The resources that each process used: the maximum over the readings of its ranks."""
    largest: dict[int, dict[str, Any]] = {}
    for rank in range(record.world_size):
        read = record.measurements[f"process of rank {rank}"][f"rank {rank}"]
        earlier = largest.setdefault(read["pid"], read)
        largest[read["pid"]] = {key: max(earlier[key], value) for key, value in read.items()}
    return list(largest.values())


def row(name: str, world_size: int, got: Measured) -> str:
    """One line of the table."""
    return (
        f"{name:28}{world_size:6}{got.seconds:10.2f}{got.cpu_seconds:10.2f}"
        f"{got.peak_bytes / MB:12.0f}{got.proportional_bytes / MB:12.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulated", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64], choices=WORLD_SIZES)
    parser.add_argument("--processes", type=int, nargs="*", default=[2, 4, 8, 16], choices=WORLD_SIZES)
    parser.add_argument("--implementations", nargs="+", default=["torch-fsdp2", "reference"])
    args = parser.parse_args()
    began = time.monotonic()
    measured(args.implementations[0], "simulated", 2)
    print(f"start of the warm process and a first case: {time.monotonic() - began:.1f} s", flush=True)
    print(f"{'nested parity case':28}{'ranks':>6}{'seconds':>10}{'CPU s':>10}{'peak MB':>12}{'PSS MB':>12}", flush=True)
    figure = 0.0
    at = max((size for size in args.simulated if size <= FIGURE_RANKS), default=min(args.simulated))
    for world_size in sorted({*args.simulated, *args.processes}):
        assert_exact(PROBE(), Regime(), world_size)
        for implementation in args.implementations:
            for ranks, sizes in (("simulated", args.simulated), ("processes", args.processes)):
                if world_size not in sizes:
                    continue
                got = measured(implementation, ranks, world_size)
                print(row(f"{implementation}, {ranks}", world_size, got), flush=True)
                if (ranks, world_size) == ("simulated", at):
                    figure = max(figure, got.seconds)
    print(f"simulated: {figure:.1f}")


if __name__ == "__main__":
    main()
