"""
Scripts that show a defect of an engine without this package: see ci/findings/README.md and ci/findings/run.

A script whose defect shows prints WRONG and exits with 1, otherwise it prints right and exits with 0. Both are asked
for, because torchrun exits with 1 for every failure of a rank, an exception included.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "ci/findings"
DEADLINE_S = 300.0
#: Folders of engines that have their own environment, named after their package, and the NAME of ci/setup NAME.
OTHER_ENGINES = {
    "deepspeed": "deepspeed",
    "fairscale": "fairscale",
    "megatron_fsdp": "megatron",
    "torchtitan": "simplefsdp",
    "accelerate": "accelerate",
    "lightning_fabric": "lightning",
    "colossalai": "colossalai",
}
#: Lines of output that are shown of a script that ended otherwise.
LAST_LINES = 8

_RUN = re.compile(r"^Run: ((?:torchrun --nproc-per-node \d+|python) (\S+))$", re.MULTILINE)
_TORCH = re.compile(r"^Torch: (\S+)$", re.MULTILINE)
_NEEDS = re.compile(r"^Needs: an accelerator$", re.MULTILINE)
_UPSTREAM = re.compile(r"^Upstream: (\S.*)", re.MULTILINE | re.DOTALL)


class Outcome(StrEnum):
    """The result of running a script."""

    WRONG = "wrong as expected"
    RIGHT = "right: fixed?"
    FIXED = "right, as expected with this version of torch"
    OTHERWISE = "ended otherwise"
    ABSENT = "not run: its engine is not installed here"
    NO_ACCELERATOR = "not run: it needs an accelerator"


@dataclass(frozen=True, slots=True)
class Script:
    """The facts that a script states in its docstring."""

    path: Path
    command: str
    """As a person types it from the root of the checkout; empty if the docstring has no such line."""
    target: str
    """The path in the command."""
    upstream: str
    needs_accelerator: bool = False
    torch: str = ""
    """The versions of torch that have the defect, as a specifier; empty for all."""


def read_script(path: Path) -> Script:
    """Read the facts from the docstring of a script."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    run, upstream, torch = _RUN.search(text), _UPSTREAM.search(text), _TORCH.search(text)
    return Script(
        path,
        command=run[1] if run else "",
        target=run[2] if run else "",
        upstream=upstream[1] if upstream else "",
        needs_accelerator=_NEEDS.search(text) is not None,
        torch=torch[1] if torch else "",
    )


def scripts(folder: Path = FOLDER) -> list[Path]:
    """Every script, by engine and name."""
    return sorted(folder.glob("*/*.py"))


def run_script(script: Script, *, root: Path = ROOT, deadline_s: float = DEADLINE_S) -> tuple[Outcome, str]:
    """Run the script's command from `root`: the outcome, and what it printed."""
    python = python_for(script.path.parent.name, root)
    if python is None:
        return Outcome.ABSENT, ""
    if not script.command:
        return (
            Outcome.OTHERWISE,
            "its docstring has no line `Run: torchrun --nproc-per-node N PATH` or `Run: python PATH`",
        )
    if script.needs_accelerator and not _has_accelerator():
        return Outcome.NO_ACCELERATOR, ""
    program, *arguments = shlex.split(script.command)
    # The programs of this environment, whatever PATH has.
    module = ["-m", "torch.distributed.run"] if program == "torchrun" else []
    # torchrun leaves a directory behind, and a script that is ended leaves what it has: all of it goes with this one.
    with tempfile.TemporaryDirectory(prefix="finding-", ignore_cleanup_errors=True) as scratch:
        status, output = _run_command([python, *module, *arguments], root, scratch, deadline_s)
    if status is None:
        return Outcome.OTHERWISE, f"{output}\nnot finished after {deadline_s:.0f} s"
    outcome = outcome_of(status, output)
    if script.torch and outcome in (Outcome.RIGHT, Outcome.WRONG) and not _has_torch(python, script.torch):
        return (Outcome.FIXED if outcome is Outcome.RIGHT else Outcome.OTHERWISE), output
    return outcome, output


def _has_torch(python: str, versions: str) -> bool:
    """True if the torch of that Python is one of these versions."""
    program = "import importlib.metadata; print(importlib.metadata.version('torch'))"
    version = subprocess.run([python, "-c", program], check=True, capture_output=True, text=True).stdout.strip()
    return SpecifierSet(versions).contains(version, prereleases=True)


def python_for(engine: str, root: Path) -> str | None:
    """The Python that has the engine: this one, or that of the engine's environment; None if it is not installed."""
    if engine not in OTHER_ENGINES or importlib.util.find_spec(engine) is not None:
        return sys.executable
    own = root / f".venvs/{OTHER_ENGINES[engine]}/bin/python"
    return str(own) if own.exists() else None


def _run_command(command: Sequence[str], root: Path, scratch: str, deadline_s: float) -> tuple[int | None, str]:
    """The exit status of a command, None if it was ended at the deadline, and what it printed."""
    with subprocess.Popen(
        command,
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": scratch},
    ) as process:
        try:
            output, _ = process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            # Its ranks, too.
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return None, output
    return process.returncode, output


def _has_accelerator() -> bool:
    """True if torch sees an accelerator. Checked in a child process, so that this one does not need torch."""
    program = "import torch; raise SystemExit(not torch.accelerator.is_available())"
    return subprocess.run([sys.executable, "-c", program], check=False, stderr=subprocess.DEVNULL).returncode == 0


def outcome_of(status: int, output: str) -> Outcome:
    """The outcome, from the exit status and the output together."""
    answers = set(output.splitlines()) & {"WRONG", "right"}
    if status == 1 and answers == {"WRONG"}:
        return Outcome.WRONG
    if status == 0 and answers == {"right"}:
        return Outcome.RIGHT
    return Outcome.OTHERWISE


def main(arguments: Sequence[str], *, root: Path = ROOT) -> int:
    """The exit status for these arguments."""
    parser = argparse.ArgumentParser(prog="ci/findings/run", description="Run the scripts under ci/findings.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="a text in the path of the scripts to run")
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, metavar="S", help="seconds for each script")
    given = parser.parse_args(arguments)
    paths = scripts(root / "ci/findings")
    unknown = [name for name in given.names if not any(name in str(path.relative_to(root)) for path in paths)]
    if unknown or not paths:
        print(f"ci/findings/run: no script under ci/findings has {' or '.join(unknown)} in its path", file=sys.stderr)
        return 2
    outcomes = []
    for path in paths:
        place = str(path.relative_to(root))
        if given.names and not any(name in place for name in given.names):
            continue
        outcome, output = run_script(read_script(path), root=root, deadline_s=given.deadline)
        outcomes.append(outcome)
        print(f"{outcome}: {place}", flush=True)
        if outcome is Outcome.OTHERWISE:
            print(*(f"    {line}" for line in output.strip().splitlines()[-LAST_LINES:]), sep="\n", flush=True)
    shown = outcomes.count(Outcome.WRONG)
    absent = outcomes.count(Outcome.ABSENT) + outcomes.count(Outcome.NO_ACCELERATOR)
    fixed = outcomes.count(Outcome.FIXED)
    others = [f"{absent} not run"] * bool(absent) + [f"{fixed} of other versions of torch"] * bool(fixed)
    print(", ".join([f"findings: {shown} of {len(outcomes)} defects show", *others]))
    return int(shown < len(outcomes) - absent - fixed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
