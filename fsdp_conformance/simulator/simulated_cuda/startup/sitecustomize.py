"""
Run by Python at its start, where `simulated_cuda.settings.Children` put this directory on PYTHONPATH.

It makes room for the environment's own `sitecustomize`, and prepares the process for simulated GPUs. Nothing heavy is
imported: torch is prepared when the program imports it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def run_next(here: str) -> None:
    """Run the `sitecustomize` that Python would have found without the one in the directory `here`."""
    sys.path[:] = [entry for entry in sys.path if not entry or os.path.abspath(entry) != here]
    this = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        if this is not None:
            sys.modules["sitecustomize"] = this


def _prepare() -> None:
    package = os.path.dirname(os.path.dirname(os.path.dirname(_HERE)))
    spec = importlib.util.find_spec(os.path.basename(package))
    if spec is None or os.path.dirname(spec.origin or "") != package:
        # The parent has this package from somewhere else, such as a checkout that is not installed.
        sys.path.insert(0, os.path.dirname(package))
    from fsdp_conformance.simulator.simulated_cuda import child_process as child

    child.prepare()


if __name__ == "sitecustomize":
    try:
        _prepare()
    finally:
        run_next(_HERE)
