"""
Simulated ranks on the simulated accelerator: rank r is a thread with device sim:r.

    activate()
    losses = run_ranks(16, train, timeout_s=120)

Whoever runs the ranks (`harness.simulated_ranks`) enters `thread_world` through `torch.sim`, and sets each thread's
device. Collectives of device tensors go through memory (`process_group`), and where a thread would block for a peer,
another rank takes its turn. Each device draws its rank's own random numbers, the same in every run. All ranks share the
checker's host clock: what the host of one rank waits for counts as known to all. Ranks do not share device memory, so
this hides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.simulator.device import build, devices, process_group

__all__ = ["thread_world"]


@contextmanager
def thread_world(world_size: int, wait: Callable[[Callable[[], bool], Callable[[], str]], object]) -> Iterator[None]:
    """
    A context with at least as many devices as ranks, in which threads pass on their turn where they would block.

    `wait(ready, describe)` returns when `ready()` is true; `describe()` says what the thread waits for. Raises
    ConfigError for more ranks than there can be devices.
    """
    if world_size > devices.MAX_DEVICES:
        raise ConfigError([f"world_size must be at most {devices.MAX_DEVICES}, got {world_size}"], where="run_ranks")
    extension = build.active()
    if devices.device_count() < world_size:
        extension.set_num_devices(world_size)
    with process_group.thread_world():
        extension.set_thread_waiter(wait)
        try:
            yield
        finally:
            extension.set_thread_waiter(None)
