"""ci/findings/run: it tells a defect that shows from one that does not, and from a script that broke."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdp_conformance.tests.guards import checkout

pytestmark = [checkout.required, pytest.mark.nightly]


def _tool() -> Any:
    return importlib.import_module("finding_scripts")


def _script(root: Path, name: str, body: str) -> None:
    folder = root / "ci/findings/engine"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(
        f'"""\nA defect.\n\nRun: python ci/findings/engine/{name}\n"""\n{body}\n', encoding="utf-8"
    )


@pytest.mark.parametrize(
    ("body", "outcome", "status"),
    [
        ("print('WRONG')\nraise SystemExit(1)", "wrong as expected", 0),
        ("print('right')", "right: fixed?", 1),
        ("raise ValueError('broken')", "ended otherwise", 1),
        ("print('WRONG')", "ended otherwise", 1),
        ("while True: pass", "ended otherwise", 1),
    ],
)
def test_outcomes(body: str, outcome: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status and output are both asked for: an exception exits with 1, too."""
    _script(tmp_path, "a.py", body)

    assert _tool().main(["--deadline", "1" if "while" in body else "60"], root=tmp_path) == status
    assert capsys.readouterr().out.startswith(f"{outcome}: ci/findings/engine/a.py\n")


def test_nothing_is_left_in_the_temporary_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script gets its own directory, which is removed even if the script is killed: torchrun leaves one behind."""
    left = "import tempfile\nprint(tempfile.mkdtemp(), flush=True)\n"
    _script(tmp_path, "a.py", f"{left}raise SystemExit(3)")
    _script(tmp_path, "b.py", f"{left}while True: pass")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))

    assert _tool().main(["a.py"], root=tmp_path) == 1
    assert f"    {temporary}/finding-" in capsys.readouterr().out
    assert _tool().main(["--deadline", "1", "b.py"], root=tmp_path) == 1
    assert list(temporary.iterdir()) == []


def test_a_script_that_needs_an_accelerator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is not run without one, which the last line counts; with one, it is."""
    _script(tmp_path, "a.py", "print('WRONG')\nraise SystemExit(1)")
    path = tmp_path / "ci/findings/engine/a.py"
    path.write_text(path.read_text(encoding="utf-8").replace("Run:", "Needs: an accelerator\nRun:"), encoding="utf-8")
    tool = _tool()
    for present, outcome, counted in (
        (False, "not run: it needs an accelerator", "findings: 0 of 1 defects show, 1 not run"),
        (True, "wrong as expected", "findings: 1 of 1 defects show"),
    ):
        monkeypatch.setattr(tool, "_has_accelerator", lambda present=present: present)
        assert tool.main([], root=tmp_path) == 0
        assert capsys.readouterr().out == f"{outcome}: ci/findings/engine/a.py\n{counted}\n"


def test_a_script_runs_in_the_environment_of_its_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Engines have their own environments, made by ci/setup; without one, the script is not run."""
    tool = _tool()
    monkeypatch.setattr(tool, "OTHER_ENGINES", {"engine": "extra"})
    _script(tmp_path, "a.py", "import os\nprint(os.environ['WHOSE'])\nraise SystemExit(1)")

    assert tool.main([], root=tmp_path) == 0
    assert capsys.readouterr().out.startswith("not run: its engine is not installed here: ")

    python = tmp_path / ".venvs/extra/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nWHOSE=WRONG exec {sys.executable} "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    assert tool.main([], root=tmp_path) == 0
    assert capsys.readouterr().out.startswith("wrong as expected: ")


@pytest.mark.parametrize(
    ("versions", "body", "outcome", "status"),
    [
        ("<2", "print('right')", "right, as expected with this version of torch", 0),
        ("<2", "print('WRONG')\nraise SystemExit(1)", "ended otherwise", 1),
        (">=2", "print('right')", "right: fixed?", 1),
        (">=2", "print('WRONG')\nraise SystemExit(1)", "wrong as expected", 0),
        ("<2", "raise ValueError('broken')", "ended otherwise", 1),
    ],
)
def test_a_defect_of_some_versions_of_torch(
    versions: str, body: str, outcome: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With other versions the script says that all is right; if not, the range is wrong."""
    _script(tmp_path, "a.py", body)
    path = tmp_path / "ci/findings/engine/a.py"
    path.write_text(path.read_text(encoding="utf-8").replace("Run:", f"Torch: {versions}\nRun:"), encoding="utf-8")

    assert _tool().main([], root=tmp_path) == status
    said_of_it, *_, counted = capsys.readouterr().out.splitlines()
    assert said_of_it == f"{outcome}: ci/findings/engine/a.py"
    assert counted.endswith(", 1 of other versions of torch") == outcome.startswith("right, as")


def test_what_needs_an_accelerator_shows_on_the_simulated_one() -> None:
    """Every machine can check these scripts."""
    tool = _tool()
    needing = [path for path in tool.scripts() if tool.read_script(path).needs_accelerator]
    installed = {path: tool.python_for(path.parent.name, tool.ROOT) for path in needing}
    assert any(installed.values())
    for path in filter(installed.get, needing):
        command = ["sanitize", "--as-cuda", "--world-size", "2", str(path)]
        run = subprocess.run(
            [installed[path], "-m", "fsdp_conformance", *command],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert "[rank 0] WRONG" in run.stdout.splitlines(), run.stdout + run.stderr


def test_a_name_that_no_script_has(tmp_path: Path) -> None:
    """A mistyped name would otherwise run nothing, and succeed."""
    _script(tmp_path, "a.py", "print('right')")

    assert _tool().main(["b"], root=tmp_path) == 2


def test_every_defect_still_shows() -> None:
    """Each script shows its defect with the installed torch."""
    assert _tool().main([]) == 0
