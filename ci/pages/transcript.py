"""
The commands of a page, run one after the other in a directory that has the page's files, and what they print.

Numbers, times and paths differ from one run to the next, so a quotation is compared without them.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pages.blocks import ROOT, Block, Command, blocks_of

#: For one command, on a machine that does other work as well.
DEADLINE_S = 400.0

#: The programs that a page may run, with the modules that are run in their place.
MODULES = {"fsdp-conformance": "fsdp_conformance", "pytest": "pytest"}

#: Words of a comment that give a block a file.
FILES = ("file", "adapter", "script")


@dataclass(frozen=True, slots=True)
class Ran:
    """A command that was run, and the block it stands in."""

    block: Block
    command: Command
    status: int
    expected_status: int
    output: str
    quoted: str
    """The output that the page quotes."""

    def problem(self) -> str:
        """The difference from the page; empty if there is none."""
        where = f"{self.block.place}: $ {self.command.line}"
        if self.status != self.expected_status:
            return f"{where}\nexit status: expected {self.expected_status}, got {self.status}\n{self.output}"
        if not same_output(self.quoted, self.output):
            return f"{where}\nprints something else now (ci/docs --write updates the page):\n{self.output}"
        return ""


def write_files(page: str, directory: Path) -> None:
    """Every file that a block of the page is."""
    for block in blocks_of(page):
        if block.word in FILES:
            name = block.said.partition(":")[0]
            (directory / name).write_text(block.text, encoding="utf-8")


def apply_change(block: Block, directory: Path) -> None:
    """Change a file as a block of differences says. Raises ValueError unless the old lines are there exactly once."""
    file = directory / block.said
    lines = block.text.splitlines(keepends=True)
    # The space of an empty line is gone.
    lines = [line if line.strip() else " \n" for line in lines]
    old = "".join(line[1:] for line in lines if line[0] in " -")
    new = "".join(line[1:] for line in lines if line[0] in " +")
    text = file.read_text(encoding="utf-8")
    if text.count(old) != 1:
        raise ValueError(f"{block.place}: the old lines must stand in {block.said} once, got {text.count(old)} times")
    file.write_text(text.replace(old, new), encoding="utf-8")


def is_run(block: Block) -> bool:
    """True if the commands of a block are run here."""
    return block.language == "console" and block.word in ("", "status")


def run_page(page: str, directory: Path) -> Iterator[Ran]:
    """Run the commands of a page, and its scripts, in order, in a directory that is empty."""
    write_files(page, directory)
    blocks = blocks_of(page)
    for block in blocks:
        if block.word == "change":
            apply_change(block, directory)
        elif is_run(block):
            expected = int(block.said) if block.word == "status" else 0
            for number, command in enumerate(block.commands()):
                # The status of a block is that of its last command.
                expected_status = expected if number == len(block.commands()) - 1 else 0
                program, *arguments = command.words()
                status, output = _run([sys.executable, "-m", MODULES[program], *arguments], directory)
                yield Ran(block, command, status, expected_status, output, command.quoted)
    scripts = [block for block in blocks if block.word == "script"]
    if scripts:
        yield from _run_scripts(scripts, blocks, directory)


def _run_scripts(scripts: list[Block], blocks: list[Block], directory: Path) -> Iterator[Ran]:
    """All scripts of a page in one process: what takes time is the import of torch."""
    names = [block.said for block in scripts]
    status, output = _run([sys.executable, "-c", _SCRIPTS, *names], directory)
    printed = output.split(_NEXT)[1:]
    for block, text in zip(scripts, [*printed, *[output] * (len(scripts) - len(printed))], strict=True):
        quoted = next((other.text for other in blocks if other.word == "output" and other.said == block.said), "")
        command = Command(line=f"python {block.said}", quoted=quoted)
        yield Ran(block, command, status, 0, text, quoted)


_NEXT = "\x1e"
_SCRIPTS = f"""
import runpy, sys

for name in sys.argv[1:]:
    print({_NEXT!r}, end="", flush=True)
    runpy.run_path(name, run_name="__main__")
    sys.stdout.flush()
"""


def _run(words: list[str], directory: Path) -> tuple[int, str]:
    done = subprocess.run(
        words,
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        timeout=DEADLINE_S,
        check=False,
    )
    return done.returncode, done.stdout


def same_output(quoted: str, output: str) -> bool:
    """True if an output is the one quoted, apart from numbers; `...` in the quotation stands for any lines."""
    if not quoted.strip():
        return True
    pattern = " "
    for number, part in enumerate(re.split(r"^[ ]*\.\.\.$", quoted, flags=re.MULTILINE)):
        words = normal(part)
        pattern += "(?:.* )?" if number else ""
        pattern += re.escape(" ".join(words)) + " " if words else ""
    return re.fullmatch(pattern, " " + " ".join(normal(output)) + " ") is not None


def settled(text: str) -> str:
    """An output without the lines that only a slow or a fresh machine prints, and without this checkout's path."""
    text = re.sub(r"^[ ]+\.\.\. \d+/\d+ cases .*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^building the simulated accelerator.*\n(built in .*\n)?", "", text, flags=re.MULTILINE)
    return text.replace(str(ROOT) + "/", "")


def normal(text: str) -> list[str]:
    """The words of an output, without numbers: times, hashes and versions differ from run to run."""
    text = re.sub(r"\d+\.\d+\.\d+\+\w+", "#", settled(text))
    text = re.sub(r"\d+ min( \d+ s)?(?!\w)", "# s", text)
    text = re.sub(r"\b[0-9a-f]{40,}\b", "#", text)
    text = re.sub(r"\d[\d.,]*(e[+-]?\d+)?", "#", text)
    return text.split()
