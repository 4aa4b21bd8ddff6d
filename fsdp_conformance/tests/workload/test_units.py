"""Which unit owns which parameter, and how large it is."""

from __future__ import annotations

from fsdp_conformance.fixtures import experts, models, probes, reuse, workload_by_name
from fsdp_conformance.plan import Plan
from fsdp_conformance.tests.checks.schedules import (
    STAIRCASE,
)
from fsdp_conformance.workload.units import owner, owning_units, parameter_bytes


def test_the_innermost_unit_owns_a_parameter() -> None:
    """Of nested units each owns its own layer alone; the root owns the head."""
    units = owning_units(probes.exact_nested()).shared

    owned = {unit.fqn: [parameter.fqn for parameter in unit.parameters] for unit in units}
    assert owned["stages.0"] == ["stages.0.linear.weight", "stages.0.linear.bias"]
    assert owned[""] == ["head.weight", "head.bias"]
    assert len(units) == 5


def test_a_unit_without_parameters_owns_nothing() -> None:
    """Containers of units, and the root, are left out where they have no parameters themselves."""
    fqns = {unit.fqn for unit in owning_units(models.nested_always()).shared}

    assert fqns == {"module.0", "module.1.0", "module.1.1", "module.2", "module.3"}


def test_a_unit_of_two_modules_is_one() -> None:
    """Names joined by "+" make one unit."""
    units = owning_units(STAIRCASE, Plan(units=("0+2", "4"))).shared

    assert {unit.fqn: unit.numel * 4 for unit in units} == {"0+2": 896, "4": 1080, "": 4280}


def test_a_shared_parameter_counts_once() -> None:
    """A weight that two units use belongs to one of them."""
    units = owning_units(reuse.tied_across_units()).shared
    names = [parameter.fqn for unit in units for parameter in unit.parameters]

    assert len(names) == len(set(names))
    assert len(names) == len(list(reuse.tied_across_units().build(0).parameters()))


def test_local_units_are_apart() -> None:
    """An expert does not belong to the data-parallel group's units."""
    units = owning_units(experts.mixture_of_experts())

    assert {unit.fqn for unit in units.shared} == {"module.1", ""}
    assert [(unit.fqn, unit.numel * 4) for unit in units.local] == [("module.2", 1152)]


def test_units_are_trainable_or_frozen() -> None:
    """Frozen units own no trainable parameter; units without parameters are neither."""
    frozen = owning_units(workload_by_name("frozen-units"))
    parameterless = owning_units(workload_by_name("parameterless-units"))

    assert [unit.fqn for unit in frozen.frozen] == ["0", "4"]
    assert [unit.fqn for unit in parameterless.shared] == ["0", "2", ""]


def test_the_size_of_a_unit() -> None:
    """A linear layer of 5 x 13 with bias has 78 elements of 4 bytes."""
    units = {unit.fqn: unit for unit in owning_units(probes.exact_nested()).shared}

    assert parameter_bytes([units["stages.0"]]) == 4 * (5 * 13 + 13)


def test_a_unit_of_two_modules_owns_what_both_contain() -> None:
    """Either module's name is a prefix of its parameters' names."""
    assert owner("norm.bias", ("norm+head", "body")) == "norm+head"
