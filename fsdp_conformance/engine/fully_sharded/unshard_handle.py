"""What a user waits for who has unsharded a unit by hand."""

from __future__ import annotations

from fsdp_conformance.engine.fully_sharded.unit import ShardedUnit


class UnshardHandle:
    """
    The handle of a gather. Not to wait is safe: a forward of the unit does, and what nobody uses is freed.

    Source: `UnshardHandle` of torch's FSDP2 (fsdp/_fully_shard/_fully_shard.py).
    """

    def __init__(self, unit: ShardedUnit) -> None:
        self._unit: ShardedUnit | None = unit

    def wait(self) -> None:
        """
        Let the unit's modules see whole parameters, ready for the current stream.

        Nothing happens the second time, or if the unit was resharded since.
        """
        unit, self._unit = self._unit, None
        if unit is not None and unit.is_unsharded:
            unit.finish_unshard()
