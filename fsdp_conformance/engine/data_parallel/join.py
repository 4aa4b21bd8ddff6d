"""
Uneven inputs: a rank that runs out of inputs keeps taking part in the collectives of the others.

Works with torch's `Join` context, alone or with other joinables such as `ZeroRedundancyOptimizer`. In each forward the
ranks that still have inputs call a roll; a rank that has joined answers it and learns what the others will communicate.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

from fsdp_conformance.engine.communication import all_reduce


class RollCall:
    """
    Which ranks still have inputs, and what their forward will do. Collective.

    One all-reduce of a flag per rank and three answers, awaited when one of them is read.
    """

    def __init__(
        self,
        group: ProcessGroup,
        device: torch.device,
        *,
        present: bool,
        keeps_graph: bool = False,
        synchronises: bool = False,
        broadcasts: bool = False,
    ) -> None:
        self._size = group.size()
        flags = [0] * (self._size + 3)
        if present:
            flags[dist.get_rank(group)] = 1
            flags[self._size :] = [int(keeps_graph), int(synchronises), int(broadcasts)]
        self._flags = torch.tensor(flags, dtype=torch.int32).to(device)
        self._work: Work | None = all_reduce(self._flags, group)
        self._answers: list[int] | None = None

    @property
    def present(self) -> list[int]:
        """The group ranks that still have inputs."""
        return [rank for rank, flag in enumerate(self._result()[: self._size]) if flag]

    @property
    def keeps_graph(self) -> bool:
        """True if a backward may follow."""
        return self._result()[self._size] > 0

    @property
    def synchronises(self) -> bool:
        """True if that backward will reduce gradients."""
        return self._result()[self._size + 1] > 0

    @property
    def broadcasts(self) -> bool:
        """True if buffers are broadcast before the forward."""
        return self._result()[self._size + 2] > 0

    def _result(self) -> list[int]:
        if self._answers is None:
            if self._work is not None:
                self._work.wait()
            self._answers = self._flags.tolist()
        return self._answers


def agreed_rank(group: ProcessGroup, device: torch.device, *, candidate: bool) -> int:
    """The highest group rank that is a candidate. Collective. There must be at least one."""
    rank = torch.tensor([dist.get_rank(group) if candidate else -1], dtype=torch.int64).to(device)
    dist.all_reduce(rank, op=dist.ReduceOp.MAX, group=group)
    highest = int(rank.item())
    assert highest >= 0, "no rank is a candidate"
    return highest
