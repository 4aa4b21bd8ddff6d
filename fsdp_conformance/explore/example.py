"""
An example: the model, plan and schedule of a scenario, as every rank builds them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from fsdp_conformance.explore.own_model import OwnModel
from fsdp_conformance.fixtures import drawn
from fsdp_conformance.fixtures.drawn import DrawnModel
from fsdp_conformance.plan import Plan, Sharding
from fsdp_conformance.workload.definition import Regime, Workload

#: A gradient norm that no drawn model reaches: clipping to it changes nothing.
UNREACHED_NORM = 2.0**20


class Initial(StrEnum):
    """Where the initial values of the engine's model come from."""

    EQUAL = "equal on all ranks"
    FIRST_RANK = "from the first rank"
    """Other ranks build the model with other values; the engine must take those of the first."""
    WRITTEN = "set after wrapping"
    """The model is built with other values; the right ones are written to the wrapped model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """A model, how it is sharded, and how it is trained."""

    world_size: int = 2
    model: DrawnModel | OwnModel = DrawnModel()  # noqa: RUF009 - frozen
    plan: Plan = Plan()  # noqa: RUF009 - frozen
    regime: Regime = Regime()  # noqa: RUF009 - frozen
    initial: Initial = Initial.EQUAL
    attributes: bool = False
    """Parameters have attributes of the user before the model is wrapped."""
    summing_hook: bool = False
    """A communication hook of the user adds up the gradients, in place of their average."""
    second: bool = False
    """A second model, wrapped by the same engine, is trained in between."""
    resumed: Plan | None = None
    """
    Before the last step, training is saved in a checkpoint, which a new engine with this plan loads and trains on from;
    None: one engine trains all steps.
    """

    @property
    def regime_of_engine(self) -> Regime:
        """The regime as the engine is asked for it: a hook of the user adds gradients up without its help."""
        return replace(self.regime, sums=False) if self.summing_hook else self.regime

    @property
    def changes_in_place(self) -> bool:
        """True if the user changes what the model returns in place."""
        return isinstance(self.model, DrawnModel) and "in place" in self.model.passing.outputs

    def workload(self, rows: int = drawn.ROWS) -> Workload:
        """The training problem, with so many samples in a batch; the user's own model has its own batches."""
        if isinstance(self.model, OwnModel):
            return replace(self.model.training, capabilities=self.model.workload.capabilities | asks(self))
        return drawn.workload(self.model, micro_batches=self.regime.micro_batches, asks=asks(self), rows=rows)


# --- what the model asks of an engine --------------------------------------------------------------------------------


def asks(example: Example) -> frozenset[str]:
    """The flags of `Asked.MODEL` that an engine needs for the model and its schedule."""
    model, units = example.model, example.plan.units
    shapes = model.shapes()
    blocks = [block for _, block in model.walk()] if isinstance(model, DrawnModel) else []
    flags = {
        "scalar_params": any(not shape for shape in shapes.values()),
        "noncontiguous_params": any(
            block.transposed and any(len(shape) == 2 and min(shape) > 1 for shape in block.extras) for block in blocks
        ),
        "mixed_dtypes": any(block.double == "extras" for block in blocks),
        "unit_dtypes": any(block.double == "all" for block in blocks),
        "unused_divergent": any(block.by_rank for block in blocks) and example.world_size > 1,
        "shared_params": any(_owner(name, units) == _owner(other, units) for name, other in model.ties),
        "shared_across_units": any(_owner(name, units) != _owner(other, units) for name, other in model.ties),
        "frozen_mixed": _mixes_frozen(example),
        "frozen_dynamic": bool(example.regime.frozen_at),
    }
    return frozenset(flag for flag, needed in flags.items() if needed)


def used_blocks(example: Example, step: int) -> set[int]:
    """The blocks of a drawn model that run in a step."""
    model = example.model
    if isinstance(model, OwnModel):
        return set()
    return {index for micro in range(example.regime.micro_batches) for index in model.called(step + micro)}


def uses_all(example: Example) -> bool:
    """True if every parameter is used in every step: each block runs, and the first layer's output has a gradient."""
    model = example.model
    if isinstance(model, OwnModel):
        return model.uses_all
    every_block = set(range(len(model.blocks)))
    return model.passing.inputs != "detached" and all(
        used_blocks(example, step) == every_block for step in range(example.regime.steps)
    )


def trains_all(example: Example) -> bool:
    """True if, moreover, none of them is frozen from the beginning."""
    return uses_all(example) and not any(map(example.model.is_frozen, example.model.shapes()))


def _mixes_frozen(example: Example) -> bool:
    """True if a unit has both frozen and trainable parameters."""
    ignored = tuple(f"{module}." for module in example.model.ignored())
    shapes = [name for name in example.model.shapes() if not name.startswith(ignored)]
    units = example.plan.units
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


def shard_group_size(example: Example) -> int:
    """Over how many ranks a parameter is sharded, where the plan says so."""
    if example.plan.sharding is Sharding.NONE:
        return 1
    return example.world_size // example.plan.replicas
