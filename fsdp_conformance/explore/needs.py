"""The traffic that a step of an example needs at most, whatever schedule an engine has."""

from __future__ import annotations

from collections.abc import Collection

from fsdp_conformance.checks.traffic_bound import Needs
from fsdp_conformance.explore.example import Example
from fsdp_conformance.explore.own_model import OwnModel
from fsdp_conformance.workload.events import EVALUATIONS, FORWARDS, Action


def needs_of(example: Example, step: int) -> Needs:
    """The passes and reductions of a step, with its events and its interrupted attempts."""
    regime, plan = example.regime, example.plan
    events = list(regime.in_step(step))
    evaluations = sum(event.action in EVALUATIONS for event in events)
    begun = sum(count for _, count in regime.attempts(step))
    differentiations = sum(event.action is Action.DIFFERENTIATE for event in events)
    # A unit is gathered for a forward, and for its backward, where a checkpoint runs its forward again.
    alone = sum(event.action in FORWARDS for event in events) + differentiations * (2 + _recomputed(example))
    passes = (regime.micro_batches + begun) * (1 + regime.backwards_per_forward)
    repeats = regime.micro_batches * regime.backwards_per_forward * _recomputed(example)
    reduced = sum(regime.is_reduced(micro) for micro in range(regime.micro_batches))
    if plan.deferred_units:
        reduced = regime.micro_batches
    over_replicas = 1 if plan.defer_all_reduce else reduced
    backwards = regime.backwards_per_forward
    return Needs(
        passes=alone + passes + repeats,
        # An engine does not know that the other ranks have no gradients of parameters either when one differentiates.
        reductions=(reduced + begun) * backwards + differentiations,
        over_replicas=(over_replicas + begun) * backwards + differentiations,
        # In evaluation, nothing is recomputed, but a unit that is called twice may be gathered twice.
        evaluations=evaluations * (1 + _recomputed(example) // 2),
        frozen=_frozen(example, step),
    )


def _frozen(example: Example, step: int) -> Collection[str] | None:
    """The parameters that no backward of a step trains; None: those that the model has frozen."""
    names = example.regime.frozen(step)
    if names is None or not example.regime.attempts(step):
        return names
    # An attempt trains what the step before it did: nothing of this step has happened yet.
    before = example.regime.frozen(step - 1)
    if before is None:
        before = tuple(filter(example.model.is_frozen, example.model.shapes()))
    return set(names) & set(before)


def _recomputed(example: Example) -> int:
    """How many more passes a forward and its backward have because blocks run twice, or are recomputed."""
    model = example.model
    if isinstance(model, OwnModel):
        return 2 * (model.measured.most_calls - 1)
    twice = any(block.repeat > 1 for _, block in model.walk()) or any(len(set(c)) < len(c) for c in model.calls)
    return 2 * (twice + (model.passing.checkpointing != "none"))
