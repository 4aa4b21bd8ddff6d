"""
The expected content of a checkpoint: state dicts of the unwrapped model and its optimizer, trained in one process.

Every step adds the gradients of all ranks, and the number of ranks may change between steps, as it does for a training
that is resumed elsewhere. There are no collectives, and nothing is shared with an engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_conformance.errors import ConfigError, ReferencesDisagree
from fsdp_conformance.references.exactness import INEXACT_WORLD_SIZES
from fsdp_conformance.references.structures import placed
from fsdp_conformance.workload.definition import BatchKey, Workload


@dataclass(frozen=True, slots=True)
class PlainState:
    """The unwrapped training at one moment."""

    model: dict[str, Any]
    """The module's state dict, cloned."""
    optimizer: dict[str, Any]
    """{"state": {name: {key: value}}, "param_groups": [{"params": [names], ...}]}, cloned."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """The gradients of the last step, by name; empty before the first step."""


def plain_training(
    workload: Workload, worlds: Sequence[int], *, optimizer: str = "sgd", dtype: torch.dtype = torch.float32
) -> list[PlainState]:
    """
    The states before the first step and after each one; step k has the batches of `worlds[k]` ranks.

    Raises ReferencesDisagree if float32 and float64 differ where they must not: on an exact workload under SGD.
    """
    states = _train(workload, worlds, optimizer, dtype)
    if dtype is torch.float32 and is_exact(workload, worlds, optimizer):
        for step, (state, twin) in enumerate(
            zip(states, _train(workload, worlds, optimizer, torch.float64), strict=True)
        ):
            for name, value in state.model.items():
                if isinstance(value, Tensor) and not torch.equal(value.double(), twin.model[name].double()):
                    raise ReferencesDisagree(
                        f"{name} after {step} steps differs between float32 and float64 [{workload.name}, ranks "
                        f"{tuple(worlds)}]. It cannot judge an implementation."
                    )
    return states


def is_exact(workload: Workload, worlds: Sequence[int], optimizer: str) -> bool:
    """True if every correct training gives the same bits."""
    return (
        workload.exact
        and optimizer == "sgd"
        and len(worlds) <= workload.exact_steps
        and not INEXACT_WORLD_SIZES.intersection(worlds)
    )


def named_optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The state dict of an optimizer over the parameters of a model, with their names in place of numbers; cloned."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        settings = {key: _clone(value) for key, value in group.items() if key != "params"}
        groups.append({**settings, "params": [names[id(parameter)] for parameter in group["params"]]})
    state = {
        names[id(parameter)]: {key: _clone(value) for key, value in entries.items()}
        for parameter, entries in optimizer.state.items()
    }
    return {"state": state, "param_groups": groups}


def _train(workload: Workload, worlds: Sequence[int], optimizer: str, dtype: torch.dtype) -> list[PlainState]:
    if workload.local_params or "batch_norm" in workload.traits:
        raise ConfigError(
            ["every rank must have the same model: no local parameters, no running statistics"], where=workload.name
        )
    model = workload.build(0).to(dtype)
    stepper = workload.optimizers[optimizer](list(model.parameters()))
    states = [_state(model, stepper)]
    for step, world_size in enumerate(worlds):
        for rank in range(world_size):
            key = BatchKey(step=step, rank=rank, world_size=world_size)
            batch = placed(workload.batch(key), torch.device("cpu"), dtype)
            workload.loss(model(*batch.args, **batch.kwargs), batch).backward()  # type: ignore[no-untyped-call]
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(world_size)
        gradients = {name: _clone(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        stepper.step()
        stepper.zero_grad(set_to_none=True)
        states.append(replace(_state(model, stepper), gradients=gradients))
    return states


def _state(model: nn.Module, optimizer: Optimizer) -> PlainState:
    values = {name: _clone(value) for name, value in model.state_dict().items()}
    return PlainState(values, named_optimizer_state(model, optimizer))


def _clone(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
