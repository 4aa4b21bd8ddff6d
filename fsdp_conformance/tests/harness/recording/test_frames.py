"""Whose code a frame runs, by its file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typing_extensions

from fsdp_conformance import stack
from fsdp_conformance.stack import Owner, owner

PACKAGE = Path(stack.__file__).parent
SITE_PACKAGES = str(Path(torch.__file__).parent.parent)


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (torch.__file__, Owner.TORCH),
        (str(PACKAGE / "harness" / "rank.py"), Owner.MACHINERY),
        (str(PACKAGE / "simulator" / "as_cuda.py"), Owner.MACHINERY),
        (str(PACKAGE / "engine" / "chunks" / "chunk.py"), Owner.USER),
        (json.__file__, Owner.PYTHON),
        (typing_extensions.__file__, Owner.PYTHON),
        ("<frozen runpy>", Owner.NO_FILE),
        (f"{SITE_PACKAGES}/acme/unit.py", Owner.USER),
        (f"{SITE_PACKAGES}/torchvision/models.py", Owner.USER),
        ("/srv/someone/train.py", Owner.USER),
    ],
)
def test_files_have_owners(file: str, expected: Owner) -> None:
    """Other packages are the user's, even inside the standard library's directory, or named like torch."""
    assert owner(file) is expected


def test_paths_are_shown_without_the_directories_of_this_machine() -> None:
    """Paths of both packages start with the package's name, paths below the current directory are relative."""
    assert stack.shown(torch.__file__) == os.path.join("torch", "__init__.py")
    assert stack.shown(str(PACKAGE / "harness" / "rank.py")) == os.path.join("fsdp_conformance", "harness", "rank.py")
    assert stack.shown(os.path.join(os.getcwd(), "train.py")) == "train.py"
    assert stack.shown("/elsewhere/train.py") == "/elsewhere/train.py"


def test_torch_is_found_without_being_imported() -> None:
    """Reports without torch can ask for owners."""
    code = (
        "import sys; from fsdp_conformance.stack import owner; "
        f"owner({torch.__file__!r}) == 'torch' or sys.exit('not found'); sys.exit('torch' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
