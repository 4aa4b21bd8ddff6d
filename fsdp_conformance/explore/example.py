"""
An example: everything that one exploration run needs, as frozen data with a JSON form.

Every rank builds the same model, batches, plan and schedule from it. `axes` says in words what an example exercises;
the counts of an exploration, and what it takes to make an engine fail, are reported in these words.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from math import prod
from typing import Any

from fsdp_conformance import codec
from fsdp_conformance.errors import ConfigError
from fsdp_conformance.fixtures import drawn
from fsdp_conformance.fixtures.drawn import DrawnModel
from fsdp_conformance.plan import BackwardPrefetch, Offload, Plan, Sharding
from fsdp_conformance.workload.definition import Regime, Workload

#: The version of the JSON form. A file of another one is refused.
FORMAT = 1

#: A gradient norm that no drawn model reaches: clipping to it changes nothing.
UNREACHED_NORM = 2.0**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """A model, how it is sharded, and how it is trained."""

    world_size: int = 2
    model: DrawnModel = DrawnModel()  # noqa: RUF009 - frozen
    plan: Plan = Plan()  # noqa: RUF009 - frozen
    regime: Regime = Regime()  # noqa: RUF009 - frozen

    def to_json(self) -> str:
        """The example as text: only what differs from the defaults. `example_from_json` is its inverse."""
        return json.dumps({"format": FORMAT, **_plain(self)}, sort_keys=True)

    @property
    def digest(self) -> str:
        """Eight digits that identify the example, on any machine."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:8]

    def workload(self) -> Workload:
        """The training problem."""
        return drawn.workload(self.model, micro_batches=self.regime.micro_batches, asks=asks(self))

    def size(self) -> tuple[int, int, int]:
        """How much there is to read: how many axes are not at their plainest, ranks and parameters, characters."""
        values = sum(prod(shape) for shape in self.model.shapes().values())
        return len(features(self)), self.world_size * self.regime.steps * values, len(self.to_json())


def example_from_json(text: str) -> Example:
    """Parse an example. Raises ConfigError if it is invalid, or from another version of this package."""
    where = "explored example"
    try:
        data = codec.parsed(text, with_infinities=True)
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise ConfigError([f"format must be {FORMAT}: another version wrote it"], where=where)
        return codec.typed(Example, data)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError([f"must be the JSON of an example, got {text[:80]!r} ({error})"], where=where) from error


# --- what the model asks of an engine --------------------------------------------------------------------------------


def asks(example: Example) -> frozenset[str]:
    """The flags of `Asked.MODEL` that an engine needs for the model and its schedule."""
    model, units = example.model, example.plan.units
    shapes = model.shapes()
    blocks = [block for _, block in model.walk()]
    flags = {
        "scalar_params": any(not shape for shape in shapes.values()),
        "noncontiguous_params": any(
            block.transposed and any(len(shape) == 2 and min(shape) > 1 for shape in block.extras) for block in blocks
        ),
        "unused_divergent": any(block.by_rank for block in blocks) and example.world_size > 1,
        "shared_params": any(_owner(name, units) == _owner(other, units) for name, other in model.ties),
        "shared_across_units": any(_owner(name, units) != _owner(other, units) for name, other in model.ties),
        "frozen_mixed": _mixes_frozen(example),
        "frozen_dynamic": bool(example.regime.frozen_at),
    }
    return frozenset(flag for flag, needed in flags.items() if needed)


def used_blocks(example: Example, step: int) -> set[int]:
    """The blocks that run in a step."""
    return {index for micro in range(example.regime.micro_batches) for index in example.model.called(step + micro)}


def uses_all(example: Example) -> bool:
    """True if every block runs in every step."""
    every_block = set(range(len(example.model.blocks)))
    return all(used_blocks(example, step) == every_block for step in range(example.regime.steps))


def _mixes_frozen(example: Example) -> bool:
    """True if a unit has both frozen and trainable parameters."""
    shapes, units = example.model.shapes(), example.plan.units
    schedule = [tuple(name for name in shapes if example.model.is_frozen(name))]
    schedule += [names for _, names in example.regime.frozen_at]
    for frozen in schedule:
        kinds: dict[str, set[bool]] = {}
        for name in shapes:
            kinds.setdefault(_owner(name, units), set()).add(name in frozen)
        if any(len(kind) > 1 for kind in kinds.values()):
            return True
    return False


def _owner(parameter: str, units: tuple[str, ...]) -> str:
    """The innermost unit that contains a parameter; empty for the root."""
    inside = [(len(name), unit) for unit in units for name in unit.split("+") if parameter.startswith(f"{name}.")]
    return max(inside, default=(0, ""))[1]


# --- axes ------------------------------------------------------------------------------------------------------------

#: What an axis has if nothing special is drawn. The first value named by `axes` otherwise counts as a feature.
PLAIN: dict[str, str] = {
    "world size": "2",
    "sharding": "default",
    "reshard": "default",
    "units": "all",
    "nesting": "flat",
    "shapes": "more rows than ranks",
    "extra shapes": "none",
    "ties": "none",
    "frozen": "none",
    "use": "in order",
    "buffers": "none",
    "optimizer": "sgd",
    "clipping": "none",
    "steps": "1",
    "accumulation": "none",
    "evaluation": "none",
    "idle forwards": "none",
    "events": "none",
    "backwards": "one",
    "dropped gradients": "none",
    "precision": "float32",
    "prefetch": "default",
    "offload": "off",
    "shard dim": "0",
    "small parameters": "sharded",
}


def features(example: Example) -> frozenset[str]:
    """The axes of an example that do not have their plainest value, as `axis: value`."""
    return frozenset(f"{axis}: {value}" for axis, value in axes(example).items() if value != PLAIN[axis])


