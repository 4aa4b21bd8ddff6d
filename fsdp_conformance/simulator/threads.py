"""
Simulated ranks on the simulated accelerator: rank r is a thread with device sim:r.

    activate()
    losses = run_ranks(16, train, timeout_s=120)

`harness.simulated_ranks` provides the ranks; this module adds their devices. Collectives of device tensors go through
memory (`process_group`), and where a thread would block for a peer, another rank takes its turn. Each device draws its
rank's own random numbers, the same in every run. All ranks share the checker's host clock: what the host of one rank
waits for counts as known to all. Ranks do not share device memory, so this hides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.harness.simulated_ranks import ranks as simulated_ranks
from fsdp_conformance.harness.simulated_ranks import scheduler as rank_scheduler
from fsdp_conformance.simulator import build, device, process_group

__all__ = ["enable"]


def enable() -> None:
    """From now on give every simulated rank of this process a device. May be called more than once."""
    if device.set_device not in simulated_ranks.device_ranks:
        simulated_ranks.device_worlds.append(_world)
        simulated_ranks.device_ranks.append(device.set_device)


@contextmanager
def _world(world_size: int) -> Iterator[None]:
    """At least as many devices as ranks, and threads that pass on their turn where they would block."""
    if world_size > device.MAX_DEVICES:
        raise ConfigError([f"world_size must be at most {device.MAX_DEVICES}, got {world_size}"], where="run_ranks")
    extension = build.active()
    if device.device_count() < world_size:
        extension.set_num_devices(world_size)
    with process_group.thread_world():
        extension.set_thread_waiter(_wait)
        try:
            yield
        finally:
            extension.set_thread_waiter(None)


def _wait(ready: Callable[[], bool], describe: Callable[[], str]) -> None:
    rank_scheduler.running().wait_until(ready, describe)
