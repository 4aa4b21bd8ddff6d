"""
What is arranged in a process before a script runs on the simulated accelerator, and what is read from it afterwards.

The checker is on, modules and parameters have names in what it says, and what a script does that has no meaning here is
either carried out in another way, with a note in the report (`torch.compile` runs eagerly, `mp.spawn` runs this rank's
part in this process), or refused.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from torch._C._distributed_c10d import FileStore

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.simulator import build, checker, device, labels
from fsdp_conformance.simulator.cuda_names import is_own, replace
from fsdp_conformance.simulator.launch import ScriptOrder


class Observer:
    """What this process has seen so far."""

    def __init__(self, order: ScriptOrder, directory: Path) -> None:
        self.order = order
        self.notes: dict[str, None] = {}
        """Sentences for the report, in order; each once."""
        self.waits: Counter[str] = Counter()
        """What orders streams and the host, by what the script called."""
        self._directory = directory
        self._rank = int(os.environ["RANK"])
        self._num_spawned = 0
        self._arranged = contextlib.ExitStack()

    def begin(self) -> None:
        """Make the accelerator active and arrange everything. Raises EnvironmentUnavailable without a compiler."""
        device.activate(self.order.world_size)
        checker.set_mode(self.order.mode)
        checker.clear()
        # Until the process ends.
        self._arranged.enter_context(checker.wait_filter(self._count))
        names = labels.install()
        replace(torch, compile=self._compile)
        for module in (torch.multiprocessing, sys.modules["torch.multiprocessing.spawn"]):
            replace(module, spawn=self._spawn, start_processes=self._spawn)
        if self.order.as_cuda:
            from fsdp_conformance.simulator import as_cuda

            self.notes.update(dict.fromkeys(as_cuda.install(names)))

    def progress(self) -> int:
        """Changes when there is a new hazard."""
        return checker.num_hazards()

    def observed(self) -> dict[str, Any]:
        """JSON-ready: hazards, and how much was checked."""
        return {
            "hazards": [_of_script(hazard.to_json()) for hazard in checker.hazards()],
            "accesses": checker.accesses(),
            "waits": dict(self.waits),
            "streams": build.load().Checker.get().num_lanes() - 1,  # lane 0 is the host
            "notes": list(self.notes),
        }

    def _count(self, kind: str, stream: int, index: int) -> bool:
        self.waits[kind] += 1
        return True

    def _compile(self, model: Any = None, **options: Any) -> Any:
        """In place of torch.compile: the model or function itself."""
        self.notes["torch.compile: the model runs eagerly here"] = None
        return model if model is not None else lambda function: function

    def _spawn(
        self, fn: Callable[..., Any], args: tuple[Any, ...] = (), nprocs: int = 1, *more: Any, **options: Any
    ) -> _Spawned | None:
        """
        In place of torch.multiprocessing.spawn: this rank's part, in this process.

        A script that starts its ranks itself is started once per rank here, so each start is the start of one. Ranks
        beyond `nprocs` have no part.
        """
        if nprocs > self.order.world_size:
            raise ConfigError(
                [f"nprocs={nprocs}, but should be at most the number of ranks, --world-size {self.order.world_size}"],
                where="torch.multiprocessing.spawn",
            )
        self.notes["torch.multiprocessing.spawn: each rank runs its part in its own process"] = None
        if self._rank < nprocs:
            fn(self._rank, *args)
        self._num_spawned += 1
        # The real one returns when all have ended, and a script may start the next.
        store = FileStore(str(self._directory / f"spawn{self._num_spawned}"), self.order.world_size)
        store.set_timeout(timedelta(seconds=self.order.timeout_s))
        store.set(f"rank{self._rank}", "ended")
        store.wait([f"rank{rank}" for rank in range(nprocs)])
        return None if (more[0] if more else options.get("join", True)) else _Spawned()


def _of_script(hazard: dict[str, Any]) -> dict[str, Any]:
    """The hazard without the frames that started the script, and without those of wrappers between it and torch."""
    for site in (hazard["then"]["site"], hazard["now"]["site"], hazard["allocated"], hazard["freed"]):
        if site is not None:
            stack = itertools.takewhile(lambda frame: frame["file"] != "<frozen runpy>", site["stack"])
            site["stack"] = [frame for frame in stack if not is_own(frame["file"])]
    return hazard


class _Spawned:
    """What spawn returns with join=False; its processes have ended."""

    def join(self, *args: Any, **kwargs: Any) -> bool:
        """Whether all have."""
        return True


def begin(order: ScriptOrder, directory: Path) -> Observer:
    """Arrange this process for a script."""
    observer = Observer(order, directory)
    observer.begin()
    return observer
