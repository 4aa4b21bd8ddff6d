"""The job of `plan`: build the model on the meta device, and price every way to shard it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from fsdp_conformance.cli import messages
from fsdp_conformance.cli.child import Answer
from fsdp_conformance.cli.plan_order import PlanOrder, order_from_json
from fsdp_conformance.codec import encode
from fsdp_conformance.errors import UsageError
from fsdp_conformance.planner.device_spec import DEVICES
from fsdp_conformance.planner.link_spec import NOMINAL_ERROR, Cluster
from fsdp_conformance.status import Status

_EXAMPLE = "(model, inputs of one rank)"


def run(answer: Answer, order: Mapping[str, Any]) -> None:
    """Answer with the plan as a text, and the exit status."""
    text, status = _plan(order_from_json(order))
    answer("plan", text=text, status=int(status))


def _plan(order: PlanOrder) -> tuple[str, Status]:
    # These import torch.
    from fsdp_conformance.planner.plan_model import counted
    from fsdp_conformance.planner.plan_step import PlanOptions
    from fsdp_conformance.planner.plan_text import decision_text, size_words
    from fsdp_conformance.planner.planner import decide

    options = PlanOptions.of(compute_dtype=order.compute_dtype, utilisation=order.utilisation)
    units = counted(_builder(order.model), order.units, compute_dtype=options.compute_dtype)
    inner, outer = order.links
    cluster = Cluster(world_size=order.world_size, ranks_per_host=order.ranks_per_host, inner=inner, outer=outer)
    decision = decide(
        units,
        cluster,
        DEVICES[order.device],
        options,
        memory_bytes=order.memory_bytes,
        communication_error=NOMINAL_ERROR,
    )
    numel = sum(unit.numel for unit in units)
    status = Status.CERTIFIED if decision.chosen is not None else Status.NOT_CERTIFIED
    if order.as_json:
        content = {"order": asdict(order), "numel": numel, "units": len(units), **decision.to_json()}
        return encode(content, indent=1), status
    subject = (
        f"{order.model}: {numel:,} elements in {messages.plural(len(units), 'unit')}; "
        f"{order.world_size} x {order.device} on {messages.plural(cluster.num_hosts, 'host')}, {order.link_words}; "
        f"{order.compute_dtype} at {order.utilisation:.0%} of peak; {size_words(order.memory_bytes)} per rank"
    )
    lines = [subject, "all times come from a cost model: no rank was started, and nothing was timed"]
    if len(units) == 1:
        lines.append("one unit: the model has no module lists; name the classes to wrap with --units")
    return "\n".join([*lines, decision_text(decision, num_rows=order.num_rows)]), status


def _builder(spec: str) -> Any:
    """The function that `spec` names. Raises UsageError."""
    place, _, name = spec.rpartition(":")
    try:
        module = _file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:  # a user's module can raise anything
        raise UsageError(
            f"model {spec!r} cannot be imported: {type(error).__name__}: {error}. "
            "It must be package.module:function or path/to/file.py:function"
        ) from error
    if not callable(getattr(module, name, None)):
        raise UsageError(f"model must be a function that returns {_EXAMPLE}, but {place} has no function {name!r}")
    return getattr(module, name)


def _file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    sys.path.append(str(path.resolve().parent))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
