"""
The process that runs pytest: `python -m fsdp_conformance.cli.warm`. It reads orders from stdin, a line of JSON each.

It imports torch once for three: for pytest, for the process that surveys the machine and the implementation, and for
the server from which the ranks are forked. The command line starts it first of all, and reads the profile meanwhile.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp_conformance import codec
from fsdp_conformance.errors import ConformanceError
from fsdp_conformance.harness.processes.forkserver import import_and_fork
from fsdp_conformance.harness.processes.priority import keep_priority


def main() -> int:
    """
    Follow orders: any number of {"survey": words, "output": path, "answer": path} and {"smoke": implementation,
    "device": type, "answer": path}, and then one {"pytest": words}.
    """
    keep_priority()
    import_and_fork()
    for line in sys.stdin:
        order = json.loads(line)
        if "pytest" in order:
            return _run_pytest(order["pytest"])
        answer = _survey(order) if "survey" in order else _smoke(order)
        # Renamed, so that whoever waits for the file never reads half of it.
        written = Path(order["answer"] + ".part")
        written.write_text(json.dumps(answer), encoding="utf-8")
        written.rename(order["answer"])
    return 0


def _survey(order: Mapping[str, Any]) -> int | None:
    """The exit status of the fork that answers."""
    from fsdp_conformance.cli import surveyor

    return surveyor.forked(order["survey"], Path(order["output"]))


def _smoke(order: Mapping[str, Any]) -> dict[str, Any]:
    """The results of the checks, or why they could not be run."""
    from fsdp_conformance.driver.smoke import smoke

    try:
        return {"results": codec.plain(smoke(order["smoke"], device=order["device"]))}
    except ConformanceError as error:
        return {"problem": str(error)}


def _run_pytest(words: list[str]) -> int:
    """As `python -m pytest WORDS...` without an input."""
    import pytest

    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    sys.argv = ["pytest", *words]
    return int(pytest.main(words))


if __name__ == "__main__":
    sys.exit(main())
