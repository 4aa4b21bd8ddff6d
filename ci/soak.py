"""Repeated cases: see ci/soak."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from fsdp_conformance.report.terminal import render_record
from fsdp_conformance.selftest import BoundCase, bound_cases, run_case
from fsdp_conformance.verdict import Verdict

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


def chosen(names: list[str]) -> list[BoundCase]:
    """The cases with these ids or requirements, in the order of the suites."""
    found = [bound for bound in bound_cases() if bound.case.id in names or bound.case.requirements[0] in names]
    missing = [
        name for name in names if not any(name in (bound.case.id, bound.case.requirements[0]) for bound in found)
    ]
    if missing:
        sys.exit(f"soak: --case must be the id of a case or requirement, got {', '.join(missing)}")
    return found


def main() -> int:
    """Run the cases, print a line for each, and return whether there was an alarm."""
    parser = argparse.ArgumentParser(prog="ci/soak")
    parser.add_argument("--repeat", type=int, default=200)
    parser.add_argument("--implementation", default="torch-fsdp2")
    parser.add_argument("--case", action="append", default=[])
    arguments = parser.parse_args()
    alarms = runs = 0
    for bound in chosen(arguments.case or list(CASES)):
        verdicts: Counter[Verdict] = Counter()
        began = time.monotonic()
        for _ in range(arguments.repeat):
            record = run_case(bound, arguments.implementation)
            verdicts[record.verdict] += 1
            if record.verdict is not Verdict.PASS:
                # In full: an alarm that happens once in a thousand runs may not happen again.
                print(render_record(record), flush=True)
        runs += arguments.repeat
        alarms += arguments.repeat - verdicts[Verdict.PASS]
        counted = " · ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
        print(f"{bound.case.id:36} {counted:20} {time.monotonic() - began:6.1f} s", flush=True)
    print(f"soak: {alarms} alarms in {runs} runs")
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main())
