"""
Which unit owns which parameter, and how large units are, whole and padded: counts and volumes are derived from it.

A parameter belongs to the innermost unit that contains it. Everything here is computed from the workload and the plan
alone, never from the implementation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdp_conformance.plan import Plan
from fsdp_conformance.workload.definition import Workload

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: The root's name as a unit.
ROOT = ""


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

    @property
    def row_numel(self) -> int:
        """Elements of one row of dim 0; a scalar is one row."""
        return math.prod(self.shape[1:])

    def padded_numel(self, group_size: int) -> int:
        """Elements with dim 0 padded to a multiple of `group_size`: 13 rows over 4 ranks become 16."""
        rows = self.shape[0] if self.shape else 1
        return -(-rows // group_size) * group_size * self.row_numel


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """A unit and the parameters it owns, which excludes those of units inside it."""

    fqn: str
    """As the plan names it, "" for the root."""
    parameters: tuple[OwnedParameter, ...]

    @property
    def trainable(self) -> bool:
        """True if any of its parameters trains."""
        return any(parameter.trainable for parameter in self.parameters)

    @property
    def numel(self) -> int:
        """Elements of all its parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    def padded_numel(self, group_size: int) -> int:
        """Elements of all its parameters, each padded separately."""
        return sum(parameter.padded_numel(group_size) for parameter in self.parameters)

    def label(self) -> str:
        """The unit in a message."""
        return self.fqn or "the root"


@dataclass(frozen=True, kw_only=True, slots=True)
class OwningUnits:
    """The units of a model that own parameters, in the order of `Workload.units`, the root last."""

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


def owning_units(workload: Workload, plan: Plan | None = None) -> OwningUnits:
    """
    The units as the plan wraps them; the workload's own if there is no plan or it lets the engine choose.

    "norm+head" is one unit made of two modules. A tied parameter is listed once, under the name it has first.
    """
    model = workload.build(0)
    names = workload.units if plan is None or plan.auto_wrap is not None else plan.units
    parameters = dict(model.named_parameters())
    local_parameters = local_names(workload, parameters)
    shared: dict[str, dict[str, Tensor]] = {unit: {} for unit in (*names, ROOT)}
    local: dict[str, dict[str, Tensor]] = {}
    for name, parameter in parameters.items():
        unit = owner(name, names)
        if name not in local_parameters:
            shared[unit][name] = parameter
        elif unit in workload.local_units:
            local.setdefault(unit, {})[name] = parameter
    return OwningUnits(shared=_units(shared), local=_units(local))


def owner(parameter: str, units: tuple[str, ...]) -> str:
    """The innermost unit that contains a parameter, or the root."""
    inside = [(len(module), unit) for unit in units for module in unit.split("+") if parameter.startswith(f"{module}.")]
    return max(inside, default=(0, ROOT))[1]


def parameter_bytes(
    units: Iterable[Unit], *, trainable_only: bool = False, dtype: Callable[[str], torch.dtype | None] | None = None
) -> int:
    """Bytes of the units' parameters, unsharded and unpadded; `dtype` maps a unit to the dtype to count them in."""
    return padded_bytes(units, 1, trainable_only=trainable_only, dtype=dtype)


def padded_bytes(
    units: Iterable[Unit],
    group_size: int,
    *,
    trainable_only: bool = False,
    dtype: Callable[[str], torch.dtype | None] | None = None,
) -> int:
    """
    Bytes of the units' parameters with dim 0 of each padded to a multiple of `group_size`.

    `dtype` maps a unit's name to the dtype in which its parameters are counted; None is their own.
    """
    total = 0
    for unit in units:
        counted = dtype(unit.fqn) if dtype is not None else None
        for parameter in unit.parameters:
            if parameter.trainable or not trainable_only:
                itemsize = parameter.itemsize if counted is None else counted.itemsize
                total += parameter.padded_numel(group_size) * itemsize
    return total


def _units(owned: Mapping[str, Mapping[str, Tensor]]) -> tuple[Unit, ...]:
    return tuple(Unit(fqn=fqn, parameters=_owned(params)) for fqn, params in owned.items() if params)


def _owned(params: Mapping[str, Tensor]) -> tuple[OwnedParameter, ...]:
    return tuple(
        OwnedParameter(
            fqn=name,
            shape=tuple(parameter.shape),
            itemsize=parameter.element_size(),
            trainable=parameter.requires_grad,
        )
        for name, parameter in params.items()
    )


def local_names(workload: Workload, params: Iterable[str]) -> frozenset[str]:
    """Parameters that are not averaged over ranks: experts, and those of ignored modules."""
    ignored = tuple(f"{name}." for name in workload.ignored)
    return frozenset(name for name in params if name in workload.local_params or name.startswith(ignored))
