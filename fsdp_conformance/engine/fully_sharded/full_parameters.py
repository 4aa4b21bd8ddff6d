"""
Whole parameters outside forward and backward: `summon_full_params`.

Values come from the shards, in the parameters' own dtype, whatever dtype the units compute in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fsdp_conformance.engine.communication import all_reduce_max
from fsdp_conformance.engine.fully_sharded.flat_parameter import FlatParameter
from fsdp_conformance.engine.fully_sharded.unit import ShardedUnit, TrainingState
from fsdp_conformance.errors import ConfigError


@dataclass(slots=True)
class _Summoned:
    """The whole parameters of one flat parameter inside the context."""

    unit: ShardedUnit
    flat: FlatParameter
    shown: list[nn.Parameter]
    """Whole parameters, which keep the gathered data alive; none on a rank that keeps its shards."""


def full_gradients(flat: FlatParameter) -> list[Tensor | None]:
    """The gradients in full; None for a parameter without a gradient on any rank that has elements. Collective."""
    storage = flat.storage
    shard = torch.zeros_like(storage.shard)
    for member, part in zip(flat.members, storage.layout.parts(shard), strict=False):
        if member.parameter.grad is not None:
            part.copy_(member.parameter.grad)
    views = storage.layout.views(flat.storage.gathered(shard))
    # A rank without elements of a parameter cannot tell whether the others have a gradient.
    has_gradient = [member.parameter.grad is not None and member.parameter.numel() > 0 for member in flat.members]
    somewhere = torch.tensor(has_gradient, dtype=torch.int32, device=storage.pool.device)
    if not flat.is_whole:
        all_reduce_max(somewhere, storage.group).wait()
    return [view if there else None for view, there in zip(views, somewhere.tolist(), strict=False)]


@contextmanager
def summon_full_params(
    units: Sequence[ShardedUnit],
    *,
    writeback: bool,
    rank0_only: bool,
    offload_to_cpu: bool,
    with_grads: bool,
) -> Iterator[None]:
    """
    A context in which the modules of `units` see whole parameters. Collective.

    `writeback`: keep what is written inside; every rank must write the same. Between forward and backward, parameters
    that were only read count as unwritten, so that the backward goes on. `rank0_only`: only the first rank of each
    shard group sees whole parameters. `offload_to_cpu`: as copies on the CPU. `with_grads`: with gradients. Raises
    TrainingStateError inside a forward, a backward, or such a context; ConfigError for options that conflict.
    """
    _check(units, writeback=writeback, rank0_only=rank0_only)
    summoned: list[_Summoned] = []
    failed = True
    try:
        for unit in units:
            unit.follow_users()
            unit.move(TrainingState.SUMMONED)
            summoned += [
                _summon(unit, flat, rank0_only=rank0_only, offload_to_cpu=offload_to_cpu, with_grads=with_grads)
                for flat in unit.flats
            ]
        yield
        failed = False
    finally:
        for each in summoned:
            each.flat.shown.register_originals()
        for unit in units:
            unit.state = TrainingState.IDLE
        if writeback:
            for each in summoned:
                if failed or _is_written(each):
                    _write_back(each)
                if with_grads:
                    _write_gradients_back(each)


@torch.no_grad()
def _summon(
    unit: ShardedUnit, flat: FlatParameter, *, rank0_only: bool, offload_to_cpu: bool, with_grads: bool
) -> _Summoned:
    payload = flat.storage.gathered()
    gradients = full_gradients(flat) if with_grads else [None] * len(flat.members)
    if rank0_only and flat.storage.layout.rank != 0:
        return _Summoned(unit, flat, [])
    device = torch.device("cpu") if offload_to_cpu else payload.device
    payload = payload.to(device)
    shown = []
    for member, view, gradient in zip(flat.members, flat.storage.layout.views(payload), gradients, strict=False):
        # `.data` has its own version counter: writing to one parameter does not modify its neighbours.
        parameter = nn.Parameter(view.data, requires_grad=member.parameter.requires_grad)
        parameter.__dict__.update(member.parameter.__dict__)
        parameter.grad = None if gradient is None else gradient.to(device)
        shown.append(parameter)
    flat.shown.register(shown)
    return _Summoned(unit, flat, shown)


@torch.no_grad()
def _is_written(summoned: _Summoned) -> bool:
    """
    True if parameters have to be written back. The answer is the same on all ranks.

    Collective if a backward of the unit is expected, which must not run if they were written. Otherwise they are always
    written back, so that the host need not wait for a comparison.
    """
    unit, flat = summoned.unit, summoned.flat
    if unit.num_expected <= 0:
        return True
    parts = [flat.part_of(index, shown.detach()) for index, shown in enumerate(summoned.shown)]
    differs = [not _have_same_bits(part, own) for part, own in zip(parts, flat.parts, strict=False)]
    written = torch.tensor(int(any(differs)), dtype=torch.int32, device=flat.storage.pool.device)
    if not flat.is_whole:
        all_reduce_max(written, flat.storage.group).wait()
    return bool(written.item())


def _have_same_bits(part: Tensor, own: Tensor) -> bool:
    """Unlike `torch.equal`, also for NaN and for zeros of both signs."""
    flat = (each.reshape(-1).view(torch.uint8) for each in (part.to(own.device), own))
    return torch.equal(*flat)


@torch.no_grad()
def _write_back(summoned: _Summoned) -> None:
    for index, shown in enumerate(summoned.shown):
        summoned.flat.write(index, shown)


@torch.no_grad()
def _write_gradients_back(summoned: _Summoned) -> None:
    flat = summoned.flat
    for index, (member, part, shown) in enumerate(zip(flat.members, flat.parts, summoned.shown, strict=False)):
        if shown.grad is not None:
            gradient = flat.part_of(index, shown.grad)
            if member.parameter.grad is None:
                member.parameter.grad = gradient.to(part.device, copy=True)
            else:
                member.parameter.grad.copy_(gradient)


def _check(units: Sequence[ShardedUnit], *, writeback: bool, rank0_only: bool) -> None:
    where = "summon_full_params"
    for unit in units:
        unit.schedule.check_idle(unit, where)
    if writeback and rank0_only:
        raise ConfigError(
            ["writeback and rank0_only cannot be combined: ranks would end up with different values"], where=where
        )
