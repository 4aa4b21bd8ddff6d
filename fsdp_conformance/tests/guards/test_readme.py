"""Guard: what the READMEs say is so: the adapter loads, tables are complete, paths and commands exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

from fsdp_conformance import errors
from fsdp_conformance.cli import arguments
from fsdp_conformance.tests.guards import checkout
from fsdp_conformance.tests.guards.checkout import ROOT
from fsdp_conformance.verdict import Verdict

pytestmark = checkout.required

#: What the project promises of an adapter for an engine with a torch-like API.
MAX_ADAPTER_LINES = 25


#: Texts for users.
PAGES = ("README.md", "docs/simulated-accelerator.md")


def readme() -> str:
    """The text."""
    return (ROOT / "README.md").read_text(encoding="utf-8")


def pages() -> str:
    """All texts for users."""
    return "".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language, in order."""
    return [
        textwrap.dedent(found)
        for found in re.findall(rf"^ *```{language}\n(.*?)^ *```", readme(), re.DOTALL | re.MULTILINE)
    ]


def test_the_adapter_is_short_and_loads(tmp_path: Path) -> None:
    """The README's adapter is a whole file of at most 25 lines, which the registry loads and describes."""
    source = next(block for block in blocks("python") if "class MyFSDP" in block)
    file = tmp_path / "my_adapter.py"
    file.write_text(source, encoding="utf-8")
    # In a process of its own: this one should not keep the class.
    script = "import sys; from fsdp_conformance.adapters import registry; print(*registry.load(sys.argv[1]).declared())"
    done = subprocess.run(
        [sys.executable, "-c", script, f"{file}:MyFSDP"], capture_output=True, text=True, check=True, timeout=240
    )

    assert len([line for line in source.splitlines() if line.strip()]) <= MAX_ADAPTER_LINES
    assert {"zero3", "init_never", "cpu_compute"} <= set(done.stdout.split())


def test_every_verdict_is_explained() -> None:
    """The table of verdicts has each of the twelve."""
    section = readme().partition("## What a verdict means")[2].partition("\n## ")[0]

    assert {
        verdict for verdict in Verdict if not re.search(rf"^\|.*\b{verdict}\b.*\|.*\|$", section, re.MULTILINE)
    } == set()


def test_the_exit_statuses_are_those_of_the_errors() -> None:
    """Each exit status that an error carries has a row, and 0."""
    statuses = {
        value.exit_status
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, errors.ConformanceError)
    }
    section = readme().partition("## Exit statuses")[2].partition("\n## ")[0]

    assert {int(row) for row in re.findall(r"^\| (\d) \|", section, re.MULTILINE)} == statuses | {0}


def test_every_command_can_be_parsed() -> None:
    """Each `fsdp-conformance` command line in the text is one that the command takes."""
    lines = re.findall(r"(?:\$ |`)fsdp-conformance ([^`\n]+)", pages())
    for line in lines:
        assert arguments.parse(shlex.split(line)).command in line

    assert len(lines) > 3


def test_every_path_exists() -> None:
    """Paths in backquotes that belong to the checkout are there."""
    named = set(re.findall(r"`((?:ci|suites|fixtures|fsdp_conformance)/[\w./-]*)", pages()))

    assert named != set()
    assert sorted(name for name in named if not (ROOT / name).exists()) == []
