"""How a chunk stores, gathers and reduces: frozen data, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fsdp_conformance.engine.chunks.memory_pool import BlockKind
from fsdp_conformance.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkConfig:
    """What may differ from chunk to chunk."""

    block: BlockKind = BlockKind.RESIZED
    """Where the chunk is unsharded: RESIZED, a block of its own with memory only while it is leased; PUBLIC, a block
    that it shares in turns; PRIVATE, fused (ZeRO-2): a block that it never returns."""
    compute_dtype: torch.dtype | None = None
    """Of the unsharded chunk and of the all-gather; None: the chunk's. A copy in it exists only while unsharded."""
    reduce_dtype: torch.dtype | None = None
    """Of the gradient buffer and of the reduce-scatter; None: the compute dtype."""
    shard_device: torch.device | None = None
    """Where the shard, and its reduced gradient, live; None: the device of the pool. The CPU: offloaded."""
    pin_memory: bool = True
    """Whether an offloaded shard and its gradient are in pinned memory. Means nothing where the pool is on the CPU."""
    align: int = 1
    """Every tensor begins at a multiple of that many elements. The gaps are padding, and go over the wire."""
    bind: bool = True
    """Whether the chunk sets `tensor.data` of its tensors: to views of the unsharded chunk while there is one, else to
    a stand-in of their shape without memory, all NaN. False: the caller uses `views`."""
    alias_whole: bool = False
    """In a group of one rank: whether the shard itself serves as the unsharded chunk, without block or copy. Then a
    write to an unsharded tensor is a write to the shard."""
    track_statistics: bool = True
    """Whether a reduction measures the squared norm and the overflow of its result."""

    def __post_init__(self) -> None:
        problems = []
        if self.block is BlockKind.CACHED:
            problems.append("block=CACHED, but should be RESIZED, PUBLIC or PRIVATE")
        if self.align < 1:
            problems.append(f"align={self.align}, but should be at least 1")
        for name in ("compute_dtype", "reduce_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not dtype.is_floating_point:
                problems.append(f"{name}={dtype}, but should be a floating-point dtype, or None")
        if problems:
            raise ConfigError(problems, where="ChunkConfig")
