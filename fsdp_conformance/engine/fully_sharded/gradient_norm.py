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
from fsdp_conformance.engine.fully_sharded.unit import ShardedUnit
from fsdp_conformance.errors import ConfigError


class _Copies(NamedTuple):
    """Where the gradients of a flat parameter are."""

    group: ProcessGroup | None
    """What they are sharded over; None: each rank has all of them."""
    num_ranks: int
    """How many ranks have a part of them."""


@torch.no_grad()
def clip_gradients(units: Sequence[ShardedUnit], module: nn.Module, max_norm: float, norm_type: float) -> Tensor:
    """
    Scale the gradients below `module` to a norm of at most `max_norm`. Returns the norm before, 0-dimensional.

    Collective: one all-reduce per shard group of more than one rank. Units on fewer ranks than the outermost one, such
    as experts, take one more per group of that: each expert counts once, whichever ranks have it. Ranks without
    elements or without a gradient count as zero; parameters outside any unit count with this rank's gradients. Raises
    TrainingStateError while gradients of `no_sync` or `no_all_reduce` have yet to be reduced.
    """
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
    by_group: dict[_Copies, list[Tensor]] = {}
    around = max((unit.spec.groups for unit in units), key=lambda groups: groups.size)
    device = next((flat.storage.pool.device for unit in units for flat in unit.flats), torch.device("cpu"))
    owned: set[int] = set()
    for unit in units:
        for flat in unit.flats:
            group = None if flat.is_whole else flat.storage.group
            found = by_group.setdefault(_Copies(group, unit.spec.groups.size), [])
            for member in flat.members:
                owned.add(id(member.parameter))
                if member.parameter.grad is not None:
                    found.append(member.parameter.grad)
    own = [p.grad for p in module.parameters() if id(p) not in owned and p.grad is not None]
    by_group.setdefault(_Copies(None, around.size), []).extend(own)
    gradients = [gradient for found in by_group.values() for gradient in found]
    if not gradients:
        warnings.warn("clip_grad_norm_ found no gradient on this rank", stacklevel=2)
    dtype = _widest(gradients)
    total = torch.zeros((), dtype=dtype, device=device)
    for (group, num_ranks), found in by_group.items():
        part = _norm(found, norm_type, dtype, device)
        # Units on fewer ranks differ from one group of ranks to the next: all of them count.
        wider = () if num_ranks == around.size else (around.shard, around.replica)
        if norm_type == math.inf:
            for each in (group, *wider):
                if each is not None:
                    all_reduce_max(part, each).wait()
            total = torch.maximum(total, part)
        else:
            part = part**norm_type
            if group is not None:
                all_reduce(part, group).wait()
            if wider:
                part = part / num_ranks
            for each in wider:
                if each is not None:
                    all_reduce(part, each).wait()
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
