"""
How large each unit is, whole, sharded and padded: counts and volumes of collectives are derived from it.

Worked out from the workload and the plan alone, never from the implementation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from fsdp_conformance.checks.units import owning_units
from fsdp_conformance.config import Plan
from fsdp_conformance.workload import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnedParameter:
    """A parameter as its unit sees it."""

    fqn: str
    shape: tuple[int, ...]
    itemsize: int
    trainable: bool

    @property
    def numel(self) -> int:
        """Elements, unsharded."""
        return math.prod(self.shape)

    def padded_numel(self, group_size: int) -> int:
        """Elements if dim 0 is padded to a multiple of `group_size`: 13 rows over 4 ranks are 16; a scalar is a row."""
        rows = self.shape[0] if self.shape else 1
        return -(-rows // group_size) * group_size * (self.numel // rows) if rows else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """A unit and the parameters that it owns: those of units inside it are theirs."""

    fqn: str
    """As the plan names it, "" for the root."""
    parameters: tuple[OwnedParameter, ...]

    @property
    def trainable(self) -> bool:
        """Whether any of its parameters trains."""
        return any(parameter.trainable for parameter in self.parameters)

    @property
    def numel(self) -> int:
        """Elements of all its parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    def padded_numel(self, group_size: int) -> int:
        """Elements of all its parameters, each padded on its own."""
        return sum(parameter.padded_numel(group_size) for parameter in self.parameters)

    def label(self) -> str:
        """The unit in a message."""
        return self.fqn or "the root"


@dataclass(frozen=True, kw_only=True, slots=True)
class SizedUnits:
    """The units of a model that own parameters."""

    shared: tuple[Unit, ...]
    """Sharded over the data-parallel group."""
    local: tuple[Unit, ...]
    """On a group of this rank alone."""

    @property
    def trainable(self) -> tuple[Unit, ...]:
        """The shared units that own a trainable parameter: the n of R062 to R066."""
        return tuple(unit for unit in self.shared if unit.trainable)

    @property
    def frozen(self) -> tuple[Unit, ...]:
        """The shared units without a trainable parameter."""
        return tuple(unit for unit in self.shared if not unit.trainable)


def sized_units(workload: Workload, plan: Plan | None = None) -> SizedUnits:
    """The units under the plan's wrapping; the workload's where there is no plan or it lets the engine choose."""
    named = None if plan is None or plan.auto_wrap is not None else plan.units
    found = owning_units(workload, named)
    return SizedUnits(
        shared=tuple(_unit(fqn, params) for fqn, params in found.params.items()),
        local=tuple(_unit(fqn, params) for fqn, params in found.local.items()),
    )


def parameter_bytes(units: Iterable[Unit], *, trainable_only: bool = False) -> int:
    """Bytes of the units' parameters, unsharded and unpadded."""
    chosen = _parameters(units, trainable_only=trainable_only)
    return sum(parameter.numel * parameter.itemsize for parameter in chosen)


def padded_bytes(units: Iterable[Unit], group_size: int, *, trainable_only: bool = False) -> int:
    """The same with each parameter's dim 0 padded to a multiple of `group_size`."""
    chosen = _parameters(units, trainable_only=trainable_only)
    return sum(parameter.padded_numel(group_size) * parameter.itemsize for parameter in chosen)


def _parameters(units: Iterable[Unit], *, trainable_only: bool) -> list[OwnedParameter]:
    return [
        parameter for unit in units for parameter in unit.parameters if parameter.trainable or not trainable_only
    ]  # fmt: skip


def _unit(fqn: str, params: Mapping[str, Tensor]) -> Unit:
    return Unit(
        fqn=fqn,
        parameters=tuple(
            OwnedParameter(
                fqn=name,
                shape=tuple(parameter.shape),
                itemsize=parameter.element_size(),
                trainable=parameter.requires_grad,
            )
            for name, parameter in params.items()
        ),
    )
