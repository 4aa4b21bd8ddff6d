"""
The negative control of a run: values that are wrong on purpose, which must come out as findings.

A comparison that sees nothing passes every engine. So the ranks of one case also send a training with a wrong loss, one
with a wrong gradient and one with a wrong parameter, in the same way as all values, and each must be noticed.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fsdp_conformance.history.training import StepRecord, TrainingHistory

#: The kinds of values of which one is wrong.
KINDS = ("loss", "gradient", "parameter")

CHECK = "negative control"


def wrong_on_purpose(run: TrainingHistory, kind: str) -> TrainingHistory | None:
    """The run with one wrong value of that kind in its last step; None if it shows none."""
    last = run.steps[-1]
    match kind:
        case "loss":
            changed: StepRecord | None = replace(last, losses=[*last.losses[:-1], last.losses[-1] + 1])
        case "gradient":
            gradients = {name: grad for name, grad in (last.grads or {}).items() if grad is not None}
            changed = replace(last, grads={**(last.grads or {}), **_with_one_wrong(gradients)}) if gradients else None
        case _:
            changed = replace(last, params={**last.params, **_with_one_wrong(last.params)})
    return None if changed is None else replace(run, steps=[*run.steps[:-1], changed])


def _with_one_wrong(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The first of the tensors that has elements, with one of them changed."""
    name, tensor = next((name, tensor) for name, tensor in tensors.items() if tensor.numel())
    wrong = tensor.clone()
    wrong.view(-1)[-1] += 1
    return {name: wrong}
