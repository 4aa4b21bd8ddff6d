"""
The parameters that an optimizer has, while modules hold others.

FSDP2 puts unsharded parameters into the modules of a unit that has been gathered: in its forward, after `unshard()`,
and until the next backward if it does not reshard. Those that belong to the optimizer are the ones that were there
after `fully_shard`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

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

    def parameters_of(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """A module's own parameters by name: sharded ones where it has been sharded, gathered or not."""
        shards = self._of.get(module, {})
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            yield key, parameter if isinstance(parameter, DTensor) else shards.get(key, parameter)
