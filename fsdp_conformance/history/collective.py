"""A collective as it was observed on one rank: the unit of every communication check."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import StrEnum


class Op(StrEnum):
    """A collective, independent of its name in backends and torch versions."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    GATHER = "gather"
    SCATTER = "scatter"
    ALL_TO_ALL = "all_to_all"
    BARRIER = "barrier"
    SEND = "send"
    RECV = "recv"


#: Calls in which two ranks take part, with different ones.
POINT_TO_POINT = frozenset({Op.SEND, Op.RECV})


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveRecord:
    """One collective call."""

    seq: int
    """Position among all collectives of this rank, from 0."""
    op: Op
    name: str
    """The method of the process group that was called, e.g. "_allgather_base"."""
    group: tuple[int, ...]
    """Global ranks of the group."""
    nbytes: int
    """Bytes of the unsharded side: all-gather output, reduce-scatter input, all-reduce and broadcast buffer."""
    dtype: str
    """"float32"; several are joined by "/"; empty for a barrier."""
    device: str = ""
    """Type of the tensors' device; empty for a barrier."""
    reduce_op: str = ""
    """SUM, AVG, ...; empty for a collective that does not reduce."""
    num_tensors: int = 1
    """More than one for coalesced and list forms."""
    step: int | None = None
    phase: str = ""
    """The phase of the training loop: setup, forward, backward, step, eval, observe."""
    site: str = ""
    """Innermost frame outside torch.distributed's own functions, "file.py:123 in function"."""

    def line(self) -> str:
        """The record in one line, without parts that may differ between machines (site, torch's name of the method)."""
        size = f"{self.nbytes}B {self.dtype}" if self.dtype else ""
        return " ".join(
            part for part in (self.phase, self.op.value, size, self.reduce_op, _in_brackets(self.group)) if part
        )


@functools.lru_cache(maxsize=256)
def _in_brackets(group: tuple[int, ...]) -> str:
    """ "[0,1]". Made once per group: a large one is in many records."""
    return f"[{','.join(map(str, group))}]"
