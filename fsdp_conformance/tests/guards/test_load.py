"""
Guard: modules that load in a user's process import little.

The pytest plugin is loaded by every pytest run of the user's environment; the command line, the words and the report
answer `list`, `verify` and `explain` where torch takes seconds to import, or cannot be.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from fsdp_conformance.tests.guards import checkout
from fsdp_conformance.tests.guards.test_imports import TORCHLESS

pytestmark = checkout.required

#: Parts that may use torch in a function, but not at import.
_LAZY = frozenset({"pytest_plugin", "workload"})

#: Imports each module named on the command line, in order, and prints which of `heavy` came with it first.
_PROBE = """
import importlib, json, sys
heavy = ("torch", "numpy", "deepspeed")
found = {}
for name in sys.argv[1:]:
    before = {module for module in heavy if module in sys.modules}
    importlib.import_module(name)
    came = [module for module in heavy if module in sys.modules and module not in before]
    if came:
        found[name] = came
print(json.dumps(found))
"""


def heavy_imports(*names: str) -> dict[str, list[str]]:
    """Module to the heavy packages that came with importing it, in one fresh process."""
    command = [sys.executable, "-c", _PROBE, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    by_module: dict[str, list[str]] = json.loads(done.stdout)
    return by_module


@pytest.mark.slow
def test_words_report_plugin_and_command_line_load_without_torch() -> None:
    """Importing any module of them brings neither torch nor numpy."""
    light = [
        module.name
        for module in checkout.modules()
        # Importing __main__ would run it.
        if module.part in TORCHLESS | _LAZY and module.part != "__main__"
    ]

    assert light != []
    assert heavy_imports(*light) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["torch", pytest.param("fsdp_conformance.history.training", marks=pytest.mark.nightly)]
)
def test_the_load_guard_sees_torch_come_in(name: str) -> None:
    """A module that imports torch is named, with what came."""
    assert "torch" in heavy_imports(name)[name]
