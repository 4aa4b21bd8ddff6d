"""Actions that wait for the import of a module."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest


def test_a_module_that_is_being_imported_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It imports what watches it before it has defined everything."""
    (tmp_path / "early_watched.py").write_text("import late_watcher\nvalue = 1\n")
    (tmp_path / "late_watcher.py").write_text(
        "import sys\n"
        "from fsdp_conformance.simulator.import_hook import when_imported\n"
        "seen = []\n"
        "when_imported('early_watched', lambda: seen.append(sys.modules['early_watched'].value))\n"
        "seen_at_once = list(seen)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        importlib.import_module("early_watched")
        watcher = importlib.import_module("late_watcher")

        assert watcher.seen_at_once == []
        assert watcher.seen == [1]
    finally:
        for name in ("early_watched", "late_watcher"):
            sys.modules.pop(name, None)
