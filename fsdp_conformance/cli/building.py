"""Compiling the simulated accelerator before the cases that need it, so that a run does not seem to hang."""

from __future__ import annotations

import subprocess
import sys
import time

from fsdp_conformance.cli.processes import run_family
from fsdp_conformance.report.terminal import duration

#: Compiling takes half a minute on two idle cores; another process may be compiling it already.
TIMEOUT_S = 900.0

_CODE = "from fsdp_conformance.cases import places; print(places.build_problem())"


def build_simulator(*, timeout_s: float = TIMEOUT_S) -> str:
    """
    Compile it in a child process, and report on it. Returns why it cannot be built, or "".

    A failure ends nothing: the cases that need it are NOT_RUN_ENV, and the others run.
    """
    print("compiling the simulated accelerator (first use) ...", flush=True)
    began = time.monotonic()
    try:
        done = run_family([sys.executable, "-c", _CODE], timeout_s=timeout_s)
        text = done.stdout if done.returncode == 0 else done.stderr[-1500:]
        problem = text.decode(errors="replace").strip()
    except subprocess.TimeoutExpired:
        problem = f"no result within {timeout_s:.0f} s"
    took = duration(time.monotonic() - began)
    print(f"it cannot be compiled: {problem}" if problem else f"compiled in {took}", flush=True)
    return problem
