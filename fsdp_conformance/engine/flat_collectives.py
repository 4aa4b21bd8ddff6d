"""
Asynchronous collectives of flat tensors, under the names that the installed torch has for them.

torch 2.13 renamed `all_gather_into_tensor` and `reduce_scatter_tensor`. This is the only place that looks them up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from fsdp_conformance.engine.errors import EngineError

_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(output: Tensor, shard: Tensor, group: ProcessGroup) -> Work:
    """
    Start gathering every rank's `shard` into `output`, in group order.

    output: 1D, contiguous, group size x shard.numel(); `shard` may be this rank's own slice of it.
    """
    return cast(Work, _all_gather(output, shard, group=group, async_op=True))


def reduce_scatter(shard: Tensor, inputs: Tensor, group: ProcessGroup) -> Work:
    """
    Start summing `inputs` over the ranks, each keeping its own slice in `shard`.

    inputs: 1D, contiguous, group size x shard.numel(); `shard` may be this rank's own slice of it.
    """
    return cast(Work, _reduce_scatter(shard, inputs, group=group, async_op=True))


def broadcast(tensor: Tensor, source: int, group: ProcessGroup) -> Work:
    """Start overwriting `tensor` (1D, contiguous) with that of group rank `source`."""
    return cast(Work, dist.broadcast(tensor, dist.get_global_rank(group, source), group=group, async_op=True))


def scatter(output: Tensor, parts: Sequence[Tensor], source: int, group: ProcessGroup) -> Work:
    """Start filling `output` (1D, contiguous) with this rank's entry of the parts of group rank `source`."""
    given = list(parts) or None  # only the source has any
    rank = dist.get_global_rank(group, source)
    return cast(Work, dist.scatter(output, given, src=rank, group=group, async_op=True))


def all_to_all(
    output: Tensor, output_sizes: Sequence[int], inputs: Tensor, input_sizes: Sequence[int], group: ProcessGroup
) -> Work:
    """
    Start sending part i of `inputs` to group rank i, and receiving part i of `output` from it.

    output, inputs: 1D, contiguous, in one part for each rank, of these sizes, which may be 0.
    """
    work = dist.all_to_all_single(output, inputs, list(output_sizes), list(input_sizes), group=group, async_op=True)
    return cast(Work, work)


def all_reduce(tensor: Tensor, group: ProcessGroup) -> Work:
    """Start summing `tensor` over the ranks, in place."""
    return cast(Work, dist.all_reduce(tensor, group=group, async_op=True))


def all_reduce_max(tensor: Tensor, group: ProcessGroup) -> Work:
    """Start taking the maximum of `tensor` over the ranks, in place."""
    return cast(Work, dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group, async_op=True))


def resolve_group(group: ProcessGroup | None) -> ProcessGroup:
    """
    The group itself, or the default one for None.

    Raises EngineError if this rank is not in it, or if there is no default group yet.
    """
    resolved: object = group if group is not None else dist.group.WORLD
    if resolved is None:
        raise EngineError(
            "process_group must be given if torch.distributed is not initialised, got None", where="engine"
        )
    # `new_group` returns a placeholder on ranks outside the group.
    if not isinstance(resolved, ProcessGroup) or dist.get_rank(resolved) < 0:
        raise EngineError(f"process_group must contain this rank, got {resolved!r}", where="engine")
    return resolved
