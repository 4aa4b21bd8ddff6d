"""The directory of a run: making it, and finding the run file in it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from fsdp_conformance.errors import EnvironmentUnavailable, RunFileError
from fsdp_conformance.report import runfile
from fsdp_conformance.report.last_run import DEFAULT_ROOT, make_root

#: A run may write this much at once; a disk with less room is full.
_PROBE_BYTES = 1 << 18


def prepare(path: Path) -> None:
    """
    Make the directory, and check that it can be written. The file of an earlier run there is renamed.

    Raises EnvironmentUnavailable if it cannot be written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        if path.parent == DEFAULT_ROOT:
            make_root()
    except OSError as error:
        raise _unwritable(path, error) from error
    # A run that ends before it has written its file must not take this one for it.
    try:
        runfile.set_aside(path)
    except OSError as error:
        raise _unwritable(path, error) from error
    problem = room_problem(path)
    if problem is not None:
        raise _unwritable(path, problem)


def room_problem(path: Path) -> OSError | None:
    """Why the directory cannot be written, or None."""
    probe = path / f".probe-{os.getpid()}"
    try:
        with probe.open("wb") as file:
            file.write(b"\0" * _PROBE_BYTES)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
    return None


def write_text(path: Path, text: str, *, option: str) -> None:
    """Write a file that the user named with an option. Raises EnvironmentUnavailable if that cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise EnvironmentUnavailable(
            f"{path} cannot be written: {error.strerror or error}. Choose another file with {option}."
        ) from error


def named_run(path: str) -> Path:
    """The run file at a path, or in the directory there. Raises RunFileError if there is none."""
    file = Path(path)
    file = file / runfile.NAME if file.is_dir() else file
    if not file.is_file():
        raise RunFileError(f"expected a run file, or a directory with a {runfile.NAME}, got {path!r}")
    return file


def _unwritable(path: Path, error: OSError) -> EnvironmentUnavailable:
    return EnvironmentUnavailable(
        f"the report directory {path} cannot be written: {error.strerror or error}. "
        "Free some space, or choose another directory with --report."
    )
