"""Writes the run file while the run goes on: header, cases, notes, and finally the certificate."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import fsdp_conformance
from fsdp_conformance import codec
from fsdp_conformance.contract.fingerprint import suite_sha256
from fsdp_conformance.contract.profile import INTERPRETATION, Profile
from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.report.certificate import Certificate, certify
from fsdp_conformance.report.run_content import Resume, RunFile
from fsdp_conformance.report.runfile import NAME, RunFileWriter, read
from fsdp_conformance.run_settings import RunSettings

#: The line of torch/version.py.
_STATED = re.compile(r"^__version__ = ['\"](.+)['\"]$", re.MULTILINE)


class Recorder:
    """
    Writes one run file, or with `resumed` the rest of the one in the directory.

    Raises EnvironmentUnavailable if the file cannot be written; what was written before stays intact.
    """

    def __init__(
        self,
        settings: RunSettings,
        profile: Profile,
        description: Mapping[str, Any],
        directory: Path,
        *,
        resumed: bool = False,
    ) -> None:
        self.settings = settings
        self.profile = profile
        self.directory = directory
        self._began = time.monotonic()
        self._earlier_s = _seconds_of(read(directory), directory / NAME) if resumed else 0.0
        self._writer = RunFileWriter(directory, resumed=resumed)
        self._open: dict[str, int] = {}
        self._noted: set[str] = set()
        if resumed:
            now = datetime.now(UTC).isoformat(timespec="seconds")
            self._writer.resume(Resume(at=now, seconds=round(self._earlier_s, 3)))
            return
        self._writer.header(
            {
                "suite": fsdp_conformance.__version__,
                "suite_sha256": suite_sha256(),
                "interpretation": INTERPRETATION,
                "profile": {"name": profile.name, "sha256": profile.sha256, "cases": len(profile.entries)},
                "implementation": dict(description),
                "environment": environment(settings.device),
                "settings": codec.plain(settings),
                "started": datetime.now(UTC).isoformat(timespec="seconds"),
            }
        )

    @property
    def path(self) -> Path:
        """The run file."""
        return self._writer.path

    @property
    def seconds(self) -> float:
        """How long the run took so far, without the time between its parts."""
        return self._earlier_s + time.monotonic() - self._began

    def start(self, case: str, *, world_size: int, worker: str = "") -> None:
        """Record that a case starts."""
        self._open[case] = world_size
        self._writer.start(case, world_size=world_size, worker=worker)

    def case(self, record: CaseRecord) -> None:
        """Record the verdict on a case."""
        self._open.pop(record.case, None)
        self._writer.case(record)

    def note(self, text: str, *, refuses: bool = False) -> None:
        """Record something that a reader of the certificate should know, once."""
        if text not in self._noted:
            self._noted.add(text)
            self._writer.note(text, refuses=refuses)

    def finish(self) -> Certificate:
        """Write the footer. The certificate is derived from the file alone, as `verify` does it."""
        run = read(self.path)
        certificate = certify(run, self.profile)
        self._writer.footer(
            {
                "finished": datetime.now(UTC).isoformat(timespec="seconds"),
                "seconds": round(self.seconds, 3),
                "counts": certificate.counts,
                "references": run.reference_counts(),
                "certificate": certificate.to_json(),
            }
        )
        return certificate

    def abort(self) -> None:
        """Write nothing more. A run file without a footer belongs to a run that was aborted."""
        self._writer.close()


def _seconds_of(run: RunFile, path: Path) -> float:
    """How long a run that was ended had taken: from its start to its last line, without what lies between its parts."""
    earlier = run.parts[-1] if run.parts else None
    began = datetime.fromisoformat(earlier.at if earlier is not None else str(run.header["started"]))
    ended = datetime.fromtimestamp(path.stat().st_mtime, UTC)
    return (earlier.seconds if earlier is not None else 0.0) + max(0.0, (ended - began).total_seconds())


def environment(device: str) -> dict[str, Any]:
    """The machine and the versions, as far as they are known without importing torch."""
    return {
        "torch": version_of("torch"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": usable_cores(),
        "device": device,
        "executable": sys.executable,
    }


def usable_cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def version_of(package: str) -> str:
    """
    The installed version, or "absent".

    torch's is `torch.__version__`, which ranks report, but torch is not imported: a build from PyPI calls itself
    2.13.0+cu130, and its metadata say 2.13.0.
    """
    try:
        if package == "torch":
            return _version_of_torch() or metadata.version(package)
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def _version_of_torch() -> str | None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    stated = _STATED.search(text)
    return stated[1] if stated else None
