"""
Prepares a process for a script on the simulated accelerator, or on a GPU, and collects the observations afterwards.

The checker is on, and its findings name modules and parameters. Calls that cannot work here are replaced, with a note
in the report (`torch.compile` runs eagerly, `mp.spawn` of several ranks runs this rank's part in this process), or
raise.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from torch._C._distributed_c10d import FileStore
from torch.multiprocessing.spawn import start_processes

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.simulator import checker
from fsdp_conformance.simulator.activation import activate
from fsdp_conformance.simulator.as_cuda.names import CUDA
from fsdp_conformance.simulator.checker import labels
from fsdp_conformance.simulator.checker.hazard import Hazard, sites_in
from fsdp_conformance.simulator.checker.host_threads import follow_threads
from fsdp_conformance.simulator.collectives.agreement import Agreement
from fsdp_conformance.simulator.device import SIMULATED, build
from fsdp_conformance.simulator.frames import Owner, owner
from fsdp_conformance.simulator.replacements import Replacements
from fsdp_conformance.simulator.sanitize.order import ScriptOrder
from fsdp_conformance.simulator.traced.devices import CudaDevice, follow_objects, handle_on_cuda
from fsdp_conformance.simulator.traced.hooks import tracing
from fsdp_conformance.simulator.traced.trace import Trace


class Observer:
    """The observations of this process so far."""

    def __init__(self, order: ScriptOrder, directory: Path, agreement: Agreement) -> None:
        self.order = order
        self.agreement = agreement
        """Compares the collectives of the ranks."""
        self.notes: dict[str, None] = {}
        """Sentences for the report, in order, without duplicates."""
        self.waits: Counter[str] = Counter()
        """The number of waits by kind: what the script called to order streams and the host."""
        self._directory = directory
        self._rank = int(os.environ["RANK"])
        self._num_spawned = 0
        self._start_processes: Callable[..., Any] = start_processes
        self._arranged = contextlib.ExitStack()

    def begin(self) -> None:
        """Activate the accelerator and start observing. Raises EnvironmentUnavailable without a compiler."""
        activate(self.order.num_devices)
        self.order.options.apply()
        checker.clear()
        # Until the process ends.
        self._arranged.enter_context(checker.wait_filter(self._count))
        names = labels.install()
        replaced = self._replaced()
        if self.order.as_cuda:
            from fsdp_conformance.simulator.as_cuda import device_properties
            from fsdp_conformance.simulator.as_cuda import translation as as_cuda

            as_cuda.install(names)
            as_cuda.show_version(replaced)
            device_properties.show_memory(replaced, self.order.options.memory)

    def _replaced(self) -> Replacements:
        """Replace what cannot work under the checker."""
        replaced = Replacements()  # for good: this process runs nothing but the script
        follow_threads(replaced)
        replaced.set(torch, compile=self._compile)
        for module in (torch.multiprocessing, sys.modules["torch.multiprocessing.spawn"]):
            replaced.set(module, spawn=self._spawn, start_processes=self._spawn)
        return replaced

    def progress(self) -> int:
        """A number that changes when there is a new finding."""
        return checker.num_hazards() + len(self.agreement.disagreements)

    def look(self) -> None:
        """Check if the ranks are in a deadlock."""
        self.agreement.look_at_this_process()

    def observed(self) -> dict[str, Any]:
        """The hazards, and how much was checked; JSON-ready."""
        return {
            "hazards": self.described(checker.hazards()),
            "accesses": checker.accesses(),
            "waits": dict(self.waits),
            "streams": build.load().Checker.get().num_lanes() - 1,  # lane 0 is the host
            "notes": list(self.notes),
            "collectives": self.agreement.observed(),
        }

    def described(self, hazards: Sequence[Hazard]) -> list[dict[str, Any]]:
        """Hazards as the script's author knows them: the device's name, and the frames; JSON-ready."""
        device_type = CUDA if self.order.as_cuda or self.order.on_gpus else SIMULATED
        return [_of_script(replace(hazard, device_type=device_type).to_json()) for hazard in hazards]

    def _count(self, kind: str, stream: int, index: int) -> bool:
        self.waits[kind] += 1
        return True

    def _compile(self, model: Any = None, **options: Any) -> Any:
        """Replaces torch.compile: returns the model or function unchanged."""
        self.notes["torch.compile is ignored: the model runs eagerly"] = None
        return model if model is not None else lambda function: function

    def _spawn(
        self, fn: Callable[..., Any], args: tuple[Any, ...] = (), nprocs: int = 1, *more: Any, **options: Any
    ) -> Any:
        """
        Replaces torch.multiprocessing.spawn: runs this rank's part, in this process.

        The script was started once per rank, so each of its calls starts one rank. Ranks beyond `nprocs` do nothing. A
        script that was started once, and asks for several processes, gets them.
        """
        if self.order.world_size == 1 and nprocs > 1:
            return self._start_processes(fn, args, nprocs, *more, **options)
        if nprocs > self.order.world_size:
            problem = f"nprocs must be at most --world-size ({self.order.world_size}), got {nprocs}"
            instead = f"with --world-size 1 --devices {nprocs} the script starts its processes itself"
            raise ConfigError([f"{problem}; {instead}"], where="torch.multiprocessing.spawn")
        self.notes["torch.multiprocessing.spawn starts no processes: each rank runs its part in its own process"] = None
        if self._rank < nprocs:
            fn(self._rank, *args)
        self._num_spawned += 1
        # The real spawn returns when all ranks have ended; the script may then spawn again.
        store = FileStore(str(self._directory / f"spawn{self._num_spawned}"), self.order.world_size)
        store.set_timeout(timedelta(seconds=self.order.timeout_s))
        store.set(f"rank{self._rank}", "ended")
        store.wait([f"rank{rank}" for rank in range(nprocs)])
        return None if (more[0] if more else options.get("join", True)) else _Spawned()


def _of_script(hazard: dict[str, Any]) -> dict[str, Any]:
    """The hazard without the frames that started the script, and those of wrappers between the script and torch."""
    for site in sites_in(hazard):
        stack = itertools.takewhile(lambda frame: frame["file"] != "<frozen runpy>", site["stack"])
        site["stack"] = [frame for frame in stack if owner(frame["file"]) is not Owner.MACHINERY]
    return hazard


class _Spawned:
    """The result of spawn with join=False: the ranks have already ended."""

    def join(self, *args: Any, **kwargs: Any) -> bool:
        """True if all ranks have ended."""
        return True


class GpuObserver(Observer):
    """The observations of a process that runs on a GPU: torch's tracing hooks make them."""

    def begin(self) -> None:
        """Start tracing. Raises EnvironmentUnavailable without a compiler."""
        trace = Trace(build.load().Checker.get(), CudaDevice())
        self.order.options.apply()
        self.waits = trace.waits
        labels.install()
        follow_objects(
            trace,
            self._replaced(),
            stream_type=torch.cuda.Stream,
            event_type=torch.cuda.Event,
            stream_number=handle_on_cuda,
            event_number=operator.attrgetter("cuda_event"),
        )
        self._arranged.enter_context(tracing(trace, handle_on_cuda))


def begin(order: ScriptOrder, directory: Path, agreement: Agreement) -> Observer:
    """Prepare this process for a script."""
    observer = (GpuObserver if order.on_gpus else Observer)(order, directory, agreement)
    observer.begin()
    return observer
