"""`fsdp-conformance repro`: write a case as a script for torchrun that does not need this package."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from fsdp_conformance.cli import report_dir, single
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.status import Status

#: Accelerators are left out: a script for one could not be shown to work here.
_DEVICE = "cpu"


def main(arguments: argparse.Namespace) -> int:
    """Write the script to a file, or to stdout. Raises NoScript, with the reason, if there is none."""
    single.prepare(_DEVICE, arguments.implementation)
    bound = single.bound(arguments.case)
    from fsdp_conformance.repro.script import script

    name = Path(arguments.output).name if arguments.output else "repro.py"
    text = script(bound, RunSettings(implementation=arguments.implementation, device=_DEVICE), name=name)
    if arguments.output is None:
        sys.stdout.write(text)
        return Status.CERTIFIED
    report_dir.write_text(Path(arguments.output), text, option="--output")
    # torchrun warns on several lines where the number of threads is not set.
    command = f"OMP_NUM_THREADS=1 torchrun --nproc-per-node {bound.case.world_size} {shlex.quote(arguments.output)}"
    print(f"{arguments.output} is written: {command}")
    print("it exits with 0 if the engine trains like the plain reference, and with 1 and the first difference if not")
    return Status.CERTIFIED
