"""
The process group of the simulated accelerator: the backend "simccl", which treats streams as ProcessGroupNCCL does.

    dist.init_process_group("cpu:gloo,sim:simccl")

Collectives run on the group's stream, Works and futures make streams wait and keep tensors alive until then, and
arguments are checked as NCCL checks them; csrc/group.h has the details. The bytes go through gloo between processes,
and through memory between ranks that are threads (`threads`). gloo does the reductions, so a program gets the same
numbers as on the CPU; between threads, values are added in the order of ranks. An average is the sum divided by the
size.

A collective does not block the host: its result is fetched when the output is first touched. So ranks may issue the
collectives of different groups in different orders, as on an accelerator. One difference remains: when an output is
touched, the host waits for the peers, not just a stream (csrc/deliveries.h).

Sparse tensors are all-reduced only in groups for which a program asks for gloo (`as_gloo`): NCCL does not support it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from itertools import count
from typing import Any, Final

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store
from torch.distributed import distributed_c10d

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.simulator.device import SIMULATED, build

__all__ = ["BACKEND", "as_gloo", "is_gloo", "register", "thread_world", "watch_groups_with"]

#: The backend for tensors on the device; between ranks that are threads, also for CPU tensors, because gloo would
#: connect every pair of ranks.
BACKEND: Final = "simccl"

_world_numbers = count()

#: For names of backends that programs make themselves.
_made_numbers = count()

#: The world of threads that the process is running; new groups belong to it.
_thread_world: str | None = None

#: Called with each new group between processes that stands for NCCL, and torch's options for it.
_watch: Callable[[Any, Any], None] | None = None

#: Whether the program asked for gloo on the device; None if it named no backend.
_asked_for_gloo: ContextVar[bool | None] = ContextVar("asked_for_gloo", default=None)


@contextmanager
def as_gloo(choice: bool | None) -> Iterator[None]:
    """
    A context in which new groups do what gloo does beyond NCCL: they all-reduce sparse tensors.

    With None, a group is like the default group, as for `new_group` without a backend.
    """
    token = _asked_for_gloo.set(choice)
    try:
        yield
    finally:
        _asked_for_gloo.reset(token)


def is_gloo(group: Any) -> bool:
    """True if the program asked for gloo for the tensors on the device of a group."""
    devices = [device for device in group._device_types if device.type == SIMULATED]
    # A recorder may stand in for the backend.
    return any(getattr(group._get_backend(device), "allows_sparse", False) for device in devices)


def watch_groups_with(watch: Callable[[Any, Any], None] | None) -> None:
    """Call `watch` with each new group from now on; None stops that."""
    global _watch
    _watch = watch


def _allows_sparse() -> bool:
    choice = _asked_for_gloo.get()
    if choice is not None:
        return choice
    return dist.is_initialized() and is_gloo(distributed_c10d._get_default_group())


def register() -> None:
    """Register the backend with torch. May be called more than once."""
    backends = distributed_c10d.Backend
    if BACKEND.upper() in backends._plugins:
        return
    backends.register_backend(BACKEND, _create, extended_api=True, devices=[SIMULATED])
    # If a group has several backends, c10d makes the first plugin the default, as it does with NCCL. But it looks it up
    # under its upper-case name among lower-case names (2.6 to 2.13), and warns that it has found none.
    backends._plugins = {BACKEND: backends._plugins[BACKEND.upper()], **backends._plugins}


@contextmanager
def thread_world() -> Iterator[str]:
    """
    A context in which the ranks of new groups are threads of this process. Yields the world's name.

    There can be one world at a time: torch keeps the groups of threads apart only while all threads are ranks.
    """
    global _thread_world
    if _thread_world is not None:
        raise ConfigError(
            [f"a process can run one world of threads at a time, and {_thread_world} has not ended"], where="run_ranks"
        )
    _thread_world = f"world {next(_world_numbers)}"
    try:
        yield _thread_world
    finally:
        build.active().forget_thread_world(_thread_world)
        _thread_world = None


def _create(options: Any, backend_options: Any) -> dist.Backend:
    """Create a group's backend from torch's _DistributedBackendOptions and the extension's `ProcessGroupOptions`."""
    allows_sparse = _allows_sparse()
    group = _made(options, backend_options)
    group.options.global_ranks_in_group = list(options.global_ranks_in_group)
    if allows_sparse:
        group.allow_sparse()
    elif _watch is not None and _thread_world is None:
        _watch(group, options)
    made: dist.Backend = group
    return made


def _made(options: Any, backend_options: Any) -> Any:
    extension = build.active()
    timeout_s = options.timeout.total_seconds()
    if _thread_world is not None:
        # Threads number their groups separately, so two groups can have the same name: add their ranks to it.
        ranks = ",".join(map(str, options.global_ranks_in_group)) or "all"
        return extension.group_of_threads(
            _thread_world,
            f"{options.group_id} of ranks {ranks}",
            options.group_rank,
            options.group_size,
            timeout_s,
            _high_priority(backend_options),
        )
    return extension.group_over_gloo(
        _gloo,
        options.store,
        options.group_id,
        options.group_rank,
        options.group_size,
        timeout_s,
        _high_priority(backend_options),
    )


def made_directly(store: Store, rank: int, size: int, timeout: timedelta) -> dist.Backend:
    """A backend that a program makes itself, between processes, as `ProcessGroupNCCL(store, rank, size)` does."""
    backend: dist.Backend = build.active().group_over_gloo(
        _gloo, store, f"made {next(_made_numbers)}", rank, size, timeout.total_seconds(), False
    )
    return backend


def _gloo(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroupGloo:
    """The gloo backend beneath a group, or beneath a group that was split off."""
    return ProcessGroupGloo(PrefixStore(BACKEND, store), rank, size, timeout=timeout)


def _high_priority(backend_options: Any) -> bool:
    return bool(getattr(backend_options, "is_high_priority_stream", False))
