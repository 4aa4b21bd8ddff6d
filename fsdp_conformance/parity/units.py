"""The sharded units that parameters belong to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from fsdp_conformance.parity.words import some_names
from fsdp_conformance.recordings.events import Forward


def unit_names(forwards: Iterable[Forward]) -> set[str]:
    """The names of the units below the root that ran in these forwards."""
    return {re.split(r"\[|, call ", key)[0] for forward in forwards for key in forward.units}


def unit_of(name: str, units: Iterable[str]) -> str:
    """The innermost of these units that has the parameter; empty for the root's."""
    return max((unit for unit in units if name.startswith(f"{unit}.")), key=len, default="")


def exactly_units(names: Sequence[str], every: Iterable[str], forwards: Iterable[Forward]) -> str:
    """
    In words, the units whose parameters these are, if they are all parameters of some units and none of another.

    Empty if they are not, or if they are those of all units. `every` has the names of all parameters.
    """
    units = unit_names(forwards)
    of_units: dict[str, set[str]] = {}
    for name in every:
        of_units.setdefault(unit_of(name, units), set()).add(name)
    chosen = set(names)
    whole = [unit for unit, members in of_units.items() if members <= chosen]
    if not units or len(whole) == len(of_units) or chosen != set().union(*(of_units[unit] for unit in whole)):
        return ""
    below = [unit for unit in whole if unit]
    words = [f"the unit{'s' * (len(below) > 1)} {some_names(below)}"] if below else []
    return " and ".join([*words, *["the root unit"] * ("" in whole)])
