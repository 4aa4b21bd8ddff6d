"""
The mean of gradients over the ranks, by asynchronous collectives: right ways, and wrong ways that gloo forgives.

The wrong ones look at a buffer until it has changed, where they should wait. On gloo that gives the right result every
time, so only provocation shows what is wrong.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work
from torch.distributed import _functional_collectives as functional

from fsdp_conformance.engine.communication import all_gather, all_reduce
from fsdp_conformance.tests.harness.recording.small_training import world

Exchange = Callable[[Sequence[Tensor]], list[Tensor]]

#: No gradient has it.
_NOT_YET = -1.0e30

#: Far more than gloo takes.
_PATIENCE_S = 30.0

#: A block this large has fresh pages of zeros: the allocator keeps no smaller ones from before.
_LARGE = 40 * 2**20


def _gathered(shard: Tensor) -> tuple[Tensor, Work]:
    output = torch.full((dist.get_world_size() * shard.numel(),), _NOT_YET)
    return output, all_gather(output, shard, world())


def _mean(gathered: Tensor) -> Tensor:
    return gathered.view(dist.get_world_size(), -1).mean(0)


def _watch(buffer: Tensor) -> None:
    """Until all of it has changed."""
    end = time.monotonic() + _PATIENCE_S
    while bool((buffer == _NOT_YET).any()) and time.monotonic() < end:
        os.sched_yield()


# Right.


def in_order(grads: Sequence[Tensor]) -> list[Tensor]:
    """Waits in the order of issue."""
    under_way = [_gathered(grad) for grad in grads]
    for _, work in under_way:
        work.wait()
    return [_mean(output) for output, _ in under_way]


def in_reverse(grads: Sequence[Tensor]) -> list[Tensor]:
    """Waits for the last one first."""
    under_way = [_gathered(grad) for grad in grads]
    for _, work in reversed(under_way):
        work.wait()
    return [_mean(output) for output, _ in under_way]


def by_polling(grads: Sequence[Tensor]) -> list[Tensor]:
    """Asks whether each has completed."""
    under_way = [_gathered(grad) for grad in grads]
    for _, work in under_way:
        while not work.is_completed():
            os.sched_yield()
    return [_mean(output) for output, _ in under_way]


def by_future(grads: Sequence[Tensor]) -> list[Tensor]:
    """Takes the results from futures, in place."""
    copies = [grad.clone() for grad in grads]
    futures = [all_reduce(copy, world()).get_future() for copy in copies]
    return [future.wait()[0] / dist.get_world_size() for future in futures]


def by_barrier(grads: Sequence[Tensor]) -> list[Tensor]:
    """Keeps no Work: a barrier of gloo comes after everything before it."""
    outputs = [_gathered(grad)[0] for grad in grads]
    dist.barrier()
    return [_mean(output) for output in outputs]


def functionally(grads: Sequence[Tensor]) -> list[Tensor]:
    """By functional collectives."""
    sums = [functional.all_reduce(grad, "sum", world()) for grad in grads]
    return [functional.wait_tensor(each) / dist.get_world_size() for each in sums]


# Wrong.


def reads_without_waiting(grads: Sequence[Tensor]) -> list[Tensor]:
    """Reads an output that has not been waited for."""
    under_way = [_gathered(grad) for grad in grads]
    for output, _ in under_way:
        _watch(output)
    means = [_mean(output) for output, _ in under_way]
    for _, work in under_way:
        work.wait()
    return means


def waits_for_the_last(grads: Sequence[Tensor]) -> list[Tensor]:
    """Believes that the others have completed when the last one has."""
    under_way = [_gathered(grad) for grad in grads]
    under_way[-1][1].wait()
    for output, _ in under_way:
        _watch(output)
    means = [_mean(output) for output, _ in under_way]
    for _, work in under_way:
        work.wait()
    return means


def reuses_its_input(grads: Sequence[Tensor]) -> list[Tensor]:
    """Overwrites the buffer that a collective sends, before it has been waited for."""
    staging = torch.empty_like(grads[0])
    means = []
    for grad in grads:
        staging.copy_(grad)
        output, work = _gathered(staging)
        _watch(output)
        staging.fill_(7.0)
        work.wait()
        means.append(_mean(output))
    return means


def trusts_new_memory(grads: Sequence[Tensor]) -> list[Tensor]:
    """Adds to memory that was never set to zero."""
    means = []
    for mean in in_order(grads):
        total = torch.empty(_LARGE // 4)
        total[: mean.numel()] += mean
        means.append(total[: mean.numel()].clone())
    return means


def trusts_grown_memory(grads: Sequence[Tensor]) -> list[Tensor]:
    """Brings a freed buffer back, and adds to it without setting it to zero."""
    means = []
    for mean in in_order(grads):
        total = torch.zeros(_LARGE // 4)
        total.untyped_storage().resize_(0)
        total.untyped_storage().resize_(_LARGE)
        total[: mean.numel()] += mean
        means.append(total[: mean.numel()].clone())
    return means


RIGHT: tuple[Exchange, ...] = (in_order, in_reverse, by_polling, by_future, by_barrier, functionally)
WRONG: tuple[Exchange, ...] = (
    reads_without_waiting, waits_for_the_last, reuses_its_input, trusts_new_memory, trusts_grown_memory,
)  # fmt: skip
