"""
Which optimizers may step shards: those that treat each element by itself.

To an optimizer, a shard is a tensor of one dimension. One that needs whole tensors, for a norm, a row or a product of
matrices, would take the shard for the tensor, and each rank would train something else. torch's own ones are known, so
their step raises. Those that users have written are not: they are up to them.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

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
            held = sum(_is_shard(parameter, owners) for parameter in parameters)
            if held:
                raise Unsupported(
                    "whole_tensor_optimizer",
                    f"{type(optimizer).__name__} needs whole tensors, but {held} of its {len(parameters)} parameters "
                    "are shards: use an optimizer that treats each element by itself, or do not shard",
                )

    register_optimizer_step_pre_hook(check)


def _is_shard(parameter: nn.Parameter, owners: OwnerRegistry) -> bool:
    unit = owners.of(parameter)
    return unit is not None and any(
        not flat.is_whole and any(member.parameter is parameter for member in flat.members) for flat in unit.flats
    )
