"""
Simulated ranks on the simulated accelerator: rank r is a thread whose device is sim:r.

    losses = run_ranks(16, train, timeout_s=120)

`harness.simulated_ranks` has the ranks; here is what the device adds. Collectives of its tensors go through memory
(`process_group`), and where a thread would block for a peer, its turn passes on. What a device draws are the rank's own
random numbers, the same in every run. The host's clock of the checker is common: what one rank's host waits for counts
as known to all. Ranks share no memory on their devices, so that this hides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.harness.simulated_ranks import ranks as simulated_ranks
from fsdp_conformance.harness.simulated_ranks import scheduler as rank_scheduler
from fsdp_conformance.simulator import build, device, process_group

__all__ = ["MAX_RANKS", "enable", "run_ranks"]

T = TypeVar("T")

#: A device index has 8 bits.
MAX_RANKS: Final = 127


def run_ranks(world_size: int, function: Callable[[int], T], *, timeout_s: float) -> list[T]:
    """
    Call `function(rank)` on `world_size` simulated ranks that have a simulated device each; their results.

    As `harness.simulated_ranks.run_ranks`, with the device active. Raises ConfigError for more than MAX_RANKS ranks,
    too.
    """
    device.activate()
    return simulated_ranks.run_ranks(world_size, function, timeout_s=timeout_s)


def enable() -> None:
    """Give simulated ranks of this process a device each, from now on. The device is active. May be called again."""
    if device.set_device not in simulated_ranks.device_ranks:
        simulated_ranks.device_worlds.append(_world)
        simulated_ranks.device_ranks.append(device.set_device)


@contextmanager
def _world(world_size: int) -> Iterator[None]:
    """As many devices as ranks, and threads that pass on their turn where they would block."""
    if world_size > MAX_RANKS:
        raise ConfigError([f"world_size={world_size}, but should be at most {MAX_RANKS}"], where="run_ranks")
    if device.device_count() < world_size:
        device.activate(world_size)
    extension = build.load()
    with process_group.thread_world():
        extension.set_thread_waiter(_wait)
        try:
            yield
        finally:
            extension.set_thread_waiter(None)


def _wait(ready: Callable[[], bool], describe: Callable[[], str]) -> None:
    rank_scheduler.running().wait_until(ready, describe)
