"""
The cost of moving a tensor from one layout on a mesh to another, in microseconds: communication only.

A layout has a placement for each axis of the mesh: Replicate, Shard(dim) or Partial. Each axis that changes takes one
collective or none, and the costs add up:

    Shard -> Replicate      all-gather           Partial -> Replicate    all-reduce
    Shard -> Shard          all-to-all           Partial -> Shard        reduce-scatter
    Replicate -> Shard, Partial   nothing is sent
    Shard -> Partial, one kind of Partial -> another     unsupported: infinite

A dim that several axes shard is divided by the outermost axis first, so only the innermost of them can change. An
inner axis that is in the way is gathered first and sliced again afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.planner.link_spec import LinkedAxis, LinkSpec

_WHERE = "redistribution_cost_us"


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor is distributed over a mesh."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    """One for each axis of the mesh."""


def redistribution_cost_us(
    shape: Sequence[int], dtype: torch.dtype, source: Layout, target: Layout, links: Sequence[LinkSpec]
) -> float:
    """
    Microseconds from `source` to `target`; infinite if that is unsupported. Not collective.

    `shape` is that of the whole tensor, `links[a]` the link of axis a. A rank outside the mesh takes no time. Raises
    ConfigError for placements and links that do not fit the mesh.
    """
    _check(len(shape), source, target, links)
    if source.mesh != target.mesh:
        return math.inf
    if all(isinstance(each, Replicate) for each in source.placements) or source.placements == target.placements:
        return 0.0
    if source.mesh.get_coordinate() is None:
        return 0.0
    axes = [LinkedAxis(size, link) for size, link in zip(source.mesh.shape, links, strict=True)]
    return _Redistribution(math.prod(shape) * dtype.itemsize, axes, source.placements, target.placements).cost_us()


class _Redistribution:
    """The axes of a mesh while they change from one placement to another."""

    def __init__(
        self, nbytes: float, axes: Sequence[LinkedAxis], source: Sequence[Placement], target: Sequence[Placement]
    ) -> None:
        self.axes = axes
        self.current = list(source)
        self.target = list(target)
        shards = math.prod(
            axis.num_ranks for axis, placement in zip(axes, source, strict=True) if isinstance(placement, Shard)
        )
        self.local_bytes = nbytes / shards
        """Bytes that this rank holds now."""

    def cost_us(self) -> float:
        """Move every axis to its target. Those that shrink the tensor come first."""
        cost = 0.0
        while pending := [axis for axis in range(len(self.axes)) if self.current[axis] != self.target[axis]]:
            ready = [axis for axis in pending if self._is_free(axis)]
            if ready:
                axis = min(ready, key=self._growth)
                cost += self._move(axis, self.target[axis])
            else:
                cost += self._move(self._innermost_in_the_way(pending), Replicate())
            if cost == math.inf:
                break
        return cost

    def _is_free(self, axis: int) -> bool:
        """True if an axis can change now: no inner axis divides its dims, and outer axes have settled the new one."""
        for other, placement in enumerate(self.current):
            for end in (self.current[axis], self.target[axis]):
                if other > axis and isinstance(end, Shard) and placement == end:
                    return False
            goal = self.target[axis]
            if other < axis and isinstance(goal, Shard) and (placement == goal) != (self.target[other] == goal):
                return False
        return True

    def _innermost_in_the_way(self, pending: Sequence[int]) -> int:
        dims = {end for axis in pending for end in (self.current[axis], self.target[axis]) if isinstance(end, Shard)}
        return max(axis for axis, placement in enumerate(self.current) if placement in dims)

    def _growth(self, axis: int) -> int:
        """-1 if the tensor is sliced, 1 if it is gathered, 0 if its size stays the same."""
        return isinstance(self.current[axis], Shard) - isinstance(self.target[axis], Shard)

    def _move(self, number: int, placement: Placement) -> float:
        """Change one axis and return the cost."""
        before, axis = self.current[number], self.axes[number]
        self.current[number] = placement
        held = self.local_bytes
        self.local_bytes *= float(axis.num_ranks) ** (isinstance(before, Shard) - isinstance(placement, Shard))
        match before, placement:
            case Shard(), Replicate():
                return axis.all_gather_us(self.local_bytes)
            case Shard(), Shard():
                return axis.all_to_all_us(held)
            case Partial(), Replicate():
                return axis.all_reduce_us(held)
            case Partial(), Shard():
                return axis.reduce_scatter_us(held)
            case Replicate(), _:
                return 0.0
            case _:
                return math.inf


def _check(num_dims: int, source: Layout, target: Layout, links: Sequence[LinkSpec]) -> None:
    problems = []
    for name, layout in (("source", source), ("target", target)):
        if len(layout.placements) != layout.mesh.ndim:
            problems.append(
                f"{name}.placements must be {layout.mesh.ndim}, one for each axis of the mesh, got {layout.placements}"
            )
        for placement in layout.placements:
            is_supported = type(placement) in (Shard, Replicate) or isinstance(placement, Partial)
            if not is_supported or (isinstance(placement, Shard) and not 0 <= placement.dim < num_dims):
                problems.append(
                    f"{name}.placements must be Replicate, Partial, or Shard of a dim from 0 to {num_dims - 1}, got "
                    f"{placement!r}"
                )
    if len(links) != source.mesh.ndim:
        problems.append(f"links must be {source.mesh.ndim}, one for each axis of the mesh, got {len(links)}")
    if problems:
        raise ConfigError(problems, where=_WHERE)
