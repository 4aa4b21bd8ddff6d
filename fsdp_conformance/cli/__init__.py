"""
The command line: the commands, and what they share.

    commands        a module for each command

From the command line to an exit status:
    command         runs a command; turns errors into messages and statuses
    arguments       commands, options, and the settings that they make
    plan_order      the options of `plan`
    messages        errors on stderr, suggestions for mistyped words

What `init` writes:
    scaffold        the files, where they belong, and what is in the way

What `run` does:
    chosen_cases    the selected cases, and what is known of them before they run
    estimate        how long a run will take
    expected        what a run is compared with besides the contract: known failures, an earlier run
    report_dir      the directory of a run
    building        compiling the simulated accelerator beforehand
    pytest_process  pytest as a child process
    warm            ... and that child, which imports torch once for all
    progress        how far the run is, on a terminal or in a log
    torchrun        `run` as a worker of torchrun

Child processes. They import torch; the command itself, except for `smoke` and those about one case, does not:
    processes       running and ending a child with everything it has started
    signals         signals that ask a command to end
    survey          what the implementation and the machine are, asked of a child
    surveyor        ... and that child
    examination     what `doctor` finds out in a child
    examine         ... and that child
    planner         the child of `plan`
    answers         lines of JSON from a child, as they come
    tryout          the child of `selftest`
    explorer        the child of `explore`
    leftovers       processes and files that earlier runs left behind

What the commands about one case share:
    single          finding it, running it in this process, its exit status

For `sanitize`:
    alerts          its findings as code-scanning results and annotations
"""

from fsdp_conformance.cli.command import main

__all__ = ["main"]
