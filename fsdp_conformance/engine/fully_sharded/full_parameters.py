"""
Whole parameters outside of forward and backward: `summon_full_params`.

Values are those of the shards, in the parameters' own dtype, whatever the units compute in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fsdp_conformance.engine.fully_sharded.flat_parameter import FlatParameter
from fsdp_conformance.engine.fully_sharded.training_state import TrainingState
from fsdp_conformance.engine.fully_sharded.unit import ShardedUnit
from fsdp_conformance.errors import ConfigError


@dataclass(slots=True)
class _Summoned:
    """What is seen of one flat parameter inside the context."""

    flat: FlatParameter
    payload: Tensor
    """1D, the whole chunk, where it was gathered."""
    shown: list[nn.Parameter]


def full_gradients(flat: FlatParameter) -> list[Tensor | None]:
    """The gradients in full, None where this rank has none. Collective, wherever gradients are."""
    chunk = flat.chunk
    shard = torch.zeros_like(chunk.shard)
    parts = chunk.layout.views(shard) if flat.is_whole else chunk.layout.shard_views(shard)
    for member, part in zip(flat.members, parts, strict=False):
        if member.parameter.grad is not None:
            part.copy_(member.parameter.grad)
    views = chunk.layout.views(flat.gathered(shard))
    return [
        # Without elements of it here, what the others have is what it has.
        None if member.parameter.grad is None and member.parameter.numel() else view
        for member, view in zip(flat.members, views, strict=False)
    ]


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
    A context in which the modules of `units` see whole parameters. Collective, on entry.

    `writeback`: what is written inside is kept; every rank must write the same. `rank0_only`: only the first rank of
    each shard group sees them. `offload_to_cpu`: copies on the CPU. `with_grads`: with gradients. Raises
    TrainingStateError inside of a forward, a backward, or such a context; ConfigError for what cannot be combined.
    """
    _check(units, writeback=writeback, rank0_only=rank0_only)
    summoned: list[_Summoned] = []
    try:
        for unit in units:
            unit.follow_users()
            unit.move(TrainingState.SUMMONED)
            summoned += [
                _summon(flat, rank0_only=rank0_only, offload_to_cpu=offload_to_cpu, with_grads=with_grads)
                for flat in unit.flats
            ]
        yield
    finally:
        for each in summoned:
            each.flat.register_originals()
        for unit in units:
            unit.state = TrainingState.IDLE
        if writeback:
            for each in summoned:
                _write_back(each, with_grads=with_grads)


@torch.no_grad()
def _summon(flat: FlatParameter, *, rank0_only: bool, offload_to_cpu: bool, with_grads: bool) -> _Summoned:
    payload = flat.gathered()
    gradients = full_gradients(flat) if with_grads else [None] * len(flat.members)
    if rank0_only and flat.chunk.layout.rank != 0:
        return _Summoned(flat, payload, [])
    device = torch.device("cpu") if offload_to_cpu else payload.device
    payload = payload.to(device)
    shown = []
    for member, view, gradient in zip(flat.members, flat.chunk.layout.views(payload), gradients, strict=False):
        # Its own version counter: writing to one parameter is no modification of its neighbours.
        parameter = nn.Parameter(view.data, requires_grad=member.parameter.requires_grad)
        parameter.__dict__.update(member.parameter.__dict__)
        parameter.grad = None if gradient is None else gradient.to(device)
        shown.append(parameter)
    flat.register(shown)
    return _Summoned(flat, payload, shown)


@torch.no_grad()
def _write_back(summoned: _Summoned, *, with_grads: bool) -> None:
    flat = summoned.flat
    for index, (member, part, shown) in enumerate(zip(flat.members, flat.parts, summoned.shown, strict=False)):
        flat.write(index, shown)
        if with_grads and shown.grad is not None:
            gradient = flat.part_of(index, shown.grad)
            if member.parameter.grad is None:
                member.parameter.grad = gradient.to(part.device, copy=True)
            else:
                member.parameter.grad.copy_(gradient)


def _check(units: Sequence[ShardedUnit], *, writeback: bool, rank0_only: bool) -> None:
    where = "summon_full_params"
    for unit in units:
        unit.check_idle(where)
    if writeback and rank0_only:
        raise ConfigError(
            ["writeback and rank0_only are given, but should be one of them: ranks would differ"], where=where
        )
