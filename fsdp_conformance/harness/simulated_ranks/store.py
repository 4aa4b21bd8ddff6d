"""The store of simulated ranks: a dictionary whose readers let the other ranks run while they wait."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store
from torch.distributed import DistBackendError

from fsdp_conformance.errors import RankTimedOut
from fsdp_conformance.harness.simulated_ranks import scheduler as rank_scheduler


class SimulatedStore(Store):
    """One store for all ranks. It ignores timeouts: the scheduler knows when a key can never be set."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        """Store the value."""
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        """The value, as soon as there is one."""
        self.wait([key])
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 at first, and return it."""
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total

    def check(self, keys: list[str]) -> bool:
        """True if all keys are set. Lets the other ranks run first, so that a caller can poll."""
        rank_scheduler.running().give_way()
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """
        Let the other ranks run until all keys are set.

        Raises RankTimedOut if no rank can go on: torch's barrier on a store retries after a RuntimeError.
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
        """Set `desired` if the value is `expected`, or if both are missing. Returns the value afterwards."""
        old = self._values.get(key)
        value = expected.encode() if isinstance(expected, str) else bytes(expected)
        if old == value or (old is None and not value):
            self.set(key, desired)
        return self._values.get(key, value)

    def delete_key(self, key: str) -> bool:
        """Delete a key. Returns whether it was set."""
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """The number of keys."""
        return len(self._values)
