"""
torch's DistributedDataParallel, as users know it: the reference of the contract.

Stated, because it decides what is compared: buffers are not broadcast in forward (each rank keeps its own, as sharded
engines do), find_unused_parameters only where the workload or the regime has unused parameters, no_sync for deferred
micro-batches. Parameters that belong to one rank are left to DDP's own list of ignored ones.

DDP has corners in which it is no reference: `ddp_absence` names them, and then the other two judge.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fsdp_conformance.checks.loop import Reference, Replica
from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.workload import Regime, Workload

#: Each rank keeps its own buffers in forward. torch 2.13 has another word for it, and warns of the old one.
_KEEP_BUFFERS: dict[str, Any] = {
    next(
        word
        for word in ("forward_sync_buffers", "broadcast_buffers")
        if word in inspect.signature(DistributedDataParallel.__init__).parameters
    ): False
}


class DDP(Reference):
    """One replica a process, inside DistributedDataParallel."""

    name = "torch-ddp"

    def __init__(self, workload: Workload, regime: Regime, **rest: Any) -> None:
        super().__init__(workload, regime, **rest)
        self.wrapped = self._wrap(first=True)

    def call(self, replica: Replica) -> Callable[..., Any]:
        return self.wrapped

    def accumulate(self, replica: Replica, reduced: bool) -> AbstractContextManager[Any]:
        return nullcontext() if reduced else self.wrapped.no_sync()

    def reduce(self, micro: int, reduced: bool) -> None:
        """DDP has reduced in backward."""

    def refrozen(self) -> None:
        # DDP notes what requires a gradient when it is built: what is frozen later would leave its reducer waiting,
        # and what is thawed later would stay local.
        self.wrapped = self._wrap(first=False)

    def clip(self, replica: Replica, max_norm: float) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(list(replica.params.values()), max_norm, self.regime.norm_type)

    def _wrap(self, *, first: bool) -> DistributedDataParallel:
        replica = self.replicas[0]
        if replica.local:
            ignore: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
            ignore(replica.module, list(replica.local))
        return DistributedDataParallel(
            replica.module,
            **_KEEP_BUFFERS,
            find_unused_parameters=self.regime.unused_parameters or "unused" in self.workload.traits,
            # Broadcasts rank 0's parameters: wrong in the middle of training, where buffers of ranks differ.
            init_sync=first,
        )


def ddp_absence(workload: Workload, regime: Regime) -> str | None:
    """Why DDP is no reference here, or None."""
    if not any(param.requires_grad for param in workload.build(0).parameters()):
        return "no parameter requires a gradient, which DDP refuses"
    if regime.backwards_per_forward > 1:
        return "several backwards of one forward: DDP reduces in the first one only"
    return None


def ddp_reference(
    workload: Workload, regime: Regime, *, rank: int, world_size: int, device: torch.device | str = "cpu"
) -> TrainingHistory:
    """This rank's history. Collective over the default process group."""
    return DDP(workload, regime, ranks=[rank], world_size=world_size, device=device).train()[0]
