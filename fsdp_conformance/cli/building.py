"""Compiling the simulated accelerator before the cases that need it, so that a run does not seem to hang."""

from __future__ import annotations

import time
from collections.abc import Sequence

from fsdp_conformance.cli.child import answers
from fsdp_conformance.report.terminal import duration

#: Compiling takes half a minute on two idle cores; another process may be compiling it already.
TIMEOUT_S = 900.0


def build_simulator(signals: Sequence[int] = (), *, timeout_s: float = TIMEOUT_S) -> str:
    """
    Compile it in a child process, and report on it. Returns why it cannot be built, or "".

    A failure ends nothing: the cases that need it are NOT_RUN_ENV, and the others run. Raises Stopped once there is a
    signal in `signals`.
    """
    print("compiling the simulated accelerator (first use) ...", flush=True)
    began = time.monotonic()
    problem = ""
    with answers("build", timeout_s=timeout_s, signals=signals) as replies:
        for answer in replies:
            problem = (
                answer["problem"] if answer["what"] == "built" else f"{answer['output']}\nthe compiler {answer['how']}"
            )
    took = duration(time.monotonic() - began)
    print(f"it cannot be compiled: {problem}" if problem else f"compiled in {took}", flush=True)
    return problem
