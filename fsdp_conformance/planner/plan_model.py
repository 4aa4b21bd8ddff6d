"""A user's model for the planner: built on meta, cut into units, counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.planner.plan_candidate import PlanOptions
from fsdp_conformance.planner.plan_unit import PlanUnit, blocks_of_lists, named_classes, plan_units

_WHERE = "plan"


def counted(
    build: Callable[[], Any], classes: Sequence[str], *, compute_dtype: str, utilisation: float
) -> tuple[list[PlanUnit], PlanOptions]:
    """
    The units of what `build` returns: a module, and the arguments of one forward of one rank.

    `build` is called with meta as the default device. `classes` are the names of those that become units; none: the
    members of module lists. Raises ConfigError for another result, for classes that the model does not have, and for
    what `build` raises.
    """
    options = PlanOptions(compute_dtype=getattr(torch, compute_dtype), utilisation=utilisation)
    try:
        with torch.device("meta"):
            built = build()
    except Exception as error:
        raise ConfigError(
            [f"the model's function raised {type(error).__name__}: {error}, but should build it on meta"], where=_WHERE
        ) from error
    match built:
        case (nn.Module() as model, (list() | tuple()) as inputs):
            pass
        case _:
            problem = (
                f"the model's function returned {_described(built)}, but should return a module and a tuple of the "
                "inputs of one rank's forward: model, (tokens,)"
            )
            raise ConfigError([problem], where=_WHERE)
    found = {type(module).__name__ for module in model.modules()}
    problems = [
        f"units={name!r}, but should be a class of the model: {', '.join(sorted(found))}"
        for name in classes
        if name not in found
    ]
    if problems:
        raise ConfigError(problems, where=_WHERE)
    is_unit = named_classes(classes) if classes else blocks_of_lists(model)
    return plan_units(model, inputs, is_unit, compute_dtype=options.compute_dtype), options


def _described(built: object) -> str:
    if isinstance(built, tuple):
        return f"({', '.join(type(each).__name__ for each in built)})"
    return type(built).__name__
