"""The directory of a run: whether it can be written, and which run file is meant."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from fsdp_conformance.errors import EnvironmentUnavailable, RunFileError
from fsdp_conformance.report import runfile
from fsdp_conformance.report.recorder import DEFAULT_ROOT, LAST

#: A run writes more than this at once; less room than that is none.
_PROBE_BYTES = 1 << 18


def prepare(path: Path) -> None:
    """
    Make the directory, and see that it can be written. The file of an earlier run there is kept, under another name.

    Raises EnvironmentUnavailable if not.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        if path.parent == DEFAULT_ROOT:
            # What runs leave behind is nobody's source.
            (DEFAULT_ROOT / ".gitignore").write_text("*\n", encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, error) from error
    # A run that ends before it has a file of its own must not find this one, and take it for its own.
    with contextlib.suppress(FileNotFoundError):
        (path / runfile.NAME).replace(path / runfile.PREVIOUS)
    problem = room_problem(path)
    if problem is not None:
        raise _unwritable(path, problem)


def room_problem(path: Path) -> OSError | None:
    """Why nothing can be written to the directory, or None."""
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


def last_run() -> Path | None:
    """The run file of the newest run below the working directory, if there is one."""
    path = DEFAULT_ROOT / LAST / runfile.NAME
    return path if path.exists() else None


def named_run(path: str) -> Path:
    """The run file at a path that was typed, or in the directory there. Raises RunFileError if there is none."""
    found = Path(path)
    found = found / runfile.NAME if found.is_dir() else found
    if not found.is_file():
        raise RunFileError(f"{path!r} is no run file, but should be one, or a directory with a {runfile.NAME}")
    return found


def _unwritable(path: Path, error: OSError) -> EnvironmentUnavailable:
    return EnvironmentUnavailable(
        f"the report directory {path} cannot be written: {error.strerror or error}. "
        "Free some space, or choose another directory with --report."
    )
