"""What a reducer refuses, and what it says of parameters that got no gradient, or a second one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from fsdp_conformance.engine.data_parallel.reducer_config import ReducerConfig
from fsdp_conformance.engine.errors import MarkedReadyTwice, ReductionUnfinished
from fsdp_conformance.errors import ConfigError

#: How many names an error lists, unless TORCH_DISTRIBUTED_DEBUG is DETAIL.
NAMES_LISTED = 20
_c10d: Any = dist  # names that torch.distributed has, and does not list


def check_parameters(named: Sequence[tuple[str, nn.Parameter]], sparse: Collection[str]) -> None:
    """Raises ConfigError for parameters that cannot be reduced together, and for names that do not exist."""
    names = [name for name, _ in named]
    problems = []
    for kind, wrong in (
        ("appear more than once", sorted(name for name, count in Counter(names).items() if count > 1)),
        ("are named as sparse, but should be among the parameters", sorted(set(sparse) - set(names))),
    ):
        if wrong:
            problems.append(f"{', '.join(wrong)} {kind}")
    devices = sorted({str(parameter.device) for _, parameter in named})
    if len(devices) > 1:
        problems.append(f"parameters are on {' and '.join(devices)}, but should be on one device")
    if "meta" in devices:
        problems.append("parameters are on the meta device, but should have values")
    if problems:
        raise ConfigError(problems, where="Reducer")


def unfinished(names: Sequence[str], missing: Sequence[int], config: ReducerConfig) -> ReductionUnfinished:
    """A backward ended well and left `missing`, indices into `names`, without a gradient."""
    if config.static_graph:
        hint = "The graph was declared static: every iteration must use the parameters that the first one used."
    else:
        hint = (
            "Parameters that a forward does not use, or that the loss does not depend on, need "
            "find_unused_parameters=True; the outputs that the loss is made of must be returned by forward. Every "
            "rank must use all others in the backward before."
        )
    return ReductionUnfinished(
        f"the last backward gave no gradient to {', '.join(_listed(names, missing))}, but should give one to every "
        "parameter before the next forward",
        where="Reducer.prepare_for_forward",
        hint=hint,
    )


def ready_twice(names: Sequence[str], index: int, *, finds_unused: bool) -> MarkedReadyTwice:
    """A parameter got a second gradient in one reduction."""
    hint = (
        "Likely causes: a parameter is used outside of forward and got a backward of its own; several backwards of one "
        "forward share it; or it is used in several reentrant checkpoints, which static_graph=True allows."
    )
    if finds_unused:
        hint += (
            " Or it was taken for unused, because the graph behind forward's outputs does not show its use: return "
            "every output that the loss depends on, in lists, tuples, dicts or dataclasses."
        )
    return MarkedReadyTwice(
        f"parameter {', '.join(_listed(names, [index]))} got a second gradient in one reduction, but should get one",
        where="backward",
        hint=hint,
    )


def _listed(names: Sequence[str], indices: Sequence[int]) -> list[str]:
    """Names with indices; not more than NAMES_LISTED unless the debug level asks for all."""
    most = len(indices) if _c10d.get_debug_level() == _c10d.DebugLevel.DETAIL else NAMES_LISTED
    listed = [f"{names[index]} (index {index})" for index in indices[:most]]
    return listed + ([f"and {len(indices) - most} more"] if len(indices) > most else [])
