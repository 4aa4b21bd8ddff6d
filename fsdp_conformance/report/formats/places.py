"""The place in a repository at which a failing case is shown: code hosts drop results that have none."""

from __future__ import annotations

from pathlib import Path

from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.report.run_content import RunFile
from fsdp_conformance.stack import engine_frames, frames_of_traceback


def place_of(record: CaseRecord, run: RunFile) -> tuple[str, int]:
    """
    A file and a line: of the engine where it raised, else of the adapter, else of the run file.

    Installed packages are not part of the repository. A run of a bundled adapter has nothing but its run file.
    """
    for frame in engine_frames(frames_of_traceback(record.traceback)):
        file = relative(frame.file)
        if file is not None:
            return file, int(frame.line)
    spec = str((run.header.get("implementation") or {}).get("spec") or "")
    file = relative(spec.rpartition(":")[0]) if ".py:" in spec else None
    return file or relative(run.path) or Path(run.path).name, 1


def relative(file: str) -> str | None:
    """The path below the working directory, with slashes; None for any other file."""
    path = Path(file)
    if path.is_absolute():
        try:
            path = path.relative_to(Path.cwd())
        except ValueError:
            return None
    inside = ".." not in path.parts and not any(part in ("site-packages", "dist-packages") for part in path.parts)
    return path.as_posix() if inside else None
