"""
`sanitize` as a user runs it, with its output and the file that it wrote.

    sanitize        in this process: ranks of all runs are forked from one warm process, which imports torch once
    sanitize_alone  in its own process, with its own warm process: signals, temporary files, exit status
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import json
import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fsdp_conformance.cli import main
from fsdp_conformance.cli.commands import sanitize as command
from fsdp_conformance.harness.processes.forkserver import WarmServer
from fsdp_conformance.script_ranks.launch import Say, ScriptLaunch, end_server, warm_server
from fsdp_conformance.simulator.checker.hazard import Site, hazard_from_json
from fsdp_conformance.simulator.device import build
from fsdp_conformance.simulator.sanitize.order import ScriptOrder
from fsdp_conformance.tests.cli.cli_runs import words

#: Where the training scripts are.
SCRIPTS = Path(__file__).parent / "scripts"

#: Where the simulated accelerator cannot be compiled, nothing of it can be shown.
needs_simulator = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))

#: For a run that takes seconds, on a machine with every core in use.
DEADLINE_S = 400.0


@dataclass(frozen=True, slots=True)
class Sanitized:
    """The result of a run."""

    status: int
    out: str
    err: str
    report: Mapping[str, Any]
    """The file of --json; empty if there is none."""
    cwd: Path

    @property
    def verdict(self) -> str:
        """The last line."""
        return self.out.rstrip().rpartition("\n")[2]

    @property
    def hazards(self) -> list[dict[str, Any]]:
        """As data."""
        return list(self.report.get("hazards", ()))

    def lines(self) -> list[tuple[str, str]]:
        """The lines of code that each hazard is about: where the first access was issued, and where the second."""
        hazards = [hazard_from_json(one) for one in self.hazards]
        return [(self._source_line(hazard.then.site), self._source_line(hazard.now.site)) for hazard in hazards]

    def _source_line(self, site: Site) -> str:
        """The line of a script that issued an access; empty if none did."""
        frame = site.innermost()
        path = self.cwd / frame.file if frame is not None else None
        if path is None or frame is None or not path.is_file():
            return ""
        return path.read_text(encoding="utf-8").splitlines()[frame.line - 1].strip()


def sanitize(*typed: str, cwd: Path, environment: Mapping[str, str] | None = None) -> Sanitized:
    """Run to the end; `typed` is everything after `sanitize`."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (environment or {}).items():
            patch.setenv(name, value)
        # As for `python -m`: scripts replace this entry by their own directory.
        patch.syspath_prepend(cwd)
        patch.setattr(command, "ScriptLaunch", _launch)
        with (
            contextlib.redirect_stdout(io.StringIO()) as out,
            contextlib.redirect_stderr(io.StringIO()) as err,
            contextlib.chdir(cwd),
        ):
            status = main(("sanitize", "--json", "found.json", *typed))
    return _result(status, out.getvalue(), err.getvalue(), cwd)


def _launch(order: ScriptOrder, say: Say) -> ScriptLaunch:
    return ScriptLaunch(order, say, server=_server(order.as_cuda))


@functools.cache
def _server(as_cuda: bool) -> WarmServer:
    """The warm process of all runs of this process."""
    server = warm_server(as_cuda=as_cuda)
    atexit.register(end_server, server)
    return server


def sanitize_alone(*typed: str, cwd: Path, environment: Mapping[str, str] | None = None) -> Sanitized:
    """As `sanitize`, in its own process."""
    process = subprocess.Popen(
        words("sanitize", "--json", "found.json", *typed),
        cwd=cwd,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        out, err = process.communicate(timeout=DEADLINE_S)
    except BaseException:
        # It ends its ranks; killed, it could not.
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=DEADLINE_S)
        raise
    return _result(process.returncode, out, err, cwd)


def _result(status: int, out: str, err: str, cwd: Path) -> Sanitized:
    file = cwd / "found.json"
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    file.unlink(missing_ok=True)
    return Sanitized(status, out, err, json.loads(text) if text else {}, cwd)


def written(directory: Path, text: str, name: str = "train.py") -> str:
    """A script of a test's own; its name."""
    (directory / name).write_text(text, encoding="utf-8")
    return name
