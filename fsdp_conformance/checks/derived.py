"""
Gradients derived from the changes of the parameters, for an implementation that does not expose its gradients.

A step of SGD with learning rate l and momentum m changes a parameter p by -l * b_t, where b_t = g_t + m * b_(t-1) and
b_(-1) = 0. So the gradient is

    g_t = b_t - m * b_(t-1)        b_t = (p_(t-1) - p_t) / l

On an exact probe this is exact. Elsewhere each p is rounded, and the bound of a gradient is widened by that rounding
over l. A wrong optimizer shows as a wrong gradient, too: from outside the two cannot be told apart.

Not derivable: gradients under Adam, weight decay, clipping or loss scaling, those that are dropped before the step, and
those of a run in which users write values or change the learning rate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from fsdp_conformance.history.training import Gradients, TrainingHistory
from fsdp_conformance.references.reference_set import References
from fsdp_conformance.workload.definition import Regime, Workload
from fsdp_conformance.workload.events import HIDES_GRADIENTS

#: Options of SGD that change the rule above.
_OTHER_RULES = ("weight_decay", "dampening", "nesterov", "maximize")


@dataclass(frozen=True, slots=True)
class _Rule:
    """How SGD steps."""

    lr: float
    momentum: float


def with_derived_gradients(
    history: TrainingHistory, references: References
) -> tuple[TrainingHistory, References] | None:
    """
    The history and the references, both with derived gradients; None if the regime does not permit it.

    A parameter without a gradient in the references has none here if it does not change.
    """
    rule = _rule(references.workload, references.regime)
    absent = [_absent(record.grads or {}) for record in references.expected.steps]
    if rule is None or not all(record.params for record in history.steps):
        return None
    dropped: frozenset[str] = frozenset().union(
        *(references.regime.dropped(step) for step in range(references.regime.steps))
    )
    runs = {name: _derived(run, rule, absent, dropped) for name, run in references.histories.items()}
    largest: dict[str, Tensor] = {}
    for params in (references.expected.initial_params, *(record.params for record in references.expected.steps)):
        for name, value in params.items():
            magnitude = value.double().abs() / rule.lr
            largest[name] = torch.maximum(largest.get(name, magnitude), magnitude)
    changed = replace(references, histories=runs, gradient_bases=largest, _bounds={}, _contributions=None)
    return _derived(history, rule, absent, dropped), changed


def _rule(workload: Workload, regime: Regime) -> _Rule | None:
    if regime.max_norm is not None or regime.init_scale is not None:
        return None
    if regime.happens(*HIDES_GRADIENTS) or regime.optimizer not in workload.optimizers:
        return None
    optimizer = workload.optimizers[regime.optimizer]([nn.Parameter(torch.zeros(1))])
    (group, *others) = optimizer.param_groups
    if type(optimizer) is not torch.optim.SGD or others or any(group[option] for option in _OTHER_RULES):
        return None
    return _Rule(lr=group["lr"], momentum=group["momentum"])


def _absent(grads: Gradients) -> frozenset[str]:
    return frozenset(name for name, grad in grads.items() if grad is None)


def _derived(
    history: TrainingHistory, rule: _Rule, absent: list[frozenset[str]], dropped: frozenset[str]
) -> TrainingHistory:
    """A copy of the history whose gradients are derived; names that it does not have throughout are left out."""
    states = [history.initial_params, *(record.params for record in history.steps)]
    last_changes: dict[str, Tensor] = {}
    steps = []
    for record, (before, after), missing in zip(history.steps, pairwise(states), absent, strict=True):
        grads: Gradients = {}
        for name, value in after.items():
            if name in dropped or name not in before or before[name].shape != value.shape:
                continue
            change = (before[name].double() - value.double()) / rule.lr
            if name in missing:
                # SGD neither moves a parameter without a gradient nor ages its momentum.
                grads[name] = change.to(value.dtype) if bool(change.any()) else None
                continue
            grads[name] = (change - rule.momentum * last_changes.get(name, torch.zeros_like(change))).to(value.dtype)
            last_changes[name] = change
        steps.append(replace(record, grads=grads))
    return replace(history, steps=steps)
