"""What `fsdp-conformance sanitize` finds in scripts with a mistake, and in correct ones: see ci/sanitize-power."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from fsdp_conformance.errors import EnvironmentUnavailable
from fsdp_conformance.simulator.device import build
from studies.script_controls import CONTROLS
from studies.script_defects import DEFECTS
from studies.script_programs import CORRECT, WRONG
from studies.script_runs import run_scripts


def main() -> int:
    """Run the scripts, print a line for each, and count."""
    parser = argparse.ArgumentParser(prog="ci/sanitize-power")
    parser.add_argument("--script", action="append", default=[], metavar="PART")
    parser.add_argument("--ignore-implicit-syncs", action="store_true")
    parser.add_argument("--ordering-only", action="store_true")
    arguments = parser.parse_args()
    scripts = [
        script
        for script in (*DEFECTS, *WRONG, *CONTROLS, *CORRECT)
        if not arguments.script or any(part in script.name for part in arguments.script)
    ]
    if arguments.ignore_implicit_syncs:
        scripts = [replace(script, waits="explicit") for script in scripts]
    if arguments.ordering_only:
        scripts = [replace(script, ordering_only=True) for script in scripts]
    if not scripts:
        parser.error(f"no script's name contains {' or '.join(arguments.script)}")
    try:
        build.require()
    except EnvironmentUnavailable as error:
        print(f"sanitize-power: {error}", file=sys.stderr)
        return 3
    found = silent = unexpected = 0
    for outcome in run_scripts(scripts):
        print(outcome.line(), flush=True)
        found += bool(outcome.script.kind) and outcome.is_found
        silent += not outcome.script.kind and outcome.is_silent
        unexpected += not outcome.is_right
    wrong = sum(bool(script.kind) for script in scripts)
    print(f"sanitize-power: {found} of {wrong} found, {silent} of {len(scripts) - wrong} correct scripts silent")
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
