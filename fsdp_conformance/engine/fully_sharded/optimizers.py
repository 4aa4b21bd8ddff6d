"""
The steps of optimizers that have shards: which of them are refused, and how units notice the others.

Only optimizers that treat each element by itself may step shards. To an optimizer, a shard is a tensor of one
dimension. One that needs whole tensors, for a norm, a row or a product of matrices, would take the shard for the
tensor, and each rank would train something else. torch's own ones are known, so their step raises. Optimizers that
users have written are not known: users must check those themselves.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsdp_conformance.engine.fully_sharded.construction import OwnerRegistry
from fsdp_conformance.errors import Unsupported

#: Adafactor takes means over rows and columns, Muon multiplies matrices, LBFGS forms inner products over everything.
#: torch has had the first two since 2.5 and 2.9.
WHOLE_TENSOR_OPTIMIZERS: tuple[type[Optimizer], ...] = tuple(
    getattr(torch.optim, name) for name in ("Adafactor", "Muon", "LBFGS") if hasattr(torch.optim, name)
)


@cache
def refuse_whole_tensor_optimizers(owners: OwnerRegistry) -> None:
    """From now on, a step of such an optimizer raises Unsupported if it has a shard of a parameter in `owners`."""

    def check(optimizer: Optimizer, args: object, kwargs: object) -> None:
        if isinstance(optimizer, WHOLE_TENSOR_OPTIMIZERS):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            shards = sum(_is_shard(parameter, owners) for parameter in parameters)
            if shards:
                raise Unsupported(
                    "whole_tensor_optimizer",
                    f"{type(optimizer).__name__} needs whole tensors, but {shards} of its {len(parameters)} parameters "
                    "are shards: use an optimizer that treats each element by itself, or do not shard",
                )

    register_optimizer_step_pre_hook(check)


@cache
def notice_steps(owners: OwnerRegistry) -> None:
    """
    From now on, what is gathered is stale after a step of an optimizer that has parameters in `owners`.

    Version counters are not enough: fused optimizers write without changing them. They also differ between ranks if
    only some have elements of what was written, but all ranks must gather the same units.
    """

    def note(optimizer: Optimizer, args: object, kwargs: object) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        units = {id(unit): unit for parameter in parameters if (unit := owners.of(parameter)) is not None}
        for unit in units.values():
            for flat in unit.flats:
                flat.note_step()
        for parameter in parameters if units else ():
            if parameter.grad is not None and owners.of(parameter) is not None:
                # For the check that a backward uses the values of its forward: these alone were written.
                increment_version(parameter)

    register_optimizer_step_post_hook(note)


def _is_shard(parameter: nn.Parameter, owners: OwnerRegistry) -> bool:
    unit = owners.of(parameter)
    return unit is not None and any(
        not flat.is_whole and any(member.parameter is parameter for member in flat.members) for flat in unit.flats
    )
