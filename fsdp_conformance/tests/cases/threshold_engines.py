"""
Engines that are right in every training of an ordinary size, or only in trainings that they know.

Those of a profile are small and the same in every run; the scenarios that are drawn for a run are not.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from fsdp_conformance.adapters.base import ModelFn, OptimFn
from fsdp_conformance.adapters.vendors.torch_fsdp2 import TorchFSDP2
from fsdp_conformance.plan import Plan


class WrongAbove(TorchFSDP2):
    """Trains with twice the loss once a training is larger than it was ever tried with."""

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        super().setup(model_fn, optim_fn, plan)
        self.num_backwards = 0

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.num_backwards += 1
        super().backward(2 * loss if self.is_large() else loss, retain_graph=retain_graph)

    def is_large(self) -> bool:
        """True if its mistake shows."""
        raise NotImplementedError


class ManyElements(WrongAbove):
    """Wrong with more than 65,536 elements in a parameter."""

    def is_large(self) -> bool:
        return any(parameter.numel() > 65_536 for parameter in self.parameters().values())


class ManyUnits(WrongAbove):
    """Wrong with more than 16 units."""

    def is_large(self) -> bool:
        return len(self.plan.units) > 16


class ManySteps(WrongAbove):
    """Wrong after the twelfth step, however many micro-batches one has."""

    def is_large(self) -> bool:
        return self.num_backwards > 12 * max(self.plan.micro_batches, 1)


class ManyRanks(WrongAbove):
    """Wrong above eight ranks."""

    def is_large(self) -> bool:
        return dist.get_world_size() > 8


class KnownModelsAlone(WrongAbove):
    """Right for models whose parameters are called as those of the suite."""

    def is_large(self) -> bool:
        known = ("0", "first", "blocks", "head", "stages", "last", "stage", "layers", "net", "embed")
        return not any(name.startswith(known) for name in self.parameters())


class RefusesUnknownSizes(TorchFSDP2):
    """Refuses what it was never tried with, which every engine must train."""

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        if len(plan.units) > 16:
            raise NotImplementedError("more than 16 units are not supported")
        super().setup(model_fn, optim_fn, plan)
