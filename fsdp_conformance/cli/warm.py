"""
The process that runs pytest: `python -m fsdp_conformance.cli.warm`. It reads orders from stdin, a line of JSON each.

It imports torch once for three: for pytest, for the process that surveys the machine and the implementation, and for
the server from which the ranks are forked. The command line starts it first of all, and reads the profile meanwhile.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from fsdp_conformance.harness.processes.forkserver import import_and_fork


def main() -> int:
    """Follow orders: any number of {"survey": words, "output": path, "ended": path}, then one {"pytest": words}."""
    import_and_fork()
    for line in sys.stdin:
        order = json.loads(line)
        if "pytest" in order:
            return _run_pytest(order["pytest"])
        from fsdp_conformance.cli import surveyor

        status = surveyor.forked(order["survey"], Path(order["output"]))
        # Renamed, so that whoever waits for the file never reads half of it.
        written = Path(order["ended"] + ".part")
        written.write_text(str(status), encoding="utf-8")
        written.rename(order["ended"])
    return 0


def _run_pytest(words: list[str]) -> int:
    """As `python -m pytest WORDS...` without an input."""
    import pytest

    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    sys.argv = ["pytest", *words]
    return int(pytest.main(words))


if __name__ == "__main__":
    sys.exit(main())
