"""ci/bench/run: what a benchmark must print, and two checkouts measured in one run."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_conformance.tests.guards import checkout
from fsdp_conformance.tests.guards.checkout import ROOT

pytestmark = [checkout.required, pytest.mark.nightly]


def made_checkout(directory: Path, figures: str) -> Path:
    """A checkout with one benchmark, `fake`, which prints the next of its figures each time it runs."""
    bench = directory / "ci/bench"
    bench.mkdir(parents=True)
    shutil.copy(ROOT / "ci/bench/run", bench / "run")
    (directory / "figures").write_text(figures, encoding="utf-8")
    (directory / "env/bin").mkdir(parents=True)
    (directory / "env/bin/python").symlink_to(sys.executable)
    setup = directory / "ci/setup"
    setup.write_text(f"#!/usr/bin/env bash\necho {directory}/env\n", encoding="utf-8")
    setup.chmod(0o755)
    (bench / "fake.py").write_text(
        '"""\nFakes a figure.\n"""\nimport pathlib\n'
        f"path = pathlib.Path({str(directory / 'figures')!r})\n"
        "first, *rest = path.read_text().split()\n"
        "path.write_text(' '.join(rest))\n"
        "print('a table')\nprint(f'fake: {first}')\n",
        encoding="utf-8",
    )
    return directory


def bench(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a checkout's ci/bench/run."""
    return subprocess.run(
        [directory / "ci/bench/run", *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def test_benchmarks_are_listed(tmp_path: Path) -> None:
    """Without arguments each benchmark is named, with the first line of its docstring."""
    assert bench(made_checkout(tmp_path / "one", "1")).stdout.split("\n")[0] == "fake             Fakes a figure."


def test_the_last_line_is_the_figure(tmp_path: Path) -> None:
    """The benchmark's output comes through unchanged."""
    assert bench(made_checkout(tmp_path / "one", "1.5"), "fake").stdout == "a table\nfake: 1.5\n"


def test_anything_else_on_the_last_line_is_an_error(tmp_path: Path) -> None:
    """A benchmark that fails to print its figure is status 4."""
    done = bench(made_checkout(tmp_path / "one", "none"), "fake")

    assert (done.returncode, done.stderr) == (
        4,
        "bench: the last line of fake must be 'fake: FIGURE', got 'fake: none'\n",
    )


def test_two_checkouts_alternate(tmp_path: Path) -> None:
    """Each round runs both, in turn first; the last line is the ratio of the medians."""
    new = made_checkout(tmp_path / "new", "2 9 3")
    old = made_checkout(tmp_path / "old", "6 4 1")
    done = bench(new, "--against", str(old), "fake")
    order = [line.rpartition("/")[2] for line in done.stdout.splitlines() if line.startswith("== ")]

    assert (done.returncode, done.stderr) == (0, "")
    assert order == ["new", "old", "old", "new", "new", "old"]
    assert done.stdout.splitlines()[-3:] == ["this checkout    2 9 3", "the other        6 4 1", "fake: 0.750"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--against"], "bench: --against needs a value"),
        (["--against", "/nowhere", "fake"], "bench: --against must name a checkout of this project, got /nowhere"),
        (["--against", "/nowhere"], "bench: --against needs the name of a benchmark"),
        (["--rounds", "0", "fake"], "bench: --rounds must be a positive integer, got 0"),
        (["unknown"], "bench: NAME must be one that ci/bench/run lists, got unknown"),
    ],
)
def test_wrong_usage_is_status_2(tmp_path: Path, arguments: list[str], message: str) -> None:
    """A mistake in the arguments is one line."""
    done = bench(made_checkout(tmp_path / "one", "1"), *arguments)

    assert (done.returncode, done.stderr) == (2, f"{message}\n")
