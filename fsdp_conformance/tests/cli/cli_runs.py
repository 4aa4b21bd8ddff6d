"""
The command line as a user types it: its exit status, and all that it printed.

    said        in its own process: signals, ranks, a terminal, the exit status of the process
    answered    in this process, for commands that start no rank: the same without the seconds that imports take
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdp_conformance.cli import main
from fsdp_conformance.tests import warm_interpreter

#: An adapter that loads no engine: enough to be described.
ADAPTER = """
from fsdp_conformance.adapters.torch_like import TorchAdapter


class Mine(TorchAdapter):
    name = "mine"
    capabilities = frozenset({"zero3"})

    def wrap(self, model, plan):
        return model
"""


#: Answers the survey without importing torch, which takes seconds; the request and its way stay as they are.
_QUICK = """
import sys, types


def answer_quickly():
    from fsdp_conformance import codec
    from fsdp_conformance.adapters import registry
    from fsdp_conformance.tests.report.evidence import DESCRIBED

    devices = types.ModuleType("fsdp_conformance.harness.devices")
    devices.backend_for = lambda device: "gloo"
    devices.device_count = lambda device: 2
    devices.is_scarce = lambda device: device != "cpu"
    devices.present_environments = lambda device: (frozenset({"gloo"}), None if device == "cpu" else 2)
    sys.modules[devices.__name__] = devices
    flags = ["cpu_compute", "no_sync", "zero3"]
    registry.describe_here = lambda spec: codec.typed(
        registry.AdapterDescription, {**DESCRIBED, "spec": spec, "capabilities": flags}
    )


if "fsdp_conformance.cli.jobs" in sys.orig_argv:
    from fsdp_conformance.cli import child

    def run_job(job, answer, arguments, run_job=child.run_job):
        if job == "survey":
            answer_quickly()
        run_job(job, answer, arguments)

    child.run_job = run_job
"""


@dataclass(frozen=True, slots=True)
class Said:
    """The result of a command."""

    status: int
    out: str
    err: str

    @property
    def last_line(self) -> str:
        """Of stdout."""
        return self.out.rstrip().rpartition("\n")[2]

    @property
    def output(self) -> str:
        """All that it printed."""
        return self.out + self.err


def words(*arguments: str) -> list[str]:
    """The command in a fresh interpreter."""
    return [sys.executable, "-m", "fsdp_conformance", *arguments]


def said(
    *arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout_s: float = 240.0
) -> Said:
    """Run the command to its end. A traceback is not an error message: it fails the test."""
    done = warm_interpreter.run(words(*arguments), cwd=cwd, env=env, timeout=timeout_s)
    assert "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
    return Said(done.returncode, done.stdout, done.stderr)


def answered(*arguments: str, cwd: Path | None = None) -> Said:
    """Run the command in this process. Here, too, a traceback fails the test."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
        contextlib.chdir(cwd or Path.cwd()),
    ):
        try:
            status = main(arguments)
        except SystemExit as ended:
            status = int(ended.code or 0)
    assert "Traceback" not in out.getvalue() + err.getvalue(), out.getvalue() + err.getvalue()
    return Said(status, out.getvalue(), err.getvalue())


def with_quick_survey(env: Mapping[str, str], directory: Path) -> dict[str, str]:
    """The variables of a command whose survey finds two devices of any type, and an adapter of any name."""
    place = directory / "quick"
    place.mkdir(exist_ok=True)
    # Python runs only the first file of that name.
    others = (Path(path, "sitecustomize.py") for path in env.get("PYTHONPATH", "").split(os.pathsep) if path)
    text = "\n".join([*(other.read_text(encoding="utf-8") for other in others if other.exists()), _QUICK])
    (place / "sitecustomize.py").write_text(text, encoding="utf-8")
    return {**env, "PYTHONPATH": os.pathsep.join([str(place), env.get("PYTHONPATH", "")])}


def with_adapter(directory: Path, text: str = ADAPTER, name: str = "my_adapter.py") -> str:
    """Write an adapter's file, and name it as `--implementation` does."""
    path = directory / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def children_of(pid: int) -> Sequence[int]:
    """Ids of a process's children."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
