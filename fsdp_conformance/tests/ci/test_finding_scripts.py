"""ci/findings/run: it tells a defect that shows from one that does not, and from a script that broke."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from fsdp_conformance.tests.guards import checkout

pytestmark = checkout.required


def _tool() -> Any:
    return importlib.import_module("finding_scripts")


def _script(root: Path, name: str, body: str) -> None:
    folder = root / "ci/findings/engine"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(
        f'"""\nA defect.\n\nRun: python ci/findings/engine/{name}\n"""\n{body}\n', encoding="utf-8"
    )


@pytest.mark.parametrize(
    ("body", "said", "status"),
    [
        ("print('WRONG')\nraise SystemExit(1)", "wrong as expected", 0),
        ("print('right')", "right: mended?", 1),
        ("raise ValueError('broken')", "ended otherwise", 1),
        ("print('WRONG')", "ended otherwise", 1),
        ("while True: pass", "ended otherwise", 1),
    ],
)
def test_outcomes(body: str, said: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status and output are both asked for: an exception exits with 1, too."""
    _script(tmp_path, "a.py", body)

    assert _tool().main(["--deadline", "1" if "while" in body else "60"], root=tmp_path) == status
    assert capsys.readouterr().out.startswith(f"{said}: ci/findings/engine/a.py\n")


def test_a_name_that_no_script_has(tmp_path: Path) -> None:
    """A mistyped name would otherwise run nothing, and succeed."""
    _script(tmp_path, "a.py", "print('right')")

    assert _tool().main(["b"], root=tmp_path) == 2


@pytest.mark.nightly
def test_every_defect_still_shows() -> None:
    """With the torch that is installed."""
    assert _tool().main([]) == 0
