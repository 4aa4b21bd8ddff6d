"""The norm of all gradients of a sharded model, counting each element once, and clipping by it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fsdp_conformance.engine.communication import all_reduce, all_reduce_max
from fsdp_conformance.engine.errors import TrainingStateError
from fsdp_conformance.engine.fully_sharded.sharding_groups import ShardingGroups
from fsdp_conformance.engine.fully_sharded.unit import ShardedUnit
from fsdp_conformance.errors import ConfigError


class _Copies(NamedTuple):
    """Where the gradients of a flat parameter are."""

    group: ProcessGroup | None
    """The group that they are sharded over; None: each rank has all of them."""
    num_ranks: int
    """The number of ranks that have a part of them."""


@torch.no_grad()
def clip_gradients(units: Sequence[ShardedUnit], module: nn.Module, max_norm: float, norm_type: float) -> Tensor:
    """
    Scale the gradients below `module` to a norm of at most `max_norm`. Returns the norm before, 0-dimensional.

    Collective: one all-reduce per shard group of more than one rank. Units on fewer ranks than the outermost one, such
    as experts, take one more per group of that: each expert counts once, whichever ranks have it. Ranks without
    elements or without a gradient count as zero; parameters outside any unit count with this rank's gradients. Raises
    TrainingStateError while gradients of `no_sync` or `no_all_reduce` have yet to be reduced.
    """
    _check(units, max_norm, norm_type)
    around = max((unit.spec.groups for unit in units), key=lambda groups: groups.size)
    by_copies = _by_copies(units, module, around)
    gradients = [gradient for group_gradients in by_copies.values() for gradient in group_gradients]
    if not gradients:
        warnings.warn("clip_grad_norm_ found no gradient on this rank", stacklevel=2)
    device = next((flat.storage.pool.device for unit in units for flat in unit.flats), torch.device("cpu"))
    total = torch.zeros((), dtype=_widest(gradients), device=device)
    for copies, group_gradients in by_copies.items():
        part = _over_ranks(_norm(group_gradients, norm_type, total.dtype, device), copies, around, norm_type)
        total = torch.maximum(total, part) if norm_type == math.inf else total + part
    if norm_type != math.inf:
        total = total ** (1.0 / norm_type)
    _scale(gradients, max_norm, total)
    return total


def _check(units: Sequence[ShardedUnit], max_norm: float, norm_type: float) -> None:
    if not (norm_type > 0 and max_norm >= 0):
        raise ConfigError(
            [f"max_norm must be at least 0 and norm_type positive, got {max_norm} and {norm_type}"],
            where="clip_grad_norm_",
        )
    waiting = [unit.label for unit in units if unit.has_gradients or unit.has_partial]
    if waiting:
        raise TrainingStateError(
            f"gradients of {', '.join(waiting)} have yet to be reduced, so their norm is unknown",
            where="clip_grad_norm_",
            hint="Run the last micro-batch's backward outside of no_sync and no_all_reduce, then clip.",
        )


def _by_copies(units: Sequence[ShardedUnit], module: nn.Module, around: ShardingGroups) -> dict[_Copies, list[Tensor]]:
    """This rank's gradients, by where the other parts of them are. The same keys in the same order on all ranks."""
    by_copies: dict[_Copies, list[Tensor]] = {}
    owned: set[int] = set()
    for unit in units:
        for flat in unit.flats:
            group = None if flat.is_whole else flat.storage.group
            # Also without a gradient here: each key is a collective, which every rank of the group must take part in.
            group_gradients = by_copies.setdefault(_Copies(group, unit.spec.groups.size), [])
            parameters = [member.parameter for member in flat.members]
            owned.update(map(id, parameters))
            group_gradients += [parameter.grad for parameter in parameters if parameter.grad is not None]
    outside = [p.grad for p in module.parameters() if id(p) not in owned and p.grad is not None]
    by_copies.setdefault(_Copies(None, around.size), []).extend(outside)
    return by_copies


def _over_ranks(norm: Tensor, copies: _Copies, around: ShardingGroups, norm_type: float) -> Tensor:
    """
    Combine the norms of all parts, given that of this rank's part. Collective.

    Returns the largest of them for the infinity norm, and the sum of their powers for all others.
    """
    # Units on fewer ranks differ from one group of ranks to the next: all of them count.
    wider = () if copies.num_ranks == around.size else (around.shard, around.replica)
    if norm_type == math.inf:
        for group in (copies.group, *wider):
            if group is not None:
                all_reduce_max(norm, group).wait()
        return norm
    power = norm**norm_type
    if copies.group is not None:
        all_reduce(power, copies.group).wait()
    if wider:
        # Each of `num_ranks` ranks has the unit's sum now, and all of them add it below: it must count once.
        power = power / copies.num_ranks
    for group in wider:
        if group is not None:
            all_reduce(power, group).wait()
    return power


def _scale(gradients: Sequence[Tensor], max_norm: float, total: Tensor) -> None:
    # As torch.nn.utils.clip_grad_norm_ does, for the same numbers. The host does not wait to see if any is needed.
    coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for device, device_gradients in _by_device(gradients).items():
        torch._foreach_mul_(device_gradients, coefficient.to(device))


def _norm(gradients: Sequence[Tensor], norm_type: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The norm of this rank's elements, on `device`."""
    filled = [gradient for gradient in gradients if gradient.numel()]
    if not filled:
        return torch.zeros((), dtype=dtype, device=device)
    norms = [
        norm.to(device)
        for device_gradients in _by_device(filled).values()
        for norm in torch._foreach_norm(device_gradients, norm_type, dtype)
    ]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return norm


def _by_device(gradients: Iterable[Tensor]) -> dict[torch.device, list[Tensor]]:
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        by_device.setdefault(gradient.device, []).append(gradient)
    return by_device


def _widest(gradients: Sequence[Tensor]) -> torch.dtype:
    """The dtype to sum in: at least float32, because the norm sums many squares."""
    dtype = torch.float32
    for gradient in gradients:
        dtype = torch.promote_types(dtype, gradient.dtype)
    return dtype
