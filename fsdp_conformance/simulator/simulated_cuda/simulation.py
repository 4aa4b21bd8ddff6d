"""
Simulated GPUs in this process: there is at most one simulation at a time.

torch is imported here, so import this module only once a program asks for the GPUs.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.simulator import activation, checker
from fsdp_conformance.simulator.as_cuda import device_properties
from fsdp_conformance.simulator.as_cuda import translation as cuda
from fsdp_conformance.simulator.as_cuda.names import CUDA
from fsdp_conformance.simulator.checker import labels
from fsdp_conformance.simulator.checker.hazard import sites_in
from fsdp_conformance.simulator.checker.host_threads import follow_threads
from fsdp_conformance.simulator.checker.options import CheckerOptions
from fsdp_conformance.simulator.collectives.compared_groups import ComparedGroups
from fsdp_conformance.simulator.device import SIMULATED, build
from fsdp_conformance.simulator.frames import Owner, owner
from fsdp_conformance.simulator.replacements import Replacements
from fsdp_conformance.simulator.simulated_cuda.outbox import Outbox
from fsdp_conformance.simulator.simulated_cuda.settings import CudaSettings

__all__ = ["Simulation", "begin", "current", "end", "extension_variables"]

_current: Simulation | None = None

#: How many devices the first simulation of this process had.
_first_num_devices = 0


class Simulation:
    """The setup that `begin` makes and `end` undoes."""

    def __init__(self, num_devices: int, *, checks: bool, as_cuda: bool, options: CheckerOptions) -> None:
        self.num_devices = num_devices
        self._device_type = CUDA if as_cuda else SIMULATED
        self._options = options
        self.notes: dict[str, None] = {}
        """The differences from a real GPU in this process, as sentences."""
        self._replaced = Replacements()
        self._at_exit: list[Callable[[], object]] = []
        self._groups: ComparedGroups | None = None
        self._accesses = 0
        activation.activate(num_devices)
        options.apply()
        self.set_checks(checks)
        checker.clear()
        self._accesses = checker.accesses()
        self._labels = labels.install()
        follow_threads(self._replaced)
        self._names = cuda.install(self._labels) if as_cuda else Replacements()
        if as_cuda:
            cuda.show_version(self._replaced)
            device_properties.show_memory(self._replaced, options.memory)
        self._replaced.set(torch, compile=self._compile)
        self._replaced.set(os, _exit=self._leave)
        atexit.register(self._finish)

    def end(self) -> None:
        """Put torch back as it was. The device stays known to torch, as "sim"."""
        atexit.unregister(self._finish)
        if self._groups is not None:
            self._groups.end()
        self._replaced.undo()
        self._names.undo()
        self._labels.remove()
        checker.set_uninitialized(False)
        checker.clear()

    def set_checks(self, checks: bool) -> None:
        """Turn the race checker on or off."""
        checker.set_mode(self._options.mode if checks else checker.Mode.OFF)

    def progress(self) -> tuple[int, int]:
        """Numbers that change when there is something new: the hazards and the accesses so far."""
        return checker.num_hazards(), checker.accesses()

    def observed(self) -> dict[str, Any]:
        """The observations since the last `forget`; JSON-ready."""
        return {
            "hazards": [
                _without_wrappers(replace(hazard, device_type=self._device_type).to_json())
                for hazard in checker.hazards()
            ],
            "accesses": checker.accesses() - self._accesses,
            "notes": list(self.notes),
            "collectives": self._groups.observed() if self._groups is not None else {"found": []},
        }

    def forget_hazards(self) -> None:
        """Start over; unfinished accesses can still race with later ones."""
        checker.clear_hazards()
        self._accesses = checker.accesses()
        self.notes.clear()
        if self._groups is not None:
            self._groups.forget()

    def forget(self) -> None:
        """Start over, and forget unfinished accesses, so that the next test is not blamed for them."""
        checker.clear()
        self.forget_hazards()

    def at_exit(self, action: Callable[[], object]) -> None:
        """Do something when the process ends, by os._exit too."""
        self._at_exit.append(action)

    def report_to(self, settings: CudaSettings) -> Outbox:
        """Tell the parent what this process observes, and compare its collectives with those of other children."""
        directory = Path(settings.directory)
        if settings.checks:
            self._groups = ComparedGroups(directory)
            self._groups.begin()
            self.at_exit(self._groups.end)
        outbox = Outbox(directory, settings.inherited)
        outbox.open(self)
        return outbox

    def become_child(self, settings: CudaSettings) -> None:
        """This process was forked: from now on it reports for itself."""
        self._at_exit.clear()
        self.forget()
        self.report_to(settings)

    def _finish(self) -> None:
        for action in self._at_exit:
            action()

    def _leave(self, status: int, leave: Callable[[int], NoReturn] = os._exit) -> NoReturn:
        """Replaces os._exit."""
        self._finish()
        leave(status)

    def _compile(self, model: Any = None, **options: Any) -> Any:
        """Replaces torch.compile: returns the model or function unchanged."""
        self.notes["torch.compile is ignored: the model runs eagerly"] = None
        return model if model is not None else functools.partial(self._compile, **options)


def _without_wrappers(hazard: dict[str, Any]) -> dict[str, Any]:
    """The hazard without the frames of our wrappers between the program and torch."""
    for site in sites_in(hazard):
        site["stack"] = [frame for frame in site["stack"] if owner(frame["file"]) is not Owner.MACHINERY]
    return hazard


def begin(num_devices: int, *, checks: bool, as_cuda: bool = True, options: CheckerOptions | None = None) -> Simulation:
    """
    Simulate `num_devices` GPUs in this process, until `end()` of the result. The caller has checked the number.

    Without `as_cuda` they are not called "cuda" but "sim".

    Raises EnvironmentUnavailable if the accelerator cannot be compiled, and ConfigError if there are simulated GPUs
    already, or were fewer before.
    """
    global _current, _first_num_devices
    if _current is not None:
        raise ConfigError(
            [f"this process has {_current.num_devices} simulated GPUs already"], where=f"{num_devices} simulated GPUs"
        )
    if _first_num_devices and num_devices > _first_num_devices:
        # autograd has started its threads, one for each device.
        raise ConfigError(
            [f"a process cannot have more simulated GPUs than it began with ({_first_num_devices}), got {num_devices}"],
            where="simulated GPUs",
        )
    if not build.is_built():
        print("compiling the simulated accelerator: about half a minute, once ...", file=sys.stderr, flush=True)
    _current = Simulation(num_devices, checks=checks, as_cuda=as_cuda, options=options or CheckerOptions())
    _first_num_devices = _first_num_devices or num_devices
    return _current


def end() -> None:
    """End the simulation, if there is one."""
    global _current
    if _current is not None:
        running, _current = _current, None
        running.end()


def current() -> Simulation | None:
    """The simulation of this process."""
    return _current


def extension_variables() -> dict[str, str]:
    """Variables with which children load the extension without looking for a compiler."""
    return {build.EXTENSION: str(build.require())}


def _after_fork() -> None:
    settings = CudaSettings.from_environment(os.environ) if _current is not None else None
    if _current is not None and settings is not None:
        _current.become_child(settings)


os.register_at_fork(after_in_child=_after_fork)
