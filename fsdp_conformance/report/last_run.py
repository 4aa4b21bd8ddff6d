"""Where runs leave their files, and what the last run found."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from fsdp_conformance.errors import RunFileError, UsageError
from fsdp_conformance.report import runfile
from fsdp_conformance.report.run_content import RunFile
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.verdict import FINE

#: Where run files go by default, below the working directory.
DEFAULT_ROOT = Path(".fsdp-conformance")

#: A link to the last run's directory.
LAST = "last"


def report_directory(settings: RunSettings, *, now: datetime | None = None) -> Path:
    """
    The directory of a run: the one asked for, else `.fsdp-conformance/IMPLEMENTATION-TIME`.

    Not created here.
    """
    if settings.report_dir:
        return Path(settings.report_dir)
    moment = (now or datetime.now(UTC)).strftime("%Y%m%dT%H%M%SZ")
    name = "".join(char if char.isalnum() or char in "-." else "_" for char in settings.implementation)
    return DEFAULT_ROOT / f"{name}-{moment}-{os.getpid()}"


def make_root() -> None:
    """Make `.fsdp-conformance` in the working directory, if it is not there. Raises OSError if it cannot be made."""
    DEFAULT_ROOT.mkdir(parents=True, exist_ok=True)
    # Run files do not belong into a repository.
    (DEFAULT_ROOT / ".gitignore").write_text("*\n", encoding="utf-8")


def remember(directory: Path) -> None:
    """
    Point the link `last` in the working directory's `.fsdp-conformance` to the directory of a run, wherever that is.

    Where no link can be made, the run is not remembered.
    """
    fresh = DEFAULT_ROOT / f".{LAST}-{os.getpid()}"
    try:
        make_root()
        fresh.symlink_to(os.path.relpath(directory, DEFAULT_ROOT), target_is_directory=True)
        fresh.replace(DEFAULT_ROOT / LAST)
    except OSError:
        fresh.unlink(missing_ok=True)


def last_run() -> Path | None:
    """The run file of the last run in the working directory, if there is one; not by way of the link, which moves."""
    path = DEFAULT_ROOT / LAST / runfile.NAME
    return Path(os.path.relpath(path.resolve())) if path.exists() else None


def last_run_of(settings: RunSettings) -> RunFile | None:
    """The last run, if it was of the same implementation on the same device and kind of ranks."""
    path = last_run()
    if path is None:
        return None
    try:
        run = runfile.read(path)
    except RunFileError:
        return None
    recorded = run.header.get("settings") or {}
    same = all(recorded.get(name) == getattr(settings, name) for name in ("implementation", "device", "ranks"))
    return run if same else None


def with_last_failed(settings: RunSettings) -> RunSettings:
    """
    The settings, narrowed down to the cases that failed in the last run, or were under way when it ended.

    Raises UsageError if there was no run of this implementation, or if none of its cases failed.
    """
    path = last_run()
    if path is None:
        where = DEFAULT_ROOT / LAST / runfile.NAME
        raise UsageError(f"--last-failed needs an earlier run, but {where} does not exist. Run without it first.")
    run = runfile.read(path)
    implementation = (run.header.get("settings") or {}).get("implementation")
    if implementation != settings.implementation:
        raise UsageError(
            f"--last-failed needs a run of {settings.implementation}, but the last one was of {implementation} [{path}]"
        )
    failed = [record.case for record in run.records if record.verdict not in FINE]
    failed += run.unfinished()
    if not failed:
        raise UsageError(f"--last-failed has nothing to run: no case failed in the last run [{path}]")
    return replace(settings, last_failed=tuple(failed))
