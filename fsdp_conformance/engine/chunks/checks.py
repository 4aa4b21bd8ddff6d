"""What a chunk checks before it does as it is told, every problem in one error."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fsdp_conformance.engine.chunks.gradient_buffer import GradientBuffer
from fsdp_conformance.engine.chunks.memory_pool import BlockKind, BlockSpec
from fsdp_conformance.engine.chunks.reduction import DivideFactors
from fsdp_conformance.engine.chunks.state import RELEASABLE, ChunkState, TensorState
from fsdp_conformance.engine.errors import ChunkError, ChunkFull, ChunkStateError, TensorRefused

if TYPE_CHECKING:
    from fsdp_conformance.engine.chunks.chunk import Chunk


def check_fit(chunk: Chunk, numel: int, world_size: int) -> None:
    """Raises ChunkError for a size that the group does not divide, or a chunk that its pool has no blocks for."""
    problems = []
    if numel < 1 or numel % world_size:
        problems.append(f"numel={numel}, but should be a positive multiple of the group size {world_size}")
    if not chunk.dtype.is_floating_point:
        problems.append(f"dtype={chunk.dtype}, but should be a floating-point dtype")
    spec = chunk.pool.public_spec
    if chunk.config.block is BlockKind.PUBLIC and spec not in (None, BlockSpec(numel, chunk.compute_dtype)):
        problems.append(f"chunk of {numel} x {chunk.compute_dtype}, but should be as the public blocks, {spec}")
    if problems:
        raise ChunkError(problems, where=f"chunk {chunk.chunk_id}")


def check_state(chunk: Chunk, states: Container[ChunkState], action: str) -> None:
    """Raises ChunkStateError unless the chunk is in one of `states`."""
    if chunk.state not in states:
        wanted = " or ".join(state.name for state in ChunkState if state in states)
        raise ChunkStateError(
            f"the chunk is {chunk.state.name}, but should be {wanted}", where=f"{action} of {chunk!r}"
        )


def check_appended(chunk: Chunk, tensor: Tensor, *, known: bool) -> None:
    """Raises TensorRefused for a tensor that the chunk cannot hold, ChunkFull for one that it has no room for."""
    where = f"append to {chunk!r}"
    problems = []
    if tensor.dtype is not chunk.dtype:
        problems.append(f"dtype={tensor.dtype}, but should be {chunk.dtype}")
    if tensor.layout is not torch.strided or tensor.is_meta:
        kind = "meta" if tensor.is_meta else tensor.layout
        problems.append(f"tensor {tuple(tensor.shape)} is {kind}, but should be strided and have data")
    if known:
        problems.append(f"tensor {tuple(tensor.shape)} is in the chunk, but should be appended once")
    if problems:
        raise TensorRefused(problems, where=where)
    room = chunk.numel - chunk.layout.next_offset()
    if tensor.numel() > room:
        raise ChunkFull(f"numel={tensor.numel()}, but should be at most {room}", where=where)


def check_release(chunk: Chunk) -> None:
    """Raises ChunkStateError if the chunk keeps its block, has none, or one of its tensors is in use."""
    if chunk.is_fused:
        raise ChunkStateError(
            "the chunk is fused, but should not be: its block is its own", where=f"release of {chunk!r}"
        )
    check_state(chunk, {ChunkState.GATHERING, ChunkState.UNSHARDED}, "release")
    if not chunk.states.all_in(RELEASABLE):
        problems = [f"{text}, but should be at rest" for text in chunk.states.outside(RELEASABLE)]
        raise ChunkStateError(problems, where=f"release of {chunk!r}")


def check_readable(chunk: Chunk, gradients: GradientBuffer) -> None:
    """Raises ChunkStateError if a gradient has overwritten its tensor."""
    if gradients.in_payload and any(gradients.present):
        raise ChunkStateError(
            "tensors are overwritten by their gradients, but should be read again",
            where=f"access of {chunk!r}",
            hint="Open its gradients without in_payload",
        )


def check_reduction(
    chunk: Chunk, *, into: Tensor | None, partial: Tensor | None, factors: DivideFactors | None, in_place: bool
) -> None:
    """
    Raises ChunkStateError unless all gradients are there, TensorRefused for what cannot take part in the reduction.

    `in_place`: the gradient buffer holds what was accumulated before, which must not be divided again.
    """
    ready = {TensorState.READY_FOR_REDUCE}
    check_state(chunk, frozenset(ChunkState) - {ChunkState.OPEN}, "reduce")
    if not chunk.states.all_in(ready):
        raise ChunkStateError(
            [f"{text}, but should be READY_FOR_REDUCE" for text in chunk.states.outside(ready)],
            where=f"reduce of {chunk!r}",
        )
    problems = []
    if factors is not None and not (factors.before > 0 and factors.after > 0):
        problems.append(f"factors={tuple(factors)}, but should be above 0")
    if in_place and (into is not None or factors not in (None, DivideFactors(1, 1))):
        problems.append("the buffer was opened with `into`, but `into` and `factors` should then not be given again")
    problems += shard_problems(chunk, into, "into", chunk.dtype, chunk.shard_device)
    problems += shard_problems(chunk, partial, "partial", chunk.reduce_dtype, chunk.pool.device)
    if problems:
        raise TensorRefused(problems, where=f"reduce of {chunk!r}")


def shard_problems(
    chunk: Chunk, tensor: Tensor | None, name: str, dtype: torch.dtype, device: torch.device
) -> list[str]:
    """What is wrong with a tensor that should be like the chunk's shard."""
    if tensor is None:
        return []
    expected = (torch.Size([chunk.layout.shard_numel]), dtype, device.type, True)
    if (tensor.shape, tensor.dtype, tensor.device.type, tensor.is_contiguous()) == expected:
        return []
    found = f"{name} {tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}"
    return [f"{found}, but should be contiguous, ({chunk.layout.shard_numel},) of {dtype} on {device}"]
