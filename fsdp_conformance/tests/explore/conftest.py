"""Workers of `explore` start where torch has been imported."""

from __future__ import annotations

import subprocess
import types

import pytest

from fsdp_conformance.explore import pool
from fsdp_conformance.tests import warm_interpreter


@pytest.fixture(autouse=True)
def _warm_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    started = types.SimpleNamespace(Popen=warm_interpreter.Popen, PIPE=subprocess.PIPE)
    monkeypatch.setattr(pool, "subprocess", started)
