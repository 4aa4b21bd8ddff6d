"""A run of the tests leaves no temporary files, whatever the processes that they start leave."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fsdp_conformance.tests import temporary_files, warm_interpreter

#: Leaves files at the start and at the end of a run of pytest, in this process and in another one.
_LEAVING = """
import multiprocessing.util, subprocess, sys, tempfile

def leave():
    tempfile.mkdtemp(prefix="left-")
    code = "import os, tempfile; tempfile.mkstemp(prefix='left-'); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code])

def pytest_collection_finish():
    leave()
    multiprocessing.util.get_temp_dir()

def pytest_unconfigure():
    leave()
    with open("seen", "w") as file:
        file.write(tempfile.gettempdir())
"""


def test_children_use_the_directory_of_the_run() -> None:
    """Torchrun and controllers, too, which take it from $TMPDIR."""
    code = "import tempfile; print(tempfile.gettempdir())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == tempfile.gettempdir()
    assert Path(tempfile.gettempdir()).name.startswith(temporary_files.PREFIX)


@pytest.mark.nightly
@pytest.mark.parametrize("workers", ["0", "1"])
def test_what_is_left_is_removed_with_it(workers: str, tmp_path: Path) -> None:
    """Without and with workers of xdist."""
    (tmp_path / "leaving.py").write_text(_LEAVING, encoding="utf-8")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    one = Path(__file__).with_name("test_stack.py")
    words = [sys.executable, "-m", "pytest", "-q", "-n", workers, "-p", "leaving", "-p", "no:cacheprovider", str(one)]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "TMPDIR": str(temporary)}
    done = warm_interpreter.run(words, cwd=tmp_path, env=environment, timeout=240)

    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert (tmp_path / "seen").read_text(encoding="utf-8").startswith(str(temporary / temporary_files.PREFIX))
    assert list(temporary.iterdir()) == []
