"""The store at which simulated ranks meet: a dictionary, whose readers let the other ranks run while they wait."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store
from torch.distributed import DistBackendError

from fsdp_conformance.errors import RankTimedOut
from fsdp_conformance.harness.simulated_ranks import scheduler as rank_scheduler


class SimulatedStore(Store):
    """One for all ranks. Timeouts are not looked at: that a key never comes is known without them."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        """Keep the value."""
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        """The value, once there is one."""
        self.wait([key])
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 at first, and return it."""
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there. Whoever asks lets the others run, so that it may ask again and again."""
        rank_scheduler.running().give_way()
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """
        Let the other ranks run until all keys are there.

        Raises RankTimedOut if no rank can go on: torch's barrier on a store takes a RuntimeError for a reason to ask
        again.
        """
        scheduler = rank_scheduler.running()
        try:
            scheduler.wait_until(
                lambda: all(key in self._values for key in keys),
                lambda: f"the keys {', '.join(key for key in keys if key not in self._values)} of the store",
            )
        except DistBackendError as error:
            raise RankTimedOut(str(error), rank=scheduler.rank) from None

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Keep `desired` if the value is `expected`, or if both are missing; the value that is there afterwards."""
        old = self._values.get(key)
        wanted = expected.encode() if isinstance(expected, str) else bytes(expected)
        if old == wanted or (old is None and not wanted):
            self.set(key, desired)
        return self._values.get(key, wanted)

    def delete_key(self, key: str) -> bool:
        """Forget a key; whether it was there."""
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """How many there are."""
        return len(self._values)
