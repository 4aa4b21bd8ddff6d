"""
The child process of `survey`: `python -m fsdp_conformance.cli.surveyor ANSWERS DEVICE IMPLEMENTATION`, or a fork of a
process that has imported torch already.

Like `examine` and `warm`, it imports torch; the other modules of the command line do not.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

from fsdp_conformance import codec
from fsdp_conformance.adapters import registry
from fsdp_conformance.cli.processes import end_family
from fsdp_conformance.cli.survey import TIMEOUT_S, Inquiry, Machine, Survey
from fsdp_conformance.errors import AdapterError, ConformanceError, EnvironmentUnavailable


def main(arguments: list[str]) -> None:
    """Answer each question with a line; an exception from the adapter's module is an answer, too."""
    answers, device, implementation = arguments
    with Path(answers).open("w", encoding="utf-8", buffering=1) as file:
        print(json.dumps({"machine": machine_here(device).to_json()}), file=file)
        print(json.dumps({"implementation": _implementation(implementation)}), file=file)


def survey_here(device: str, implementation: str, *, timeout_s: float = TIMEOUT_S) -> Survey:
    """As `survey.survey`, in a fork of this process."""
    with Inquiry(device, implementation, timeout_s=timeout_s) as inquiry:
        status = forked(inquiry.words(), inquiry.output, timeout_s=timeout_s)
        return inquiry.answer(status, inquiry.output.read_bytes())


def forked(words: list[str], output: Path, *, timeout_s: float | None = None) -> int | None:
    """Call `main` in a fork of this process. Returns the fork's exit status; None if it was ended at its deadline."""
    child = multiprocessing.get_context("fork").Process(target=_in_fork, args=(words, output))
    output.touch()
    child.start()
    try:
        child.join(timeout_s)
        return child.exitcode
    finally:
        if child.pid is not None and child.is_alive():
            end_family(child.pid)
            child.join()


def _in_fork(words: list[str], output: Path) -> None:
    with output.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    main(words)


def machine_here(device: str) -> Machine:
    """What this machine offers; counts devices without starting any."""
    import importlib.metadata

    from fsdp_conformance.cases.places import place_of
    from fsdp_conformance.harness import devices, leases
    from fsdp_conformance.plan import SIMULATED
    from fsdp_conformance.simulator.device import build

    here, simulated = place_of(device), place_of(SIMULATED)
    backend, problem = "", here.problem
    try:
        # For a type that torch does not know, the count says more than torch's error.
        backend = devices.backend_for(device) if here.num_ranks != 0 and not problem else ""
    except EnvironmentUnavailable as error:
        problem = str(error)
    return Machine(
        torch=importlib.metadata.version("torch"),
        device=device,
        backend=backend,
        problem=problem,
        present=here.present,
        num_devices=devices.device_count("cpu" if device == SIMULATED else device),
        num_ranks=here.num_ranks,
        simulated=simulated,
        simulator_built=build.is_built(),
        auto_slots=leases.slots_of(device, 0),
    )


def _implementation(spec: str) -> dict[str, Any]:
    """`registry.describe_here` as `registry.description_from_answer` reads it."""
    try:
        return {"description": codec.plain(registry.describe_here(spec))}
    except AdapterError as error:
        return {"error": "AdapterError", "problems": list(error.problems)}
    except ConformanceError as error:
        return {"error": type(error).__name__, "message": str(error)}


if __name__ == "__main__":
    main(sys.argv[1:])
