"""Compiling the simulated accelerator before the cases that need it, so that a run does not seem to stand still."""

from __future__ import annotations

import subprocess
import sys
import time

from fsdp_conformance.report.terminal import duration

#: Compiling takes half a minute on two idle cores; another process may be at it already.
TIMEOUT_S = 900.0

_CODE = "from fsdp_conformance.simulator import place; print(place.build_problem())"


def build_simulator(*, timeout_s: float = TIMEOUT_S) -> str:
    """
    Compile it in a child process, and say so. Returns why it cannot be built, or "".

    A failure ends nothing: the cases that need it are then NOT_RUN_ENV, and the others run.
    """
    print("building the simulated accelerator, first use ...", flush=True)
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CODE], check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=timeout_s,
        )  # fmt: skip
        problem = (done.stdout if done.returncode == 0 else done.stderr[-1500:]).strip()
    except subprocess.TimeoutExpired:
        problem = f"no result within {timeout_s:.0f} s"
    took = duration(time.monotonic() - began)
    print(f"it cannot be built: {problem}" if problem else f"built in {took}", flush=True)
    return problem
