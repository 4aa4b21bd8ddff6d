"""What `ci/mutation` does: run mutmut on the groups of `ci/mutation.toml`, and look for unexplained survivors."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

#: What mutmut calls a change that no test has noticed.
_UNNOTICED = ("survived", "no tests")
_RESULT = re.compile(r"^\s*(?P<name>\S+): (?P<status>[a-z ]+)$")

#: A group may take this long. A change can make a loop endless, and mutmut gives each its own, shorter deadline.
_DEADLINE_S = 4 * 3600


@dataclass(frozen=True, slots=True)
class Survivor:
    """A change that no test noticed."""

    function: str
    """Module and function, without mutmut's decoration."""
    before: str
    after: str
    """The lines that differ, without indentation."""

    def __str__(self) -> str:
        return f"{self.function}\n    - {self.before}\n    + {self.after}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the groups. Exit status 0, or 1 for survivors without an explanation or explanations without a survivor."""
    groups, explained = _read(ROOT / "ci/mutation.toml")
    parser = argparse.ArgumentParser(prog="ci/mutation")
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(groups)}; default: all")
    parser.add_argument("--list", action="store_true", help="list the groups and what they change")
    parser.add_argument("--tool", type=Path, required=True, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.groups) - groups.keys())
    if unknown:
        parser.error(f"group must be one of {', '.join(groups)}, got {', '.join(unknown)}")
    if options.list:
        for name, group in groups.items():
            print(f"{name:<14} {' '.join(group['change'])}")
        return 0
    status = 0
    for name in options.groups or groups:
        survivors, counts = _run(groups[name], options.tool)
        known = {item for item in explained if item.function.startswith(tuple(_modules(groups[name])))}
        missing = [item for item in survivors if item not in known]
        stale = sorted(known - set(survivors), key=str)
        told = ", ".join(f"{count} {word}" for word, count in sorted(counts.items()))
        print(f"{name}: {sum(counts.values())} changes: {told}; {len(survivors) - len(missing)} survivors explained")
        for item in missing:
            print(f"  not explained: {item}")
        for item in stale:
            print(f"  explained, but noticed or gone: {item}")
        status |= bool(missing or stale)
    return status


def _read(path: Path) -> tuple[dict[str, dict[str, Any]], set[Survivor]]:
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    explained = {
        Survivor(item["function"], item["before"], item["after"]) for item in data.get("explained", ()) if item["why"]
    }
    return data["group"], explained


def _modules(group: dict[str, Any]) -> list[str]:
    return [path.removesuffix(".py").replace("/", ".") + "." for path in group["change"]]


def _run(group: dict[str, Any], tool: Path) -> tuple[list[Survivor], Counter[str]]:
    """Change the group's files in a copy of the checkout; the survivors, and how many changes ended how."""
    with tempfile.TemporaryDirectory(prefix="fsdp-conformance-mutation-") as name:
        copy = Path(name, "checkout")
        _copy_checkout(copy)
        with (copy / "pyproject.toml").open("a", encoding="utf-8") as file:
            file.write(_configuration(group))
        environment = {**os.environ, "PYTHONPATH": str(tool)}

        def mutmut(*words: str) -> str:
            done = subprocess.run(
                [sys.executable, "-m", "mutmut", *words],
                cwd=copy,
                env=environment,
                capture_output=True,
                text=True,
                timeout=_DEADLINE_S,
                check=False,
            )
            if done.returncode:
                raise SystemExit(f"mutmut {' '.join(words)} ended with {done.returncode}:\n{done.stdout[-4000:]}")
            return done.stdout

        mutmut("run", "--max-children", str(os.cpu_count() or 1))
        results = [_RESULT.match(line) for line in mutmut("results", "--all", "true").splitlines()]
        statuses = {found["name"]: found["status"] for found in results if found is not None}
        unnoticed = [change for change, status in statuses.items() if status in _UNNOTICED]
        return [_survivor(change, mutmut("show", change)) for change in unnoticed], Counter(statuses.values())


def _copy_checkout(target: Path) -> None:
    """The files that git tracks, and new ones that it does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        timeout=60,
    )
    for path in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / path).exists():
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, target / path, follow_symlinks=False)


def _configuration(group: dict[str, Any]) -> str:
    """The table that mutmut reads."""
    return f"""
[tool.mutmut]
source_paths = ["fsdp_conformance"]
only_mutate = {json.dumps(group["change"])}
also_copy = {json.dumps([path.name for path in ROOT.iterdir() if path.name in ("ci", "docs", "fixtures", "suites")])}
pytest_add_cli_args = ["-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow and not nightly"]
pytest_add_cli_args_test_selection = {json.dumps(group["tests"])}
track_dependencies = false
"""


def _survivor(change: str, shown: str) -> Survivor:
    """The change as mutmut shows it, in a form that outlives its numbering."""
    lines = [line for line in shown.splitlines() if line[:1] in "+-" and line[:3] not in ("---", "+++")]
    before, after = (" ".join(line[1:].strip() for line in lines if line.startswith(sign)) for sign in "-+")
    function = re.sub(r"__mutmut_\d+$", "", change).replace(".x_", ".", 1)
    return Survivor(function, before, after)


if __name__ == "__main__":
    sys.exit(main())
