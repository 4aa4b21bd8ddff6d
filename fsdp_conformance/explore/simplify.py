"""
Simpler examples than a given one: each has one thing made plain.

Hypothesis shrinks what was drawn, choice by choice. Where one choice decides what the later ones mean, it stops early;
these candidates change the example itself, so they get further.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from fsdp_conformance.explore.example import Example, asks
from fsdp_conformance.fixtures.drawn import DrawnBlock, DrawnModel
from fsdp_conformance.plan import Plan
from fsdp_conformance.workload.definition import Regime
from fsdp_conformance.workload.events import in_order, without_a_save

#: Fields of a plan that make sense only together.
_TOGETHER = (
    ("sharding", "replicas", "reshard_after_forward", "defer_all_reduce"),
    ("param_dtype", "reduce_dtype"),
)
#: Fields of a plan that the model decides, or the case.
_GIVEN = ("units", "auto_wrap", "device", "init_mode")


def simpler(example: Example) -> Iterator[Example]:
    """
    Candidates, those that take most away first. Each can be built, asks for no flag that the example does not ask for,
    and is not the example itself.
    """
    for candidate in (*_worlds(example), *_models(example), *_regimes(example), *_plans(example)):
        if candidate != example and _is_whole(candidate) and asks(candidate) <= asks(example):
            yield candidate


def _worlds(example: Example) -> Iterator[Example]:
    if example.plan.replicas == 1:
        yield replace(example, world_size=2)


def _models(example: Example) -> Iterator[Example]:
    model = example.model
    plain = DrawnModel()
    for name in ("calls", "ties", "frozen", "joined", "ends_are_units", "width", "salt"):
        yield _with_model(example, replace(model, **{name: getattr(plain, name)}))
    for index, block in enumerate(model.blocks):
        others = (*model.blocks[:index], *model.blocks[index + 1 :])
        if others and not model.calls:
            yield _with_model(example, replace(model, blocks=others, joined=model.joined and len(others) > 1))
        for simple in _blocks(block):
            yield _with_model(
                example, replace(model, blocks=(*model.blocks[:index], simple, *model.blocks[index + 1 :]))
            )


def _blocks(block: DrawnBlock) -> Iterator[DrawnBlock]:
    plain = DrawnBlock()
    yield plain
    for field in fields(DrawnBlock):
        if getattr(block, field.name) != getattr(plain, field.name):
            yield replace(block, **{field.name: getattr(plain, field.name)})


def _regimes(example: Example) -> Iterator[Example]:
    regime = example.regime
    for index in range(len(regime.events)):
        left = (*regime.events[:index], *regime.events[index + 1 :])
        lost = without_a_save(left)
        yield _with_regime(example, events=tuple(event for event in left if event not in lost))
        # Not only with fewer steps: an event goes with its step.
        moved = in_order((*left, replace(regime.events[index], step=0, micro=0)))
        if not without_a_save(moved):
            yield _with_regime(example, events=moved)
    if regime.micro_batches > 1:
        first = tuple(event for event in regime.events if event.micro == 0)
        yield _with_regime(example, micro_batches=1, reduced=(), events=first)
        yield _with_regime(example, reduced=())
    for steps in range(1, regime.steps):
        yield _with_regime(
            example,
            steps=steps,
            events=tuple(event for event in regime.events if event.step < steps),
            eval_before=tuple(step for step in regime.eval_before if step < steps),
            eval_between=tuple(step for step in regime.eval_between if step < steps),
            frozen_at=tuple(change for change in regime.frozen_at if change[0] < steps),
        )
    plain = Regime()
    for name in (
        "eval_before",
        "eval_between",
        "idle_forwards",
        "backwards_per_forward",
        "gradient_to_none",
        "frozen_at",
    ):
        yield _with_regime(example, **{name: getattr(plain, name)})
    yield _with_regime(example, max_norm=None, norm_type=plain.norm_type)


def _plans(example: Example) -> Iterator[Example]:
    plan, plain = example.plan, Plan()
    together = {name for names in _TOGETHER for name in names}
    alone = [field.name for field in fields(Plan) if field.name not in (*together, *_GIVEN)]
    for names in (*_TOGETHER, *((name,) for name in alone)):
        yield replace(example, plan=replace(plan, **{name: getattr(plain, name) for name in names}))
    if plan.auto_wrap is not None:
        yield replace(example, plan=replace(plan, auto_wrap=None, units=example.model.units()))


def _with_model(example: Example, model: DrawnModel) -> Example:
    """The units follow the model, unless a policy chooses them."""
    return replace(example, model=model, plan=replace(example.plan, units=example.plan.units and model.units()))


def _with_regime(example: Example, **changes: Any) -> Example:
    return replace(example, regime=replace(example.regime, **changes))


def _is_whole(example: Example) -> bool:
    """True if every name in the example exists, and tied parameters have the same shape."""
    model, regime = example.model, example.regime
    untied = replace(model, ties=()).shapes()
    if any(untied.get(one, ()) != untied.get(other) for one, other in model.ties):
        return False
    names_used = {*regime.gradient_to_none, *(name for _, names in regime.frozen_at for name in names), *model.frozen}
    names_used |= {name for event in regime.events for name in event.names}
    return names_used <= {*model.shapes(), *(name for name, _ in model.walk()), *example.plan.units}
