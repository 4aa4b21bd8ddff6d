"""The exit statuses of every command, and what each of them means: help texts and documentation are made from this."""

from __future__ import annotations

from enum import IntEnum


class Status(IntEnum):
    """Exit statuses. A command that a signal ends has 128 plus the signal's number, as in a shell."""

    CERTIFIED = 0
    NOT_CERTIFIED = 1
    USAGE = 2
    ENVIRONMENT = 3
    SUITE = 4
    SCRIPT_FAILED = 5
    INTERRUPTED = 130
    CLOSED_PIPE = 141


#: What a status means, unless the command gives it another meaning.
_MEANINGS = {
    Status.CERTIFIED: "certified, or the command succeeded",
    Status.NOT_CERTIFIED: "not certified, or a check failed: the report says why",
    Status.USAGE: "usage error: a wrong option or file, or an adapter that cannot be imported",
    Status.ENVIRONMENT: "this machine lacks something: a device, a backend, disk space",
    Status.SUITE: "the suite itself failed; this says nothing about the implementation",
    Status.INTERRUPTED: "interrupted by Ctrl-C (SIGTERM: 143, SIGHUP: 129)",
    Status.CLOSED_PIPE: "stopped because the program that reads the output has ended, as with `| head`",
}

_OF_COMMAND: dict[str, dict[Status, str]] = {
    "compare": {
        Status.CERTIFIED: "no verdict differs",
        Status.NOT_CERTIFIED: "at least one verdict differs",
        Status.USAGE: "usage error: a file that is not a finished run, or runs that should not be compared",
    },
    "debug": {
        Status.CERTIFIED: "the case passed, or does not apply to the implementation",
        Status.NOT_CERTIFIED: "the case failed, or the debugger was left before its end",
        Status.ENVIRONMENT: "this machine cannot run the case",
        Status.INTERRUPTED: "ended by a signal (SIGTERM: 143, SIGHUP: 129)",
    },
    "repro": {
        Status.CERTIFIED: "the script was written",
        Status.USAGE: "usage error: a wrong option, or a case or an adapter that cannot be written as a script",
        Status.ENVIRONMENT: "this machine lacks something: a backend, a writable file",
    },
    "replay": {
        Status.CERTIFIED: "the verdict was the same every time",
        Status.NOT_CERTIFIED: "the verdict was another one at least once",
        Status.USAGE: "usage error: a wrong option, a file that is no intact run, or a case that it does not have",
    },
    "run": {
        Status.INTERRUPTED: "interrupted by Ctrl-C (SIGTERM: 143, SIGHUP: 129); `run --resume` goes on",
    },
    "explore": {
        Status.CERTIFIED: "no failure was found",
        Status.NOT_CERTIFIED: "at least one failure was found and confirmed",
        Status.ENVIRONMENT: "this machine lacks something: a C++ compiler, a writable directory",
    },
    "init": {
        Status.CERTIFIED: "every file was written",
        Status.USAGE: "usage error: a wrong adapter, or files that exist; nothing was written",
        Status.ENVIRONMENT: "the directory cannot be written, or its disk is full",
    },
    "completion": {
        Status.CERTIFIED: "the script was printed",
        Status.ENVIRONMENT: "this machine lacks something: shtab",
    },
    "scoreboard": {
        Status.CERTIFIED: "the table was printed, whatever the engines fail",
        Status.USAGE: "usage error: a file that is not a finished run, or that was edited",
    },
    "update-expectations": {
        Status.CERTIFIED: "the file is up to date",
        Status.USAGE: "usage error: a run that did not finish, or a list that cannot be read",
    },
    "plan": {
        Status.CERTIFIED: "a plan was found",
        Status.NOT_CERTIFIED: "no way to shard the model fits in memory",
        Status.USAGE: "usage error: a wrong option, or a model that cannot be built",
    },
    "selftest": {
        Status.CERTIFIED: "every known-wrong engine was killed for its reason, and no correct one",
        Status.NOT_CERTIFIED: "a known-wrong engine survived, or a correct one was killed",
        Status.ENVIRONMENT: "no case can run on this machine",
    },
    "record": {
        Status.CERTIFIED: "the command succeeded, and was recorded",
        Status.USAGE: "usage error: a wrong option, or a command that trained nothing with this environment",
        Status.ENVIRONMENT: "the directory cannot be written, or its disk is full",
        Status.SCRIPT_FAILED: "the command failed; what it trained before is recorded",
        Status.INTERRUPTED: "interrupted by Ctrl-C; what was trained so far is recorded",
    },
    "parity": {
        Status.CERTIFIED: "the trainings are equal, bit for bit or but for rounding",
        Status.NOT_CERTIFIED: "they differ: the report says where first, and why",
        Status.USAGE: "usage error: a wrong option, a directory without a recording, or nothing to compare",
        Status.ENVIRONMENT: "this machine lacks something: a writable directory",
        Status.SCRIPT_FAILED: "a script failed before there was anything to compare",
        Status.INTERRUPTED: "interrupted by Ctrl-C; --output keeps what was recorded",
    },
    "sanitize": {
        Status.CERTIFIED: "clean: memory accesses were checked, and nothing was found",
        Status.NOT_CERTIFIED: "something was found (even if the script failed afterwards)",
        Status.USAGE: "usage error: a wrong option, a missing script, or a script that never used the device",
        Status.ENVIRONMENT: "this machine has no C++ compiler, or not the GPUs that `--device cuda` needs",
        Status.SCRIPT_FAILED: "the script failed: it raised, died, or timed out",
        Status.INTERRUPTED: "interrupted by Ctrl-C; what was found so far is printed",
    },
}


def meanings(command: str = "") -> dict[Status, str]:
    """The meaning of each exit status of a command; without a command, the general meanings."""
    return dict(sorted({**_MEANINGS, **_OF_COMMAND.get(command, {})}.items()))


def table(command: str = "") -> str:
    """The same as lines for a help text."""
    lines = (f"  {int(status):<4} {meaning}\n" for status, meaning in meanings(command).items())
    return "exit status:\n" + "".join(lines)
