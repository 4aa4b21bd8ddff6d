"""
Run by Python at its start, where `recorder.process.RecordSettings.variables` put this directory on PYTHONPATH.

Nothing heavy is imported: recording begins when the program imports torch. Then the next `sitecustomize` runs: that of
simulated GPUs, or the environment's own.
"""

from __future__ import annotations

import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _prepare() -> None:
    package = os.path.dirname(os.path.dirname(_HERE))
    spec = importlib.util.find_spec(os.path.basename(package))
    if spec is None or os.path.dirname(spec.origin or "") != package:
        # The parent has this package from somewhere else, such as a checkout that is not installed.
        sys.path.insert(0, os.path.dirname(package))
    from fsdp_conformance.recorder import process

    process.prepare()


if __name__ == "sitecustomize":
    try:
        _prepare()
    finally:
        from fsdp_conformance.simulator.simulated_cuda.startup.sitecustomize import run_next

        run_next(_HERE)
