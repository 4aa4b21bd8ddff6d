"""Where the gradients of a chunk are gathered, and how they are reduced: decided from the chunk's configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fsdp_conformance.engine.chunks.checks import shard_problems
from fsdp_conformance.engine.chunks.gradient_buffer import GradientBuffer
from fsdp_conformance.engine.chunks.reduction import DivideFactors, ReductionPlan, divide_factors
from fsdp_conformance.engine.errors import TensorRefused

if TYPE_CHECKING:
    from fsdp_conformance.engine.chunks.chunk import Chunk


def open_buffer(chunk: Chunk, *, into: Tensor | None, in_payload: bool) -> GradientBuffer:
    """A gradient buffer for `chunk`. See `Chunk.open_gradients`."""
    if into is not None or in_payload:
        _check(chunk, into, in_payload=in_payload, where=f"open_gradients of {chunk!r}")
    if into is not None:
        return GradientBuffer(chunk.layout, into, owned=True, holds_all=True)
    if in_payload:
        chunk.access()
        return GradientBuffer(chunk.layout, chunk.payload, in_payload=True)
    if chunk.reduces_in_place:
        payload = torch.empty(chunk.numel, dtype=chunk.reduce_dtype, device=chunk.pool.device)
        return GradientBuffer(chunk.layout, payload, owned=True)
    block = chunk.pool.lease_cached(chunk.numel, chunk.reduce_dtype)
    return GradientBuffer(chunk.layout, block.payload, block=block)


def reduction_plan(chunk: Chunk, factors: DivideFactors | None, all_reduce: bool) -> ReductionPlan:
    """What a reduction of `chunk` does."""
    num_ranks = chunk.layout.world_size * chunk.num_replicas
    return ReductionPlan(
        group=chunk.group,
        world_size=chunk.layout.world_size,
        replica_group=chunk.replica_group if chunk.num_replicas > 1 else None,
        all_reduce=all_reduce,
        factors=factors or divide_factors(num_ranks, chunk.reduce_dtype),
        dtype=chunk.dtype,
        device=chunk.shard_device,
        pin_memory=chunk.pins_memory,
    )


def _check(chunk: Chunk, into: Tensor | None, *, in_payload: bool, where: str) -> None:
    """Raises TensorRefused if gradients cannot be gathered where they should be."""
    problems = shard_problems(chunk, into, "into", chunk.dtype, chunk.shard_device)
    if into is not None and not (chunk.reduces_in_place and chunk.num_replicas == 1):
        problems.append("into is given, but should be None: gradients are reduced, cast or moved before they are added")
    if into is not None and in_payload:
        problems.append("into and in_payload are given, but should be one of them")
    if in_payload and chunk.reduce_dtype is not chunk.compute_dtype:
        problems.append(f"in_payload with reduce_dtype={chunk.reduce_dtype}, but should be {chunk.compute_dtype}")
    if in_payload and chunk.config.alias_whole:
        problems.append("in_payload and alias_whole, but should be one of them: the shard would be overwritten")
    if problems:
        raise TensorRefused(problems, where=where)
