#!/usr/bin/env python3
"""
Measure the parts of a case on this machine, and predict how long a profile takes on a node with several devices.

Runs a few cases of each world size, one at a time, and splits the seconds of each: forking ranks and ending them, their
settings and imports, the first group, training the engine, and judging (references and comparisons). With --prepare,
the ranks of a case get ready while it runs once before, as those of the next case do on GPUs by default; then there is
no first group, and waiting for ranks that are not ready counts with forking. Afterwards it deals a whole profile of
cases that take so long to the workers of a node, as `run -n auto` does, and prints the wall time for each number of
slots per device. World sizes that were not measured get a duration from a straight line through the others. The last
line is the wall time in minutes with the last number of slots.

The model leaves out that cases slow each other down: where ranks share a device, and where a node has too few cores.
"""

from __future__ import annotations

import argparse
import statistics
import time
import unittest
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fsdp_conformance import run_settings
from fsdp_conformance.contract.profile import load_profile
from fsdp_conformance.harness import devices
from fsdp_conformance.harness.processes.forkserver import server_for
from fsdp_conformance.harness.processes.prepared import prepared
from fsdp_conformance.pytest_plugin.dispatch import Slots, wall_time
from fsdp_conformance.selftest.cases import BoundCase, bound_cases
from fsdp_conformance.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Parts:
    """Seconds of one case. Within a rank, the slowest rank counts."""

    total: float
    start: float
    """Settings of the rank, and importing the case."""
    group: float
    training: float
    """The engine under test; 0 for a case that drives it by hand."""
    judging: float

    @property
    def around(self) -> float:
        """Forking the ranks, giving them their orders, and ending them."""
        return max(0.0, self.total - self.start - self.group - self.training - self.judging)

    @classmethod
    def of(cls, total: float, ranks: Sequence[Mapping[str, float]]) -> Parts:
        """From the seconds that the ranks have reported."""
        slowest = {name: max(rank.get(name, 0.0) for rank in ranks) for name in ("start", "group", "training", "body")}
        judging = max(0.0, slowest["body"] - slowest["group"] - slowest["training"])
        return cls(total, slowest["start"], slowest["group"], slowest["training"], judging)


def measured(bound: BoundCase, following: int) -> Parts | None:
    """Run the case. None if it was not run to a verdict on this machine."""
    reports: list[Any] = []
    test = bound.owner(bound.method)
    conclude = test.conclude

    def keep(new_reports: Any, exits: Any) -> None:
        reports.extend(new_reports)
        conclude(new_reports, exits)

    setattr(test, "conclude", keep)  # noqa: B010 - of this object alone
    prepared.expect(following)
    test.run(unittest.TestResult())  # type: ignore[no-untyped-call]
    record = test.record
    if record is None or record.verdict is not Verdict.PASS or None in reports:
        return None
    return Parts.of(record.seconds, [report.seconds for report in reports])


def durations(by_size: Mapping[int, float], sizes: Sequence[int]) -> dict[int, float]:
    """Seconds of a case of each size: as measured, or on the line through what was measured."""
    if len(by_size) == 1:
        (only,) = by_size.values()
        return dict.fromkeys(sizes, only)
    slope, intercept = statistics.linear_regression(list(by_size), list(by_size.values()))
    return {size: by_size.get(size) or max(min(by_size.values()), intercept + slope * size) for size in sizes}


def minutes(by_size: Mapping[int, float], sizes: Sequence[int], slots: Slots, workers: int) -> float:
    """The wall time of cases of these sizes."""
    seconds = durations(by_size, sorted(set(sizes)))
    cases = [(size, seconds[size]) for size in sorted(sizes, reverse=True)]
    return wall_time(cases, slots, num_workers=workers) / 60


def row(name: object, runs: Sequence[Parts]) -> str:
    """One line of the table: medians."""
    columns = ("total", "around", "start", "group", "training", "judging")
    cells = (statistics.median(getattr(parts, column) for parts in runs) for column in columns)
    return f"{name!s:12}{len(runs):7}" + "".join(f"{cell:10.3f}" for cell in cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementation", default="torch-fsdp2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--profile", default="core")
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--cases", type=int, default=6, help="cases of each world size (default: %(default)s)")
    parser.add_argument("--prepare", action="store_true", help="let ranks get ready ahead, whatever the device")
    parser.add_argument("--num-devices", type=int, default=8, help="devices of the node (default: %(default)s)")
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 2, 4], help="slots per device (default: 1 2 4)")
    args = parser.parse_args()
    if args.prepare:
        devices.begins_slowly = lambda device_type: True
    run_settings.use(replace(run_settings.current(), implementation=args.implementation, device=args.device))
    began = time.perf_counter()
    server_for().ensure_running()
    profile = {entry.id for entry in load_profile(args.profile).entries}
    bound_of_profile = [bound for bound in bound_cases() if bound.case.id in profile]
    first = next(bound for bound in bound_of_profile if bound.case.world_size == min(args.world_sizes))
    measured(first, 0)
    print(f"until the first case has ended, once: {time.perf_counter() - began:.2f} s")
    columns = ("total", "around", "start", "group", "training", "judging")
    print(f"{'world size':12}{'cases':>7}" + "".join(f"{column:>10}" for column in columns))
    by_size: dict[int, float] = {}
    for size in args.world_sizes:
        cases = [bound for bound in bound_of_profile if bound.case.world_size == size]
        runs: list[Parts] = []
        for bound in cases[:: max(1, len(cases) // args.cases)]:
            if args.prepare:
                measured(bound, size)  # while it runs, the ranks of the next one get ready
            parts = measured(bound, size)
            runs += [parts] if parts is not None else []
        if runs:
            print(row(size, runs), flush=True)
            by_size[size] = statistics.fmean(parts.total for parts in runs)
    prepared.close()
    if not by_size:
        parser.error(f"no case of these world sizes passes on {args.device}")
    sizes = [bound.case.world_size for bound in bound_of_profile if bound.case.world_size <= args.num_devices]
    smallest = min((size for size in sizes if size > 1), default=1)
    result = 0.0
    for slots in args.slots:
        workers = max(1, args.num_devices // smallest * slots)
        result = minutes(by_size, sizes, Slots(args.num_devices, slots), workers)
        print(
            f"{len(sizes)} cases on {args.num_devices} devices with {slots} slots each, {workers} workers: "
            f"{result:.1f} min"
        )
    print(f"parts: {result:.2f}")


if __name__ == "__main__":
    main()
