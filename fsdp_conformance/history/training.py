"""
Observations of one rank that trains a workload, with an implementation or a reference.

Tensors are detached clones on the CPU, full (unsharded), under their original FQNs. Nothing here aliases live storage.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fsdp_conformance.history.collective import CollectiveRecord
from fsdp_conformance.history.hazard import HazardRecord
from fsdp_conformance.history.memory import MemoryMark

#: FQN to full tensor, or None where there is no gradient.
Tensors = dict[str, Tensor]
Gradients = dict[str, Tensor | None]


def random_state() -> str:
    """A digest of the state of torch's random numbers on the CPU."""
    return hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:12]


#: The lists of a history that a run which continues another one adds to.
_IN_ORDER = (
    "steps", "eval_outputs", "input_grads", "reads", "states", "caught", "left_unsharded", "left_gathered",
    "drawn_by", "changed_outputs", "held_outputs", "collectives", "memory", "hazards",
)  # fmt: skip


@dataclass(kw_only=True, slots=True)
class StepRecord:
    """One optimizer step."""

    step: int
    losses: list[Tensor]
    """0-dim, one per micro-batch, of this rank."""
    grads: Gradients | None = None
    """Before clipping and before the optimizer step; None where the implementation does not expose gradients."""
    clipped_grads: Gradients | None = None
    grad_norm: Tensor | None = None
    """The total norm that the implementation returned, 0-dim."""
    loss_scale: Tensor | None = None
    """The scale of the next loss, 0-dim, in float64; None without loss scaling."""
    params: Tensors = field(default_factory=dict)
    """After the optimizer step."""
    buffers: Tensors = field(default_factory=dict)
    """After the optimizer step, of this rank."""
    outputs: list[Any] = field(default_factory=list)
    """Model outputs per micro-batch, if the case asked for them."""
    random_states: list[str] = field(default_factory=list)
    """For each micro-batch, a digest of the state of torch's random numbers on the CPU after its forward."""
    unsharded_after_forward: list[list[str] | None] = field(default_factory=list)
    """For each micro-batch, the units that held full parameters after its forward; None as below."""
    unsharded_after_backward: list[str] | None = None
    """Units that held full parameters before any gradient was read; None if the adapter raised when asked."""
    unsharded_after_step: list[str] | None = None
    """The same after the optimizer step, before any parameter was read: that may gather a unit and free it again."""
    updates: dict[str, int] = field(default_factory=dict)
    """With the optimizer in backward: how often each parameter was stepped."""
    hook_calls: dict[str, int] = field(default_factory=dict)
    """The same for the call of another hook that the user has registered before."""


@dataclass(kw_only=True, slots=True)
class TrainingHistory:
    """A whole run on one rank."""

    source: str
    """Where the observations come from: "torch-ddp", "float64", "all-reduce", or the adapter's name."""
    rank: int
    world_size: int
    initial_params: Tensors = field(default_factory=dict)
    """After setup and before the first forward."""
    initial_buffers: Tensors = field(default_factory=dict)
    shows_buffers: bool = True
    """False: the implementation has no way to read its buffers. Otherwise missing buffers are missing."""
    requires_grad: dict[str, bool] = field(default_factory=dict)
    """After setup; empty if the implementation has no way to read it."""
    final_requires_grad: dict[str, bool] = field(default_factory=dict)
    """The same after the last step."""
    steps: list[StepRecord] = field(default_factory=list)
    eval_outputs: list[Any] = field(default_factory=list)
    input_grads: list[Tensor | None] = field(default_factory=list)
    """The gradients of inputs, in order: of each micro-batch, and at each event that differentiates."""
    reads: list[Tensors] = field(default_factory=list)
    """The parameters read at each event that reads all of them, in order."""
    states: list[Tensors] = field(default_factory=list)
    """The tensors in the model's state dict at each event that takes it, in order."""
    caught: list[str] = field(default_factory=list)
    """The exception that reached the caller at each event that raises, in order: its class and text."""
    left_unsharded: list[str] = field(default_factory=list)
    """Units that were sharded before an interrupted attempt, and not after the recovery."""
    changed_outputs: list[str] = field(default_factory=list)
    """Outputs of steps, of evaluations, and state dicts, kept by the user, that later calls have changed."""
    held_outputs: list[str] = field(default_factory=list)
    """
    Outputs that still exist at the end, although the user has dropped them; without those of the last step and the last
    evaluation.
    """
    left_gathered: list[tuple[str, str]] = field(default_factory=list)
    """Units that were sharded before an event and not after it: the action, and the unit."""
    drawn_by: list[str] = field(default_factory=list)
    """Events, and "wrapping", that changed the state of random numbers; forwards in training mode may do so."""
    optimizer_state: dict[str, Tensors] = field(default_factory=dict)
    """Of a reference after the last step: parameter to name of the state to value."""
    collectives: list[CollectiveRecord] = field(default_factory=list)
    """The collectives of this run, in order, each with step and phase."""
    held_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes of local storage on this rank after the last step, by kind ("params", "optim", "grads"), each once."""
    shown_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes of the same tensors by their own sizes: less than `held_bytes` if they are views of larger storages."""
    full_bytes: dict[str, int] = field(default_factory=dict)
    """The bytes that an unsharded run holds, by the same kinds."""
    wrapped_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes of the tensors that the adapter shows after wrapping, by kind; recorded where bytes are counted."""
    memory: list[MemoryMark] = field(default_factory=list)
    """Bytes on the accelerator and the host, in order; on the CPU empty, unless the host is weighed."""
    hazards: list[HazardRecord] = field(default_factory=list)
    """Races that the simulated accelerator saw."""
    checked_accesses: int | None = None
    """Memory accesses that it checked; None on a device that checks none."""
    checked_streams: int = 0
    """Streams of the rank's simulated device that it used."""
    seconds: float = 0.0
    """Wall time of the steps alone."""

    def without_norms(self) -> TrainingHistory:
        """The same run, as if it had returned no norms."""
        return replace(self, steps=[replace(record, grad_norm=None, clipped_grads=None) for record in self.steps])

    def continued_by(self, later: TrainingHistory) -> TrainingHistory:
        """This run and the one that trained its later steps, as one: what is held is what the later run holds."""
        whole = replace(
            later,
            initial_params=self.initial_params,
            initial_buffers=self.initial_buffers,
            requires_grad=self.requires_grad,
            seconds=self.seconds + later.seconds,
        )
        for name in _IN_ORDER:
            setattr(whole, name, [*getattr(self, name), *getattr(later, name)])
        return whole
