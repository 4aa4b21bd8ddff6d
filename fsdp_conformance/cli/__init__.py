"""
The command line: one module a command, and what they share.

    arguments     what can be typed
    run           cases run by pytest in a process of its own, followed live, judged at the end
    smoke         the adapter alone
    sanitize      somebody's training script on the simulated accelerator
    plan          how to shard a model, by a cost model
    doctor        the machine alone
    listing       every case, and whether it would run
    explain       a requirement or a case, with what a run found
    verify        the verdict, derived again from a run file

Nothing here imports torch. What needs it is asked of a child process: `survey`, `examine`, `planner`, and pytest
itself. Exit statuses are in `status`.
"""

from fsdp_conformance.cli.command import main

__all__ = ["main"]
