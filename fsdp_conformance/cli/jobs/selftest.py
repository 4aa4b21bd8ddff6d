"""
The job of `selftest`: known-wrong and correct engines, each tried on its cases.

Each worker is a separate process, because a case's settings belong to its process.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict

from fsdp_conformance import codec
from fsdp_conformance.cli.child import Answer


def run(answer: Answer, workers: int, suites: str, *, quick: bool) -> None:
    """Answer with the plan, and then the result of each trial as it ends."""
    from fsdp_conformance.selftest import trials

    plan = trials.plan(quick=quick, suites=suites)
    answer("plan", **asdict(plan))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        pending = [pool.submit(trials.run, trial, suites) for trial in plan.trials]
        for done in as_completed(pending):
            answer("result", **codec.plain(done.result()))
