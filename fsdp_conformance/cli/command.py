"""From what was typed to an exit status: every error becomes a message and its status here, and nowhere else."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType

from fsdp_conformance.cli import arguments, messages
from fsdp_conformance.cli.status import Status
from fsdp_conformance.errors import AdapterError, ConformanceError


class Stopped(KeyboardInterrupt):
    """SIGTERM or SIGHUP, taken as Ctrl-C is: children are ended before the command leaves."""

    def __init__(self, signum: int) -> None:
        self.signum = signum
        super().__init__(signal.Signals(signum).name)


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run the command, and return its exit status.

    Raises SystemExit for --help, --version and options that cannot be parsed, as argparse does.
    """
    for stream in (sys.stdout, sys.stderr):
        # A terminal without UTF-8 shows a question mark instead of ending the run.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace", line_buffering=True)
    parsed = arguments.parse(argv)
    handlers = {number: signal.signal(number, _stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        return _run(parsed)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _run(parsed: argparse.Namespace) -> int:
    try:
        handler = importlib.import_module(f"fsdp_conformance.cli.{parsed.module}")
        return int(handler.main(parsed))
    except ConformanceError as error:
        messages.complain(error)
        # An adapter that is none is a mistake in what was named, as long as no case has met it.
        return Status.USAGE if isinstance(error, AdapterError) else error.exit_status
    except KeyboardInterrupt as error:
        number = error.signum if isinstance(error, Stopped) else int(signal.SIGINT)
        messages.complain(f"interrupted by {signal.Signals(number).name}")
        return 128 + number
    except BrokenPipeError:
        # `| head` has closed stdout; the interpreter must not complain about that at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Status.CERTIFIED
    except OSError as error:
        if error.errno not in messages.DISK_ERRORS:
            return _own_mistake()
        messages.complain(f"{error.filename or 'a file'} cannot be written: {os.strerror(error.errno or errno.EIO)}")
        return Status.ENVIRONMENT
    except Exception:  # noqa: BLE001 - Python's own status for an exception is 1, which would say "not certified"
        return _own_mistake()


def _own_mistake() -> Status:
    traceback.print_exc()
    messages.complain("this is a mistake of the suite, not of the implementation; please report the lines above")
    return Status.SUITE


def _stop(signum: int, frame: FrameType | None) -> None:
    raise Stopped(signum)
