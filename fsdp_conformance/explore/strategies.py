"""
Hypothesis strategies that draw examples for an engine that declares certain flags.

Only what is declared is asked for. Every choice has its plainest value first, because Hypothesis shrinks towards it.
Choices that no correct engine could be judged by are left out here, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from hypothesis import strategies as st

from fsdp_conformance.driver.events import EVENT_FLAGS
from fsdp_conformance.explore.example import UNREACHED_NORM, Example, asks, uses_all
from fsdp_conformance.fixtures.drawn import DrawnBlock, DrawnModel
from fsdp_conformance.plan import BackwardPrefetch, Offload, Plan, Sharding
from fsdp_conformance.workload.definition import Regime
from fsdp_conformance.workload.events import LEGAL, PER_MICRO_BATCH, Action, Event, Moment, in_order

T = TypeVar("T")
Draw = Callable[[st.SearchStrategy[Any]], Any]

_SHARDING = {
    Sharding.FULL: "zero3",
    Sharding.GRAD_OPTIM: "zero2",
    Sharding.OPTIM: "zero1",
    Sharding.NONE: "no_shard",
    Sharding.HYBRID: "hsdp",
}

#: Shapes of extra parameters: odd sizes, fewer rows than ranks, single elements, rows of several dims.
_EXTRAS: tuple[tuple[int, ...], ...] = ((3,), (1,), (5, 1), (1, 1), (7,), (2, 3), (3, 2, 2), (6, 4), (1, 5), (4,))

#: What may happen besides training. Freezing and dropped gradients have their own fields in a regime.
_ACTIONS = tuple(action for action in Action if action not in (Action.FREEZE, Action.DROP))

#: New learning rates and factors of what is written: dyadic, so that exact models stay exact.
_RATES = (0.0625, 0.25, 0.125)
_FACTORS = (0.5, 2.0, -1.0)

#: Mixed precision is judged bit for bit where the order of additions cannot matter: see `references.rounding`.
_MOST_RANKS_ROUNDED = 2


def examples(declared: frozenset[str], world_sizes: Sequence[int] = (2, 3, 1, 4, 5)) -> st.SearchStrategy[Example]:
    """Examples for an engine with these flags."""
    return _examples(declared, tuple(world_sizes))


@st.composite
def _examples(draw: Draw, declared: frozenset[str], world_sizes: tuple[int, ...]) -> Example:
    kind = draw(st.sampled_from(_kinds(declared, world_sizes)))
    rounded = kind == "low precision"
    sizes = tuple(size for size in world_sizes if size <= _MOST_RANKS_ROUNDED) if rounded else world_sizes
    world_size = draw(st.sampled_from(sizes))
    # A rank alone cannot use other layers than its peers.
    by_rank = "unused_divergent" in declared and world_size > 1
    model = _draw_model(draw, declared, smooth=kind in ("adam", "clipped"), by_rank=by_rank)
    plan = _draw_plan(draw, declared, model, world_size, rounded=rounded)
    regime = _draw_regime(draw, declared, model, plan, kind)
    if regime.micro_batches > 1 and plan.sharding is Sharding.HYBRID and "hsdp_defer_allreduce" in declared:
        # What is deferred altogether is not deferred over the replicas.
        deferred = not regime.reduced and draw(st.booleans())
        plan = replace(plan, defer_all_reduce=deferred)
    if rounded:
        plan = _low_precision(draw, declared, plan, regime)
    return _fitting(Example(world_size=world_size, model=model, plan=plan, regime=regime), declared)


def _kinds(declared: frozenset[str], world_sizes: Sequence[int]) -> tuple[str, ...]:
    # Most of what goes wrong between steps takes an event, at one of many points.
    kinds = ["exact"] * 3 + ["events"] * 4 + ["adam"]
    kinds += ["clipped"] if "clip_grad_norm" in declared else []
    small = any(size <= _MOST_RANKS_ROUNDED for size in world_sizes)
    return (*kinds, *(["low precision"] if "mixed_precision" in declared and small else []))


# --- the model -------------------------------------------------------------------------------------------------------


def _draw_model(draw: Draw, declared: frozenset[str], *, smooth: bool, by_rank: bool) -> DrawnModel:
    count = draw(st.integers(1, 3))
    blocks = tuple(_draw_block(draw, declared, depth=0, by_rank=by_rank) for _ in range(count))
    model = DrawnModel(
        width=draw(st.sampled_from((2, 3, 1, 5, 7, 4))),
        blocks=blocks,
        ends_are_units=draw(_rarely()),
        smooth=smooth,
        salt=draw(st.integers(0, 7)),
    )
    model = _draw_use(draw, model)
    if "multi_module_unit" in declared and _can_be_joined(model) and draw(st.booleans()):
        model = replace(model, joined=True)
    model = _draw_ties(draw, declared, model)
    return _draw_frozen(draw, declared, model)


def _draw_block(draw: Draw, declared: frozenset[str], *, depth: int, by_rank: bool) -> DrawnBlock:
    inner: tuple[DrawnBlock, ...] = ()
    if depth < 2 and draw(_rarely()):
        count = draw(st.integers(1, 2 - depth))
        inner = tuple(_draw_block(draw, declared, depth=depth + 1, by_rank=by_rank) for _ in range(count))
    shapes = (*_EXTRAS, ()) if "scalar_params" in declared else _EXTRAS
    extras = tuple(draw(st.lists(st.sampled_from(shapes), max_size=2)))
    return DrawnBlock(
        hidden=draw(st.sampled_from((2, 3, 1, 5, 7, 11))),
        bias=not draw(_rarely()),
        extras=extras,
        transposed="noncontiguous_params" in declared and bool(extras) and draw(_rarely()),
        inner=inner,
        is_unit=not draw(_rarely()),
        repeat=2 if draw(_rarely()) else 1,
        by_rank=by_rank and draw(_rarely()),
        counts=draw(_rarely()),
    )


def _draw_use(draw: Draw, model: DrawnModel) -> DrawnModel:
    """Which blocks run when: in order, or by a list of orders that repeats."""
    if draw(st.booleans()):
        return model
    order = st.lists(st.integers(0, len(model.blocks) - 1), min_size=1, max_size=3).map(tuple)
    return replace(model, calls=tuple(draw(st.lists(order, min_size=1, max_size=2))))


def _can_be_joined(model: DrawnModel) -> bool:
    """True if two blocks may form one unit: they have nothing inside, and always run in order, once."""
    if len(model.blocks) < 2 or model.calls:
        return False
    return all(block.is_unit and not block.inner and block.repeat == 1 for block in model.blocks[:2])


def _draw_ties(draw: Draw, declared: frozenset[str], model: DrawnModel) -> DrawnModel:
    """Tie one weight to another of the same shape, in a unit or across units, as far as that is declared."""
    if not {"shared_params", "shared_across_units"} & declared or not draw(_rarely()):
        return model
    weights = {name: shape for name, shape in model.shapes().items() if name.endswith((".up.weight", ".down.weight"))}
    pairs = []
    for other, shape in weights.items():
        for name in list(weights)[list(weights).index(other) + 1 :]:
            tied = replace(model, ties=((name, other),))
            flags = asks(Example(model=tied, plan=Plan(units=tied.units())))
            if weights[name] == shape and not {"shared_params", "shared_across_units"} & flags - declared:
                pairs.append((name, other))
    if not pairs:
        return model
    return replace(model, ties=(draw(st.sampled_from(pairs)),))


def _draw_frozen(draw: Draw, declared: frozenset[str], model: DrawnModel) -> DrawnModel:
    if not draw(_rarely()):
        return model
    names = _freezable(model, mixed="frozen_mixed" in declared)
    return replace(model, frozen=tuple(draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True))))


def _freezable(model: DrawnModel, *, mixed: bool) -> list[str]:
    """
    Blocks with all that is in them; with `mixed` also single parameters. The head always trains, or there would be no
    loss to differentiate.
    """
    names = [name for name, _ in model.walk()]
    return names + [name for name in model.shapes() if not name.startswith("head.")] if mixed else names


# --- the plan --------------------------------------------------------------------------------------------------------


def _draw_plan(draw: Draw, declared: frozenset[str], model: DrawnModel, world_size: int, *, rounded: bool) -> Plan:
    sharding = draw(st.sampled_from((Sharding.DEFAULT, *(s for s, flag in _SHARDING.items() if flag in declared))))
    replicas = 1
    if sharding is Sharding.HYBRID:
        replicas = draw(st.sampled_from([count for count in range(1, world_size + 1) if world_size % count == 0]))
        if replicas == 1 or rounded:
            # One group of all ranks is full sharding, and says nothing new.
            sharding, replicas = Sharding.DEFAULT, 1
    plan = Plan(
        sharding=sharding,
        replicas=replicas,
        units=model.units(),
        reshard_after_forward=_draw_reshard(draw, declared, sharding, world_size),
        persist_numel=draw(st.sampled_from((0, 0, 3, 20))) if "persist_small" in declared else 0,
        shard_dim=1 if "shard_dim" in declared and draw(_seldom()) else 0,
        offload=Offload.CPU if "cpu_offload_params" in declared and draw(_rarely()) else Offload.OFF,
    )
    if "auto_wrap" in declared and not model.joined and not model.ties and draw(_rarely()):
        plan = replace(plan, units=(), auto_wrap=draw(st.sampled_from(("class:Block", "size:20", "size:1"))))
    return _with_prefetch(draw, declared, plan)


def _draw_reshard(draw: Draw, declared: frozenset[str], sharding: Sharding, world_size: int) -> bool | int | None:
    """Draw whether to reshard, where the sharding degree does not decide it."""
    choices: list[bool | int | None] = [None]
    if "reshard_after_forward" in declared and sharding in (Sharding.DEFAULT, Sharding.HYBRID):
        choices += [True, False]
    if "reshard_int" in declared and sharding is Sharding.DEFAULT:
        choices += [size for size in range(2, world_size) if world_size % size == 0]
    chosen: bool | int | None = draw(st.sampled_from(choices))
    return chosen


def _with_prefetch(draw: Draw, declared: frozenset[str], plan: Plan) -> Plan:
    if "prefetch_backward" in declared:
        plan = replace(plan, backward_prefetch=draw(st.sampled_from(tuple(BackwardPrefetch))))
    if "prefetch_forward" in declared and draw(_rarely()):
        plan = replace(plan, forward_prefetch=True)
    elif "prefetch_explicit" in declared and draw(_rarely()):
        plan = replace(plan, explicit_prefetch=draw(st.integers(1, 2)))
    return plan


def _low_precision(draw: Draw, declared: frozenset[str], plan: Plan, regime: Regime) -> Plan:
    """Compute in bfloat16. What is deferred is accumulated in float32, so it must be reduced in it, too."""
    deferred = not all(regime.is_reduced(micro) for micro in range(regime.micro_batches))
    reduces = "mp_reduce" in declared and (deferred or draw(st.booleans()))
    return replace(plan, param_dtype="bfloat16", reduce_dtype="float32" if reduces else None)


# --- the schedule ----------------------------------------------------------------------------------------------------


def _draw_regime(draw: Draw, declared: frozenset[str], model: DrawnModel, plan: Plan, kind: str) -> Regime:
    # One step shows least, so it comes first for shrinking, but seldom.
    steps = draw(st.sampled_from((2, 3, 4, 3) if kind == "events" else (1, 3, 2, 3, 4, 3)))
    micro_batches = draw(st.sampled_from((1, 2, 3, 2) if kind == "events" else (1, 2, 1, 3, 2)))
    reduced: tuple[bool, ...] = ()
    may_defer = "no_sync" in declared and (kind != "low precision" or "mp_reduce" in declared)
    if micro_batches > 1 and may_defer and draw(st.booleans()):
        reduced = (*(draw(st.booleans()) for _ in range(micro_batches - 1)), True)
        reduced = () if all(reduced) else reduced
    some_steps = st.lists(st.integers(0, steps - 1), min_size=1, max_size=2, unique=True).map(sorted).map(tuple)
    regime = Regime(
        optimizer="adam" if kind == "adam" else "sgd",
        steps=steps,
        micro_batches=micro_batches,
        reduced=reduced,
        eval_before=draw(some_steps) if draw(_rarely()) else (),
        eval_between=draw(some_steps) if draw(_seldom()) else (),
        # The reference for low precision knows no forward without a backward.
        idle_forwards=1 if kind != "low precision" and draw(_seldom()) else 0,
        # In low precision the two gradients may be rounded before or after they are added.
        backwards_per_forward=2 if kind != "low precision" and draw(_seldom()) else 1,
        unused_parameters=True,
    )
    regime = _with_clipping(draw, declared, regime, kind)
    if draw(_seldom()):
        dropped = draw(st.sampled_from([name for name in model.shapes() if not model.is_frozen(name)]))
        regime = replace(regime, gradient_to_none=(dropped,))
    if "frozen_dynamic" in declared and steps > 1 and draw(_rarely()):
        regime = replace(regime, frozen_at=_draw_freezing(draw, declared, model, steps))
    # The reference for low precision knows no events.
    if kind == "events" or (kind != "low precision" and draw(_rarely())):
        regime = replace(regime, events=_draw_events(draw, declared, model, plan, regime))
    return regime


def _with_clipping(draw: Draw, declared: frozenset[str], regime: Regime, kind: str) -> Regime:
    if kind == "clipped":
        norm_type = draw(st.sampled_from((2.0, float("inf"), 1.0))) if "clip_norm_type" in declared else 2.0
        return replace(regime, max_norm=draw(st.sampled_from((1.0, 0.5))), norm_type=norm_type)
    if kind in ("exact", "events") and "clip_grad_norm" in declared and draw(_seldom()):
        return replace(regime, max_norm=UNREACHED_NORM)
    return regime


def _draw_events(
    draw: Draw, declared: frozenset[str], model: DrawnModel, plan: Plan, regime: Regime
) -> tuple[Event, ...]:
    """One to four different events at points where they are legal, in the order of the run."""
    by_hand = bool(plan.units) and not model.joined and plan.sharding in (Sharding.DEFAULT, Sharding.FULL)
    possible = [
        action
        for action in _ACTIONS
        if EVENT_FLAGS.get(action) in {None, *declared} and (action is not Action.UNSHARD or by_hand)
    ]
    drawn: list[Event] = []
    for action in draw(st.lists(st.sampled_from(possible), min_size=1, max_size=4, unique=True)):
        event = _draw_event(draw, action, model, plan, regime)
        if event.action is Action.LOAD:
            # Before the others: of two events at one point, the first happens first.
            drawn.insert(0, _draw_save(draw, event))
        drawn.append(event)
    return in_order(drawn)


def _draw_save(draw: Draw, load: Event) -> Event:
    """A save at the point of a load or before it."""
    moments = [moment for moment in Moment if moment in LEGAL[Action.SAVE]]
    points = [(step, moment) for step in range(load.step + 1) for moment in moments]
    step, moment = draw(st.sampled_from(points[: points.index((load.step, load.moment)) + 1]))
    return Event(action=Action.SAVE, moment=moment, step=step)


def _draw_event(draw: Draw, action: Action, model: DrawnModel, plan: Plan, regime: Regime) -> Event:
    # A value that a gradient depends on must not change between forward and backward.
    forbidden = {Moment.LOSS} if action in (Action.WRITE, Action.ASSIGN) else set()
    moment = draw(st.sampled_from([each for each in Moment if each in LEGAL[action] - forbidden]))
    fields: dict[str, Any] = {}
    match action:
        case Action.UNSHARD:
            fields["names"] = (draw(st.sampled_from(plan.units)),)
        case Action.LEARNING_RATE:
            fields["value"] = draw(st.sampled_from(_RATES))
        case Action.WRITE | Action.ASSIGN | Action.WRITE_GRADIENT | Action.ASSIGN_GRADIENT:
            tied = {name for pair in model.ties for name in pair}
            fields["names"] = (draw(st.sampled_from([name for name in model.shapes() if name not in tied])),)
            fields["value"] = draw(st.sampled_from(_FACTORS))
        case Action.TOGGLE:
            fields["ranks"] = draw(st.sampled_from(((), (0,))))
        case _:
            pass
    micro = draw(st.integers(0, regime.micro_batches - 1)) if moment in PER_MICRO_BATCH else 0
    return Event(action=action, moment=moment, step=draw(st.integers(0, regime.steps - 1)), micro=micro, **fields)


def _draw_freezing(draw: Draw, declared: frozenset[str], model: DrawnModel, steps: int) -> tuple[Any, ...]:
    """Parameters that freeze at a step, and may unfreeze at a later one, except those that the model freezes."""
    prefix = draw(st.sampled_from(_freezable(model, mixed="frozen_mixed" in declared)))
    always = tuple(name for name in model.shapes() if model.is_frozen(name))
    names = tuple(name for name in model.shapes() if name == prefix or name.startswith(f"{prefix}."))
    begin = draw(st.integers(1, steps - 1))
    changes: list[tuple[int, tuple[str, ...]]] = [(begin, tuple(dict.fromkeys((*always, *names))))]
    if begin + 1 < steps and draw(st.booleans()):
        changes.append((begin + 1, always))
    return tuple(changes)


# --- what cannot be judged -------------------------------------------------------------------------------------------


def _fitting(example: Example, declared: frozenset[str]) -> Example:
    """The example, without what the contract leaves to an engine or what the references cannot judge."""
    model, plan, regime = example.model, example.plan, example.regime
    if (
        not uses_all(example)
        and "unused_untouched" not in declared
        and any(set(call) != {index for call in model.calls for index in call} for call in model.calls)
    ):
        # A gradient of zeros in place of None moves a parameter that has momentum: both are legal (R117).
        model = replace(model, calls=())
    if plan.param_dtype is not None:
        # More than two gradients of one parameter have more than one sum in low precision.
        blocks = tuple(_used_once(block) for block in model.blocks)
        model = replace(model, blocks=blocks, calls=(), ties=())
    lost = list(_writes_to_gathered(regime))
    regime = replace(regime, events=tuple(event for event in regime.events if event not in lost))
    units = plan.units and model.units()
    example = replace(example, model=model, plan=replace(plan, units=units), regime=regime)
    missing = asks(example) - declared
    if "frozen_mixed" in missing:
        example = replace(example, model=replace(model, frozen=()), regime=replace(regime, frozen_at=()))
    return example


def _writes_to_gathered(regime: Regime) -> Iterator[Event]:
    """
    The writes to parameters between a forward and the backward that follows it, in another micro-batch or step.

    After a forward, engines may keep a unit gathered for its backward, as FSDP1 keeps its root. Another forward then
    computes with that copy, which lacks what has been written to the shards in the meantime.
    """
    is_gathered = False
    for step in range(regime.steps):
        for moment in Moment:
            # Writes are legal only where no micro-batch is under way, and after the last of them.
            micro = regime.micro_batches - 1 if moment is Moment.BACKWARD else 0
            is_gathered = is_gathered and moment is not Moment.BACKWARD
            for event in regime.at(moment, step, micro):
                if event.action in (Action.WRITE, Action.ASSIGN) and is_gathered:
                    yield event
                is_gathered = is_gathered or event.action is Action.FORWARD


def _used_once(block: DrawnBlock) -> DrawnBlock:
    return replace(block, repeat=1, inner=tuple(_used_once(inner) for inner in block.inner))


def _rarely() -> st.SearchStrategy[bool]:
    """True once in four times."""
    return st.sampled_from((False, False, False, True))


def _seldom() -> st.SearchStrategy[bool]:
    """True once in eight times."""
    return st.sampled_from((False,) * 7 + (True,))
