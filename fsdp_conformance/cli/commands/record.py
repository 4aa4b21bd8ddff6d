"""`fsdp-conformance record`: runs a command, and records what its Python processes train."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time

from fsdp_conformance.cli import messages
from fsdp_conformance.cli.recorded_run import elapsed, fresh_directory, run_recorded, simulated_gpus
from fsdp_conformance.errors import ConfigError, UsageError
from fsdp_conformance.parity.runs import Run
from fsdp_conformance.recorder.settings import RecordSettings
from fsdp_conformance.recordings import files
from fsdp_conformance.simulator.simulated_cuda.settings import MAX_DEVICES
from fsdp_conformance.status import Status


def main(arguments: argparse.Namespace) -> int:
    """Run the command. Returns its exit status, or that of what is wrong with the recording."""
    words = arguments.words[1:] if arguments.words[:1] == ["--"] else arguments.words
    if not words:
        raise UsageError("give the command that trains, after --")
    directory = fresh_directory(arguments.output)
    timeout_s = timeout_of(arguments.timeout)
    settings = RecordSettings(directory=str(directory.absolute()), prefix=sys.prefix)
    gpus = _gpus(arguments.as_cuda)
    began = time.monotonic()
    try:
        with contextlib.ExitStack() as resources:
            variables = resources.enter_context(simulated_gpus(gpus)) if gpus else {}
            status = run_recorded(words, settings, say=_say, timeout_s=timeout_s, variables=variables)
    except (FileNotFoundError, PermissionError) as error:
        raise UsageError(f"the command cannot be started: {error.strerror}: {words[0]!r}") from None
    try:
        run = Run(files.read(directory))
    except ConfigError as error:
        if status == 0:
            raise error
        why = f"was ended after {timeout_s:g} s (--timeout)" if status is None else f"ended with status {status}"
        messages.complain(f"the command {why} before it trained a step")
        return Status.SCRIPT_FAILED
    ranks, steps = messages.plural(run.world_size, "rank"), messages.plural(len(run.steps), "step")
    messages.say(f"recorded {steps} of {ranks} in {directory}, {elapsed(began)}", directory)
    if run.recorder_errors:
        rank = min(run.recorder_errors)
        messages.complain(
            f"the recorder failed on rank {rank}, so later steps are not recorded: {run.recorder_errors[rank]}. Please "
            "report this as a bug in fsdp-conformance"
        )
    if status is None:
        messages.complain(f"the command was ended after {timeout_s:g} s (--timeout)")
    if status != 0:
        return Status.SCRIPT_FAILED
    return Status.SUITE if run.recorder_errors else Status.CERTIFIED


def _say(line: str) -> None:
    print(line, flush=True)


def _gpus(word: str | None) -> int:
    """The number of simulated GPUs; 0 for none. Raises UsageError for a number that there cannot be."""
    if word is None:
        return 0
    if not word.isascii() or not word.isdecimal() or not 1 <= int(word) <= MAX_DEVICES:
        raise UsageError(f"--as-cuda must be a number of GPUs from 1 to {MAX_DEVICES}, got {word}")
    return int(word)


def timeout_of(word: str) -> float:
    """The seconds in an option. Raises UsageError if it has none."""
    try:
        seconds = float(word)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(f"--timeout must be a positive number of seconds, got {word!r}")
    return seconds
