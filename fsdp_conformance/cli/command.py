"""From the command line to an exit status: the only place that turns errors into messages and statuses."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence

from fsdp_conformance.cli import arguments, messages
from fsdp_conformance.cli.signals import Stopped, raised
from fsdp_conformance.errors import AdapterError, ConformanceError
from fsdp_conformance.status import Status

#: Commands that have nothing to do but print: to read only the beginning is no mistake.
_ONLY_PRINT = frozenset({"completion", "explain", "listing", "mutants"})

#: Characters of a path that is too long to be one.
_SHOWN_OF_A_PATH = 80


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
    with raised():
        return _run(parsed)


def _run(parsed: argparse.Namespace) -> int:
    try:
        handler = importlib.import_module(f"fsdp_conformance.cli.commands.{parsed.module}")
        return int(handler.main(parsed))
    except ConformanceError as error:
        messages.complain(error)
        # Before any case has run, a broken adapter is a usage error.
        return Status.USAGE if isinstance(error, AdapterError) else error.exit_status
    except KeyboardInterrupt as error:
        number = error.signum if isinstance(error, Stopped) else int(signal.SIGINT)
        messages.complain(f"interrupted by {signal.Signals(number).name}")
        return 128 + number
    except BrokenPipeError:
        # `| head` has closed stdout; keep the interpreter from complaining about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if parsed.module not in _ONLY_PRINT:
            messages.complain("stopped early, because the program that reads the output has exited")
        # Never 0, which would mean that everything has passed.
        return Status.CLOSED_PIPE
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            messages.complain(f"a path is too long: {str(error.filename)[:_SHOWN_OF_A_PATH]!r}...")
            return Status.USAGE
        if error.errno not in messages.DISK_ERRORS:
            return _own_mistake()
        messages.complain(f"{error.filename or 'a file'} cannot be written: {os.strerror(error.errno or errno.EIO)}")
        return Status.ENVIRONMENT
    except Exception:  # noqa: BLE001 - Python's own status would be 1, "not certified"
        return _own_mistake()


def _own_mistake() -> Status:
    traceback.print_exc()
    messages.complain(
        "internal error: a bug in the suite, not in the implementation; please report the traceback above"
    )
    return Status.SUITE
