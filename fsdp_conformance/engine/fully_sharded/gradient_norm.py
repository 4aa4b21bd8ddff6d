"""The norm of all gradients of a sharded model, counting each element once, and clipping by it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fsdp_conformance.engine.flat_collectives import all_reduce, all_reduce_max
from fsdp_conformance.engine.fully_sharded.unit import ShardedUnit
from fsdp_conformance.errors import ConfigError


@torch.no_grad()
def clip_gradients(units: Sequence[ShardedUnit], module: nn.Module, max_norm: float, norm_type: float) -> Tensor:
    """
    Scale the gradients below `module` to a norm of at most `max_norm`. Returns the norm before, 0-dimensional.

    Collective: one all-reduce per shard group of more than one rank. Ranks without elements or without a gradient count
    as zero; parameters outside any unit count with this rank's gradients.
    """
    if not (norm_type > 0 and max_norm >= 0):
        raise ConfigError(
            [f"max_norm must be at least 0 and norm_type positive, got {max_norm} and {norm_type}"],
            where="clip_grad_norm_",
        )
    by_group: dict[ProcessGroup | None, list[Tensor]] = {}
    device = next((flat.storage.pool.device for unit in units for flat in unit.flats), torch.device("cpu"))
    owned: set[int] = set()
    for unit in units:
        for flat in unit.flats:
            group = None if flat.is_whole else flat.storage.group
            found = by_group.setdefault(group, [])
            for member in flat.members:
                owned.add(id(member.parameter))
                if member.parameter.grad is not None:
                    found.append(member.parameter.grad)
    own = [p.grad for p in module.parameters() if id(p) not in owned and p.grad is not None]
    by_group.setdefault(None, []).extend(own)
    gradients = [gradient for found in by_group.values() for gradient in found]
    if not gradients:
        warnings.warn("clip_grad_norm_ found no gradient on this rank", stacklevel=2)
    dtype = _widest(gradients)
    total = torch.zeros((), dtype=dtype, device=device)
    for group, found in by_group.items():
        part = _norm(found, norm_type, dtype, device)
        if norm_type == math.inf:
            if group is not None:
                all_reduce_max(part, group).wait()
            total = torch.maximum(total, part)
        else:
            part = part**norm_type
            if group is not None:
                all_reduce(part, group).wait()
            total = total + part
    if norm_type != math.inf:
        total = total ** (1.0 / norm_type)
    # As torch.nn.utils.clip_grad_norm_ does, so that the numbers are its.
    coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for place, same in _by_device(gradients).items():
        torch._foreach_mul_(same, coefficient.to(place))
    return total


def _norm(gradients: Sequence[Tensor], norm_type: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The norm of this rank's elements, on `device`."""
    filled = [gradient for gradient in gradients if gradient.numel()]
    if not filled:
        return torch.zeros((), dtype=dtype, device=device)
    norms = [
        norm.to(device) for same in _by_device(filled).values() for norm in torch._foreach_norm(same, norm_type, dtype)
    ]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return norm


def _by_device(gradients: Iterable[Tensor]) -> dict[torch.device, list[Tensor]]:
    found: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        found.setdefault(gradient.device, []).append(gradient)
    return found


def _widest(gradients: Sequence[Tensor]) -> torch.dtype:
    """The dtype to sum in: at least float32, because the norm sums many squares."""
    dtype = torch.float32
    for gradient in gradients:
        dtype = torch.promote_types(dtype, gradient.dtype)
    return dtype
