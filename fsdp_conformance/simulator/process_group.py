"""
The process group of the simulated accelerator: the backend "simccl", with what ProcessGroupNCCL does with streams.

    dist.init_process_group("cpu:gloo,sim:simccl")

Work on a stream of the group, Works and futures that make streams wait, tensors held until then, checks and errors as
NCCL's: csrc/collectives.h says it in full. The bytes go through gloo between processes, and within the process between
ranks that are threads (`threads.run_ranks`). Reductions on the way are gloo's, so that a program gets the numbers that
it gets on the CPU; between threads they add in the order of ranks. An average is the sum, divided by the size.

A collective does not block the host: what it owes to an output is fetched when somebody touches that output. So ranks
that issue the collectives of different groups in different orders run as they do on an accelerator. What is left of
immediate execution is that the host, not only a stream, waits at that touch: csrc/deliveries.h.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from typing import Any, Final

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store
from torch.distributed import distributed_c10d

from fsdp_conformance.config import SIMULATED
from fsdp_conformance.errors import ConfigError, EnvironmentUnavailable
from fsdp_conformance.simulator import build

__all__ = ["BACKEND", "register", "thread_world"]

#: The backend for tensors on the device; between ranks that are threads also for those on the CPU, because gloo would
#: connect each of them with each.
BACKEND: Final = "simccl"

_world_numbers = count()

#: The world of threads that the process runs at present; groups that are made now belong to it.
_thread_world: str | None = None


def register() -> None:
    """Make the backend known to torch. May be called again."""
    backends = distributed_c10d.Backend
    if BACKEND.upper() in backends._plugins:
        return
    backends.register_backend(BACKEND, _create, extended_api=True, devices=[SIMULATED])
    # Of several backends in one group c10d makes the first plugin the default one, as it does NCCL; but it looks for it
    # under its name in capitals, where names are in small letters (2.6 to 2.13), and then warns that there is none.
    backends._plugins = {BACKEND: backends._plugins[BACKEND.upper()], **backends._plugins}


@contextmanager
def thread_world() -> Iterator[str]:
    """
    Groups that are made inside are of ranks that are threads of this process. Yields the world's name.

    There is one world at a time: torch keeps the groups of all threads apart only while all of them are ranks.
    """
    global _thread_world
    if _thread_world is not None:
        raise ConfigError(
            [f"a second world of threads, but should be one at a time ({_thread_world})"], where="run_ranks"
        )
    _thread_world = f"world {next(_world_numbers)}"
    try:
        yield _thread_world
    finally:
        _extension().forget_thread_world(_thread_world)
        _thread_world = None


def _create(options: Any, backend_options: Any) -> dist.Backend:
    """The backend of a group. `options` are torch's _DistributedBackendOptions, the others `ProcessGroupOptions`."""
    extension = _extension()
    group: dist.Backend
    timeout_s = options.timeout.total_seconds()
    if _thread_world is not None:
        # Threads count their groups apart, so that two groups can have one name: their ranks are part of it.
        ranks = ",".join(map(str, options.global_ranks_in_group)) or "all"
        group = extension.group_of_threads(
            _thread_world,
            f"{options.group_id} of ranks {ranks}",
            options.group_rank,
            options.group_size,
            timeout_s,
            _high_priority(backend_options),
        )
        return group
    group = extension.group_over_gloo(
        _gloo,
        options.store,
        options.group_id,
        options.group_rank,
        options.group_size,
        timeout_s,
        _high_priority(backend_options),
    )
    return group


def _gloo(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroupGloo:
    """The gloo backend under a group, also under one that is split off."""
    return ProcessGroupGloo(PrefixStore(BACKEND, store), rank, size, timeout=timeout)


def _high_priority(backend_options: Any) -> bool:
    return bool(getattr(backend_options, "is_high_priority_stream", False))


def _extension() -> Any:
    extension = build.loaded()
    if extension is None:
        raise EnvironmentUnavailable(
            "the simulated accelerator is not active, but should be before its process groups are made: call "
            "fsdp_conformance.simulator.device.activate()"
        )
    return extension
