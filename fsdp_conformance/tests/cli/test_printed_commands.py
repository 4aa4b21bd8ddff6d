"""
Every command that an output prints is complete: pasted into a shell in the same directory, it does what is promised.

From each way of running: with and without --report, under --stress, with another engine in between, interrupted, from
`explore`, from a user's own tests.
"""

from __future__ import annotations

import html
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fsdp_conformance.tests.cli.cli_runs import Said, said, words

#: Each run has ranks, and each of its commands is run.
pytestmark = [pytest.mark.slow, pytest.mark.nightly]

CASE = "R003/every-rank-contributes-once-ws2"
ENGINE = """
from fsdp_conformance.mutants.gradients import NoReduction


class Mine(NoReduction):
    name = "no-reduction"
"""
TESTS = """
from fsdp_conformance.pytest_plugin.embedded import conformance_tests

TestMine = conformance_tests({spec!r}, cases=[{case!r}])
"""

_COMMAND = re.compile(r"(?:^|\s)((?:fsdp-conformance [a-z]|python -m pytest ).+)$", re.MULTILINE)


@pytest.fixture(name="place")
def _place(tmp_path: Path) -> Path:
    """A directory with a space in its name, and with an engine that reduces no gradients."""
    place = tmp_path / "my project"
    place.mkdir()
    (place / "my engine.py").write_text(ENGINE, encoding="utf-8")
    return place


def commands_in(text: str) -> list[str]:
    """The commands that a text shows, each on a line of its own."""
    return list(dict.fromkeys(match[1].strip() for match in _COMMAND.finditer(text)))


def pasted(command: str, place: Path) -> Said:
    """The result of a command as a shell runs it."""
    program, *rest = shlex.split(command)
    if program == "fsdp-conformance":
        return said(*rest, cwd=place, timeout_s=300)
    done = subprocess.run(
        [sys.executable, *rest],
        cwd=place,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=300,
        check=False,
    )
    return Said(done.returncode, done.stdout, done.stderr)


def assert_each_works(text: str, place: Path, *expected: str) -> None:
    """Each command in a text shows the failure again; together they are the `expected` ones."""
    commands = commands_in(text)
    assert sorted({shlex.split(command)[1] for command in commands}) == sorted(expected), commands
    for command in commands:
        result = pasted(command, place)
        fine = 0 if " explain " in command else 1
        assert result.status == fine, (command, result.output)
        assert "not reduced" in result.output, (command, result.output)
        assert "no-reduction" in result.output or "my engine.py" in result.output, (command, result.output)


@pytest.mark.parametrize(
    "options", [(), ("--report", "the results"), ("--stress", "--stress-seed", "3"), ("--profile", "quick")]
)
def test_commands_of_a_run(place: Path, options: tuple[str, ...]) -> None:
    """Also after another engine has run there: what is explained is named, and is that run."""
    result = said("run", "--implementation", "my engine.py:Mine", "--no-smoke", "--case", CASE, *options, cwd=place)
    said("run", "--implementation", "reference", "--no-smoke", "--case", CASE, cwd=place)

    assert result.status == 1, result.output
    assert_each_works(result.out, place, "explain", "run", "debug")


def test_commands_in_files_of_a_run(place: Path) -> None:
    """The page, the summary and the formats show the same commands as the terminal."""
    options = ("--implementation", "my engine.py:Mine", "--no-smoke", "--case", CASE, "--report", "the results")
    shown = commands_in(said("run", *options, cwd=place).out)
    page = html.unescape(re.sub(r"<[^>]+>", "\n", (place / "the results/report.html").read_text(encoding="utf-8")))
    texts = [page, (place / "the results/summary.md").read_text(encoding="utf-8")]
    texts += [said("export", "the results", "--format", name, cwd=place).out for name in ("junit", "markdown")]

    for text in texts:
        missing = [command for command in shown if command not in html.unescape(text)]
        assert not missing, text


def test_the_command_after_an_interrupt(place: Path) -> None:
    """It goes on where the run was ended."""
    options = ("run", "--implementation", "my engine.py:Mine", "--no-smoke", "--chapter", "L")
    process = subprocess.Popen(
        words(*options),
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 120
        link = place / ".fsdp-conformance/last/run.jsonl"
        while not (link.exists() and '"type":"case"' in link.read_text(encoding="utf-8")):
            assert time.monotonic() < deadline, "no case has ended"
            threading.Event().wait(0.1)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    (command,) = [command for command in commands_in(output) if "--resume" in command]
    result = pasted(command, place)

    assert process.returncode == 130
    assert "(--resume)" in result.output, result.output
    assert re.search(r"\b9 of \d+ cases reported", result.out), result.out


def test_commands_of_explore(place: Path) -> None:
    """The scenario is no case of a suite: its command runs the file that was saved."""
    options = ("--implementation", "my engine.py:Mine", "--max-examples", "1", "--seed", "1", "--save", "found")
    result = said("explore", *options, cwd=place, timeout_s=300)

    assert result.status == 1, result.output
    assert_each_works(result.out, place, "-m")


def test_commands_of_a_users_own_tests(place: Path) -> None:
    """They write no run file, so nothing refers to one."""
    (place / "test_mine.py").write_text(TESTS.format(spec="my engine.py:Mine", case=CASE), encoding="utf-8")
    result = pasted("python -m pytest -q -p no:cacheprovider test_mine.py", place)

    assert result.status == 1, result.output
    assert_each_works("\n".join(line[4:] for line in result.out.splitlines()), place, "run", "debug")
