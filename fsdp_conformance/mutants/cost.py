"""Wrong costs of redistributions: what is free, what is impossible, and what each collective is priced by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from fsdp_conformance.adapters.components import TensorLayout
from fsdp_conformance.adapters.vendors.reference_components import ReferenceComponents
from fsdp_conformance.mutants.mutant import known_wrong
from fsdp_conformance.planner.link_spec import LinkSpec

#: Charged where the cost must be zero.
_CHARGE_US = 3.0

# --- what is free ----------------------------------------------------------------------------------------------------


@known_wrong("R184")
class ChargesEqualLayouts(ReferenceComponents):
    """A redistribution that changes nothing has a cost."""

    def redistribution_cost(
        self, shape: Sequence[int], dtype: torch.dtype, source: TensorLayout, target: TensorLayout
    ) -> float:
        return _CHARGE_US if source == target else super().redistribution_cost(shape, dtype, source, target)


@known_wrong("R184")
class ChargesSlices(ReferenceComponents):
    """Slicing a replicated tensor costs as much as gathering it."""

    def redistribution_cost(
        self, shape: Sequence[int], dtype: torch.dtype, source: TensorLayout, target: TensorLayout
    ) -> float:
        if source.mesh == target.mesh and all(isinstance(each, Replicate) for each in source.placements):
            source, target = target, source
        return super().redistribution_cost(shape, dtype, source, target)


@known_wrong("R184")
class OutsidersPay(ReferenceComponents):
    """A rank outside the mesh is charged."""

    def redistribution_cost(
        self, shape: Sequence[int], dtype: torch.dtype, source: TensorLayout, target: TensorLayout
    ) -> float:
        outside = source.mesh.get_coordinate() is None
        return _CHARGE_US if outside else super().redistribution_cost(shape, dtype, source, target)


# --- what cannot be --------------------------------------------------------------------------------------------------


@known_wrong("R184")
class ShardsBecomePartial(ReferenceComponents):
    """Shards are treated as partial sums, at no cost."""

    def redistribution_cost(
        self, shape: Sequence[int], dtype: torch.dtype, source: TensorLayout, target: TensorLayout
    ) -> float:
        cost = super().redistribution_cost(shape, dtype, source, target)
        return 0.0 if cost == math.inf and source.mesh == target.mesh else cost


@known_wrong("R184")
class CrossesMeshes(ReferenceComponents):
    """A different mesh is treated as the same one."""

    def redistribution_cost(
        self, shape: Sequence[int], dtype: torch.dtype, source: TensorLayout, target: TensorLayout
    ) -> float:
        return super().redistribution_cost(shape, dtype, source, target._replace(mesh=source.mesh))


# --- what it is priced by --------------------------------------------------------------------------------------------


@known_wrong("R184")
class GathersOneShard(ReferenceComponents):
    """An all-gather is priced by the size of one shard."""

    def redistribution_cost(
        self, shape: Sequence[int], dtype: torch.dtype, source: TensorLayout, target: TensorLayout
    ) -> float:
        if isinstance(source.placements[0], Shard):
            shape = [shape[0] // source.mesh.size(), *shape[1:]]
        return super().redistribution_cost(shape, dtype, source, target)


@known_wrong("R184")
class NoStartUp(ReferenceComponents):
    """A collective costs nothing to start."""

    link: ClassVar[LinkSpec] = replace(ReferenceComponents.link, launch_us=0.0)


@known_wrong("R184")
class ReducesInOnePass(ReferenceComponents):
    """An all-reduce costs what a reduce-scatter does."""

    def redistribution_cost(
        self, shape: Sequence[int], dtype: torch.dtype, source: TensorLayout, target: TensorLayout
    ) -> float:
        scattered = tuple(
            Shard(0) if isinstance(before, Partial) else after
            for before, after in zip(source.placements, target.placements, strict=True)
        )
        return super().redistribution_cost(shape, dtype, source, target._replace(placements=scattered))


@known_wrong("R184")
class FirstAxisOnly(ReferenceComponents):
    """Communication along the other mesh axes is free."""

    def redistribution_cost(
        self, shape: Sequence[int], dtype: torch.dtype, source: TensorLayout, target: TensorLayout
    ) -> float:
        source = source._replace(placements=(*source.placements[:1], *target.placements[1:]))
        return super().redistribution_cost(shape, dtype, source, target)


@known_wrong("R184")
class CountsElements(ReferenceComponents):
    """The cost is based on elements, whatever their dtype."""

    def redistribution_cost(
        self, shape: Sequence[int], dtype: torch.dtype, source: TensorLayout, target: TensorLayout
    ) -> float:
        return super().redistribution_cost(shape, torch.uint8, source, target)


@known_wrong("R184")
class EveryTensorAlike(ReferenceComponents):
    """The cost does not depend on the tensor's size."""

    def redistribution_cost(
        self, shape: Sequence[int], dtype: torch.dtype, source: TensorLayout, target: TensorLayout
    ) -> float:
        return super().redistribution_cost([8] * len(shape), dtype, source, target)
