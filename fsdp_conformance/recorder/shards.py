"""
The parameters that an optimizer has, while modules hold others.

FSDP2 puts unsharded parameters into the modules of a unit that has been gathered: in its forward, after `unshard()`,
and until the next backward if it does not reshard. With `reshard_after_forward=N`, it then puts in parameters that are
sharded over N ranks. Those that belong to the optimizer are the ones that were there after `fully_shard`. Megatron-FSDP
puts gathered parameters in for each forward as well.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Shards:
    """The sharded parameters of the modules that `fully_shard` has been called with."""

    def __init__(self) -> None:
        # No weak references to parameters: `to_empty` cannot swap a tensor that has one.
        self._of: weakref.WeakKeyDictionary[nn.Module, dict[str, Tensor]] = weakref.WeakKeyDictionary()

    def remember(self, unit: nn.Module) -> None:
        """Note the parameters of a unit that has just been sharded."""
        for module in unit.modules():
            parameters: dict[str, Tensor | None] = {**module._parameters}
            for key, parameter in parameters.items():
                if isinstance(parameter, DTensor):
                    self._of.setdefault(module, {})[key] = parameter

    def remember_of_optimizer(self, root: nn.Module, shards: Mapping[int, Tensor]) -> None:
        """Note the parameters that an optimizer has, by the ids of those that the modules below `root` hold."""
        for module in root.modules():
            for key, parameter in module._parameters.items():
                if id(parameter) in shards:
                    self._of.setdefault(module, {})[key] = shards[id(parameter)]

    def parameters_of(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """A module's own parameters by name: sharded ones where it has been sharded, gathered or not."""
        shards = self._of.get(module, {})
        for key, parameter in module._parameters.items():
            if parameter is not None:
                shard = shards.get(key)
                yield key, parameter if shard is None or _is_alike(parameter, shard) else shard


def _is_alike(parameter: Tensor, shard: Tensor) -> bool:
    """
    True for a parameter that may have taken a shard's place, as where a state was assigned.

    One that is gathered is no DTensor, and one that is resharded to a smaller group is on another mesh.
    """
    if not isinstance(parameter, DTensor) or not isinstance(shard, DTensor):
        return False
    return parameter.device_mesh == shard.device_mesh and parameter.placements == shard.placements
