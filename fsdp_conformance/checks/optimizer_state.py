"""
The optimizer's state after training, and how often an optimizer in backward stepped.

State is compared by parameter and by name of the state. Counters of steps must be equal; other tensors are bitwise
equal on exact workloads, and otherwise as close as the parameters of the references are to each other.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fsdp_conformance.checks.result import CheckResult, Tally
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.references.reference_set import Kind, References
from fsdp_conformance.references.tolerance import magnitude

#: How far a moment may be from the reference's, as a fraction of its largest element, where it is not exact. The
#: references are within 1e-6 of each other; the defects that this looks for are errors of a factor or of a step.
MOMENT_BOUND = 1e-4


def same_state(state: Mapping[str, Mapping[str, Tensor]], references: References, *, requirement: str) -> CheckResult:
    """The full optimizer state, by parameter and name, equals the reference's."""
    tally = Tally("optimizer state", requirement, rank=references.rank)
    expected = references.expected.optimizer_state
    for name, entries in expected.items():
        for key, value in entries.items():
            got = state.get(name, {}).get(key)
            where = {"fqn": name, "phase": "step"}
            if got is None:
                tally.compare(False, key, expected="a tensor", got="None", **where)
            elif got.shape != value.shape:
                tally.compare(False, f"shape of {key}", expected=tuple(value.shape), got=tuple(got.shape), **where)
            elif value.numel() == 1 and key == "step":
                tally.compare(float(got) == float(value), key, expected=float(value), got=float(got), **where)
            else:
                distance = magnitude(got.double() - value.double())
                limit = 0.0 if references.exact else _limit(references, name, value)
                tally.compare(
                    distance <= limit, key, expected=f"a difference of at most {limit:.3g}", got=f"{distance:.3g}",
                    elements=value.numel(), **where,
                )  # fmt: skip
    for name in state.keys() - expected.keys():
        tally.compare(
            False, "state", expected="none, as the reference has none", got="some", fqn=name, phase="step",
            likely="state made up for a parameter that has none: it had no gradient yet",
        )  # fmt: skip
    return tally.result()


def _limit(references: References, name: str, value: Tensor) -> float:
    """
    How far a moment may be from the expected one.

    Moments add up gradients, so they are no more exact than these: gradients that vanish leave nothing but noise.
    """
    noise = 0.0
    for record in references.expected.steps:
        if record.grads is not None and record.grads.get(name) is not None:
            limit = references.bound(Kind.GRADIENT, record.step, name).limit
            noise += 0.0 if limit is None else magnitude(limit)
    return MOMENT_BOUND * magnitude(value.double()) + noise


def stepped_once(history: TrainingHistory, *, requirement: str) -> CheckResult:
    """With the optimizer in backward, each trainable parameter's hooks were called exactly once in every step."""
    tally = Tally("steps in backward", requirement, rank=history.rank)
    for record in history.steps:
        for name, trained in history.requires_grad.items():
            if trained:
                for what, calls in (("steps", record.updates), ("calls of another hook", record.hook_calls)):
                    got = calls.get(name, 0)
                    tally.compare(got == 1, what, expected=1, got=got, step=record.step, phase="backward", fqn=name)
    return tally.result()
