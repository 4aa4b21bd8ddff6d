"""
The command line: the commands, and the code that they share.

    commands        a module for each command
    jobs            a module for each job of a child process

From the command line to an exit status:
    command         runs a command; turns errors into messages and statuses
    arguments       commands, options, and the settings that they make
    plan_order      the options of `plan`
    messages        errors on stderr, suggestions for mistyped words

The files of `init`:
    scaffold        their paths and contents, and obstacles to writing them

The steps of `run`:
    chosen_cases    the selected cases, and the verdicts that are known before they run
    estimate        how long a run will take
    pace            how fast this machine was in earlier runs
    expected        known failures and an earlier run, which a run is compared with
    report_dir      the directory of a run
    building        compiling the simulated accelerator beforehand
    pytest_process  pytest as a child process
    progress        how far the run is, on a terminal or in a log
    torchrun        `run` as a worker of torchrun
    resumed         `run --resume`: go on with a run that was interrupted
    named_code      settings of a run file that name code or files, which the user has to name again

Child processes. They import torch; the command itself, except for `smoke` and those about one case, does not:
    child           starting, asking and ending a child, and its own side of the pipe
    signals         signals that ask a command to end
    survey          the machine and the implementation, as a child sees them
    own_workload    the user's own model, examined in a child
    leftovers       processes and files that earlier runs left behind

Shared by the commands about one case:
    single          finding it, running it in this process, its exit status

For `record` and `parity`:
    killed_rank     the rank of a script that a signal has ended, from the output of torchrun
    recorded_run    a command whose Python processes record what they train

For `sanitize`:
    alerts          its findings as code-scanning results and annotations
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from fsdp_conformance.status import Status

__all__ = ["main"]

_ROOT = Path(__file__).resolve().parents[2]


def main(argv: Sequence[str] | None = None) -> int:
    """`command.main`. Where this package is not installed, which no other module expects, only says what to do."""
    if importlib.util.find_spec("fsdp_conformance.docs") is None:
        print(
            f"fsdp-conformance: the checkout {_ROOT} must be installed before it can run, because docs/, fixtures/ and "
            f"suites/ become parts of the package only then: run {_ROOT / 'ci/setup'} and use "
            f"{_ROOT / '.venv/bin/fsdp-conformance'}, or run pip install -e {_ROOT} in an environment of your own.",
            file=sys.stderr,
        )
        return Status.USAGE
    from fsdp_conformance.cli import command

    return command.main(argv)
