"""
Other engines than FSDP2 with places to be wrong at; without a subclass they are correct.

`SeamReference` replaces classes of the reference engine's fully sharded module in one wrapped model, so that other
models in the process, on simulated ranks for example, keep the engine's own.
"""

from __future__ import annotations

from typing import ClassVar

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdp_conformance.adapters.vendors.reference import Reference
from fsdp_conformance.adapters.vendors.torch_fsdp1 import TorchFSDP1
from fsdp_conformance.engine.fully_sharded import wrapper
from fsdp_conformance.engine.fully_sharded.flat_parameter import FlatParameter
from fsdp_conformance.engine.fully_sharded.gradient_reduction import GradientReduction
from fsdp_conformance.engine.fully_sharded.schedule import UnitSchedule
from fsdp_conformance.engine.fully_sharded.unit import ShardedUnit
from fsdp_conformance.plan import Plan


class SeamReference(Reference):
    """The reference engine's fully sharded module, with classes to replace by subclasses that only override methods."""

    unit_class: ClassVar[type[ShardedUnit]] = ShardedUnit
    flat_class: ClassVar[type[FlatParameter]] = FlatParameter
    reduction_class: ClassVar[type[GradientReduction]] = GradientReduction
    schedule_class: ClassVar[type[UnitSchedule]] = UnitSchedule

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        wrapped = super().wrap(model, plan)
        assert isinstance(wrapped, wrapper.FullyShardedDataParallel), "the adapter wraps with the engine"
        for unit in wrapped.units:
            unit.__class__ = self.unit_class
            unit.schedule.__class__ = self.schedule_class
            for flat in unit.flats:
                flat.__class__ = self.flat_class
                flat.reduction.__class__ = self.reduction_class
        return wrapped


class SeamFSDP1(TorchFSDP1):
    """torch's FSDP1, with its wrappers at hand once all of them exist."""

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        wrapped = super().wrap(model, plan)
        for unit in FullyShardedDataParallel.fsdp_modules(wrapped):
            self.alter(unit)
        return wrapped

    def alter(self, unit: FullyShardedDataParallel) -> None:
        """Called with each wrapper, the root included, before the first forward."""
