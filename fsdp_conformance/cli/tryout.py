"""
The child process of `selftest`: `python -m fsdp_conformance.cli.tryout WORKERS SUITES [--quick]` runs the trials, and
prints the plan and each result as a line of JSON.

Each worker is a separate process, because a case's settings belong to its process.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

from fsdp_conformance import codec


def main(words: list[str]) -> None:
    """Run the plan on a number of workers."""
    from fsdp_conformance.selftest import trials

    workers, suites, *options = words
    plan = trials.plan(quick="--quick" in options, suites=suites)
    say("plan", **codec.plain(plan))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(int(workers), mp_context=context) as pool:
        pending = [pool.submit(trials.run, trial, suites) for trial in plan.trials]
        for done in as_completed(pending):
            say("result", **codec.plain(done.result()))


def say(what: str, **content: Any) -> None:
    """Print one answer immediately."""
    print(json.dumps({"what": what, **content}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
