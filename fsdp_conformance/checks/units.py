"""Which unit owns which parameter: each belongs to the innermost unit that contains it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from fsdp_conformance.checks.loop import local_names
from fsdp_conformance.workload import Workload

#: The root's name as a unit.
ROOT = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwningUnits:
    """Units that own parameters, in the order of `Workload.units`, the root last."""

    params: dict[str, dict[str, Tensor]]
    """Unit to FQN to parameter as built; only units that own some; neither ignored nor local ones."""
    local: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """The same for units on a size-1 group."""
    shared: frozenset[str] = frozenset()
    """Parameters that modules of several units use; they are listed under the first."""

    @property
    def all(self) -> tuple[str, ...]:
        """Units that own parameters."""
        return tuple(self.params)

    @property
    def trainable(self) -> tuple[str, ...]:
        """Units that own at least one parameter that requires a gradient."""
        return tuple(unit for unit, params in self.params.items() if any(p.requires_grad for p in params.values()))

    @property
    def frozen(self) -> tuple[str, ...]:
        """Units that own parameters, all of them frozen."""
        return tuple(unit for unit in self.params if unit not in self.trainable)

    def num_bytes(self, unit: str, *, trainable_only: bool = False) -> int:
        """Bytes of a unit's full parameters."""
        params = self.params[unit].values()
        return sum(p.numel() * p.element_size() for p in params if p.requires_grad or not trainable_only)


def owning_units(workload: Workload, units: tuple[str, ...] | None = None) -> OwningUnits:
    """
    The units of a workload with what each owns. `units` replaces the workload's, as a plan may.

    "norm+head" is one unit made of two modules.
    """
    model = workload.build(0)
    names = workload.units if units is None else units
    local = local_names(workload, dict(model.named_parameters()))
    uses: dict[int, set[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        uses.setdefault(id(param), set()).add(owner(name, names))
    owned: dict[str, dict[str, Tensor]] = {unit: {} for unit in (*names, ROOT)}
    apart: dict[str, dict[str, Tensor]] = {}
    for name, param in model.named_parameters():
        unit = owner(name, names)
        if name in local:
            if unit in workload.local_units:
                apart.setdefault(unit, {})[name] = param
        else:
            owned[unit][name] = param
    return OwningUnits(
        params={unit: params for unit, params in owned.items() if params},
        local=apart,
        shared=frozenset(name for name, param in model.named_parameters() if len(uses[id(param)]) > 1),
    )


def owner(parameter: str, units: tuple[str, ...]) -> str:
    """The innermost unit that contains a parameter, or the root."""
    inside = [(len(module), unit) for unit in units for module in unit.split("+") if parameter.startswith(f"{module}.")]
    return max(inside, default=(0, ROOT))[1]
