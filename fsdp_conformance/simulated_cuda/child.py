"""
A process that was started while its parent had simulated GPUs.

Its hazards are the parent's to judge. They are saved in a file when the process ends, in whatever way Python gets to
know of (return, sys.exit, os._exit), and twice a second before, for a process that is killed.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_conformance.simulated_cuda.settings import CudaSettings
from fsdp_conformance.simulator.on_import import when_imported

if TYPE_CHECKING:
    from fsdp_conformance.simulated_cuda.simulation import Simulation

__all__ = ["Outbox", "prepare"]

#: Seconds between two looks for new hazards.
_LOOK_S = 0.5


def prepare() -> None:
    """Prepare this process, if the environment says so: torch will see the GPUs from the moment it is imported."""
    settings = CudaSettings.from_environment(os.environ)
    if settings is not None:
        when_imported("torch", functools.partial(_begin, settings))


def _begin(settings: CudaSettings) -> None:
    from fsdp_conformance.simulated_cuda import simulation

    outbox = Outbox(Path(settings.directory))
    running = simulation.begin(settings.num_devices, checks=settings.checks, outbox=outbox)
    outbox.open(running)
    outbox.keep_looking()


class Outbox:
    """The file with what this process has observed."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / f"{uuid.uuid4().hex}.json"
        self._simulation: Simulation | None = None
        self._saved: tuple[int, int] | None = None
        self._lock = threading.Lock()

    def open(self, simulation: Simulation) -> None:
        """From now on save what the simulation observes, at the latest when the process ends."""
        self._simulation = simulation
        simulation.at_exit(self.save)

    def keep_looking(self) -> None:
        """Save new hazards as they come, in a thread."""
        threading.Thread(target=self._look, name="simulated CUDA", daemon=True).start()

    def save(self) -> None:
        """Save the file, completely or not at all."""
        simulation = self._simulation
        if simulation is None:
            return
        with self._lock:
            state = simulation.progress()
            if state == self._saved:
                return
            part = self._path.with_suffix(".part")
            try:
                part.write_text(json.dumps({"process": process_name(), **simulation.observed()}), encoding="utf-8")
                os.replace(part, self._path)
            except OSError:  # the parent has ended and removed the directory
                return
            self._saved = state

    def _look(self) -> None:
        over = threading.Event()
        hazards = 0
        while not over.wait(_LOOK_S):
            simulation = self._simulation
            found = simulation.progress()[0] if simulation is not None else 0
            if found != hazards:
                hazards = found
                self.save()


def process_name() -> str:
    """What a user calls this process: its rank, its name, or the program that it runs."""
    rank = os.environ.get("RANK", "")
    if rank.isdecimal():
        return f"rank {rank}"
    multiprocessing: Any = sys.modules.get("multiprocessing.process")
    name = multiprocessing.current_process().name if multiprocessing is not None else "MainProcess"
    if name != "MainProcess":
        return str(name)
    program = os.path.basename(sys.argv[0]) if sys.argv else ""
    return {"": "a child process", "-c": "python -c"}.get(program, program)
