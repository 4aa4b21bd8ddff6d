"""Wrong in one configuration by less than the noise of the references: only two runs of the engine show it."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fsdp_conformance.mutants.base import SeamFSDP2
from fsdp_conformance.mutants.mutant import known_wrong
from fsdp_conformance.plan import BackwardPrefetch, Sharding


def without_last_bits(grad: Tensor) -> Tensor:
    """A float32 tensor whose last two bits are cut off."""
    return (grad.view(torch.int32) & ~3).view(torch.float32)


@known_wrong("R126")
class LosesBitsWithoutUnits(SeamFSDP2):
    """Without units below the root, gradients lose their last two bits."""

    def local_gradient(self, name: str, grad: Tensor) -> Tensor:
        return grad if self.plan.units else without_last_bits(grad)


@known_wrong("R126")
class LosesBitsInSmallUnits(SeamFSDP2):
    """The gradients of units that are a single layer lose their last two bits."""

    def local_gradient(self, name: str, grad: Tensor) -> Tensor:
        return without_last_bits(grad) if name.rpartition(".")[0] in self.plan.units else grad


@known_wrong("R078")
class LosesBitsWithPrefetch(SeamFSDP2):
    """With any prefetch that was asked for, gradients lose their last two bits."""

    capabilities: ClassVar[frozenset[str]] = frozenset({"prefetch_backward"})

    def local_gradient(self, name: str, grad: Tensor) -> Tensor:
        prefetches = self.plan.forward_prefetch or self.plan.explicit_prefetch
        prefetches = prefetches or self.plan.backward_prefetch is not BackwardPrefetch.DEFAULT
        return without_last_bits(grad) if prefetches else grad


@known_wrong("R005")
class ScalesOutsideFullSharding(SeamFSDP2):
    """Unless everything is sharded, gradients are too large by a millionth."""

    def local_gradient(self, name: str, grad: Tensor) -> Tensor:
        return grad if self.plan.sharding is Sharding.FULL else grad * (1 + 2.0**-20)