def axes(example: Example) -> dict[str, str]:
    """The value of every axis."""
    model, plan, regime, flags = example.model, example.plan, example.regime, asks(example)
    return {
        "world size": str(example.world_size),
        "sharding": f"{plan.sharding}" + (f", {plan.replicas} replicas" if plan.replicas > 1 else ""),
        "reshard": _reshard(plan),
        "units": _units(example),
        "nesting": _nesting(model),
        "shapes": _shapes(example),
        "extra shapes": _extras(model),
        "ties": _ties(flags),
        "frozen": _frozen(example, flags),
        "use": _use(example),
        "buffers": "counted" if any(block.counts for _, block in model.walk()) else "none",
        "optimizer": regime.optimizer,
        "clipping": _clipping(regime),
        "steps": "1" if regime.steps == 1 else "more",
        "accumulation": _accumulation(example),
        "evaluation": " and ".join(
            [*["before a step"] * bool(regime.eval_before), *["inside a step"] * bool(regime.eval_between)]
        )
        or "none",
        "idle forwards": "some" if regime.idle_forwards else "none",
        "events": " and ".join(sorted({event.action.value for event in regime.events})) or "none",
        "backwards": "two" if regime.backwards_per_forward > 1 else "one",
        "dropped gradients": "some" if regime.gradient_to_none else "none",
        "precision": (plan.param_dtype or "float32")
        + (f", reduced in {plan.reduce_dtype}" if plan.reduce_dtype else ""),
        "prefetch": _prefetch(plan),
        "offload": plan.offload.value if plan.offload is not Offload.OFF else "off",
        "shard dim": str(plan.shard_dim),
        "small parameters": "whole" if plan.persist_numel else "sharded",
    }


def _reshard(plan: Plan) -> str:
    if plan.reshard_after_forward is None:
        return "default"
    if isinstance(plan.reshard_after_forward, bool):
        return "after forward" if plan.reshard_after_forward else "after backward"
    return "to a smaller group"


def _units(example: Example) -> str:
    plan, model = example.plan, example.model
    if plan.auto_wrap is not None:
        return f"chosen by {plan.auto_wrap.partition(':')[0]}"
    if any("+" in unit for unit in plan.units):
        return "joined"
    if not plan.units:
        return "only the root"
    return "all" if all(block.is_unit for _, block in model.walk()) else "some"


def _nesting(model: DrawnModel) -> str:
    depth = max(name.count("inner") for name, _ in model.walk())
    return "flat" if not depth else f"{depth} deep"


def _shapes(example: Example) -> str:
    """The rows of weights and biases against the ranks that share them."""
    size = example.world_size // example.plan.replicas
    shapes = example.model.shapes()
    rows = [shape[0] for name, shape in shapes.items() if shape and "extra" not in name]
    if any(count < size for count in rows):
        return "empty shards"
    return "uneven shards" if any(count % size for count in rows) else "more rows than ranks"


def _extras(model: DrawnModel) -> str:
    shapes = [shape for _, block in model.walk() for shape in block.extras]
    if not shapes:
        return "none"
    if any(block.transposed for _, block in model.walk()):
        return "not contiguous"
    if any(not shape for shape in shapes):
        return "scalars"
    return "single elements" if any(prod(shape) == 1 for shape in shapes) else "some"


def _ties(flags: frozenset[str]) -> str:
    if "shared_across_units" in flags:
        return "across units"
    return "within a unit" if "shared_params" in flags else "none"


def _frozen(example: Example, flags: frozenset[str]) -> str:
    if example.regime.frozen_at:
        return "changing"
    if not example.model.frozen:
        return "none"
    return "mixed in a unit" if "frozen_mixed" in flags else "whole units"


def _use(example: Example) -> str:
    model = example.model
    if any(block.by_rank for _, block in model.walk()):
        return "by rank"
    never = set(range(len(model.blocks))) - {index for call in model.calls for index in call}
    if model.calls and never:
        return "some never"
    if not uses_all(example):
        return "some skipped"
    if any(block.repeat > 1 for _, block in model.walk()) or any(len(set(call)) < len(call) for call in model.calls):
        return "some twice"
    return "in order" if all(call == tuple(range(len(model.blocks))) for call in model.calls) else "other orders"


def _clipping(regime: Regime) -> str:
    if regime.max_norm is None:
        return "none"
    if regime.max_norm >= UNREACHED_NORM:
        return "inactive"
    return "active" if regime.norm_type == 2.0 else "active, other norm"


def _accumulation(example: Example) -> str:
    regime = example.regime
    if regime.micro_batches == 1:
        return "none"
    if all(regime.is_reduced(micro) for micro in range(regime.micro_batches)):
        return "all reduced" + (", replicas deferred" if example.plan.defer_all_reduce else "")
    return "deferred" if not any(regime.reduced[:-1]) else "reduced and deferred"


def _prefetch(plan: Plan) -> str:
    words = [] if plan.backward_prefetch is BackwardPrefetch.DEFAULT else [f"backward {plan.backward_prefetch.value}"]
    words += ["forward"] * plan.forward_prefetch + [f"explicit {plan.explicit_prefetch}"] * bool(plan.explicit_prefetch)
    return ", ".join(words) or "default"


# --- JSON ------------------------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """A value as JSON has it; of a dataclass, the fields that are not at their defaults."""
    if is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _plain(given)
            for field in fields(value)
            if (given := getattr(value, field.name)) != _default(field)
        }
    if isinstance(value, Enum):
        return value.value
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _default(field: Any) -> Any:
    if field.default is not MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not MISSING else MISSING


def shard_group_size(example: Example) -> int:
    """Over how many ranks a parameter is sharded, where the plan says so."""
    if example.plan.sharding is Sharding.NONE:
        return 1
    return example.world_size // example.plan.replicas
