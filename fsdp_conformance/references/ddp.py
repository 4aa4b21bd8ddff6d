"""
torch's DistributedDataParallel, as users run it: the contract's reference.

Its settings decide what is compared: buffers are not broadcast in forward (each rank keeps its own, as sharded engines
do), find_unused_parameters is set only if the workload or the regime has unused parameters, deferred micro-batches use
no_sync, and parameters that belong to one rank are on DDP's list of ignored ones.

DDP does not support every regime: `ddp_absence` names the exceptions, in which there are only the other two references.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.references.all_reduce import gathered
from fsdp_conformance.references.loop import Reference, Replica
from fsdp_conformance.workload.definition import Regime, Workload

#: Each rank keeps its own buffers in forward. torch 2.13 renamed the argument and warns about the old name.
_KEEP_BUFFERS: dict[str, Any] = {
    next(
        word
        for word in ("forward_sync_buffers", "broadcast_buffers")
        if word in inspect.signature(DistributedDataParallel.__init__).parameters
    ): False
}


class DDP(Reference):
    """One replica per process, inside DistributedDataParallel."""

    name = "torch-ddp"

    def __init__(self, workload: Workload, regime: Regime, **rest: Any) -> None:
        super().__init__(workload, regime, **rest)
        self.wrapped = self._wrap()
        self.scaler = torch.amp.GradScaler(
            self.device.type,
            init_scale=regime.init_scale or 1.0,
            growth_interval=regime.growth_interval,
            enabled=regime.init_scale is not None,
        )

    def call(self, replica: Replica) -> Callable[..., Any]:
        return self.wrapped

    def accumulate(self, replica: Replica, reduced: bool) -> AbstractContextManager[Any]:
        return nullcontext() if reduced else self.wrapped.no_sync()

    def reduce(self, micro: int, reduced: bool) -> None:
        """DDP has reduced in backward."""

    def refrozen(self) -> None:
        # DDP records which parameters require a gradient at construction: its reducer would wait for any that is
        # frozen later, and never reduce any that is unfrozen later. A new one broadcasts rank 0's parameters and
        # buffers, which is wrong in mid-training, when buffers differ between ranks. torch 2.6 cannot be told not to.
        buffers = list(self.replicas[0].module.buffers())
        values_before = [buffer.clone() for buffer in buffers]
        self.wrapped = self._wrap()
        with torch.no_grad():
            for buffer, value in zip(buffers, values_before, strict=True):
                buffer.copy_(value)

    def clip(self, replica: Replica, max_norm: float) -> Tensor:
        params = list(replica.params.values())
        if not self.workload.local_params:
            return torch.nn.utils.clip_grad_norm_(params, max_norm, self.regime.norm_type)
        # torch's function would take this rank's experts for all of them, and ranks would clip differently.
        norm = self.total_norm(replica)
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)
        return norm

    def gather_norms(self, norms: list[Tensor]) -> list[Tensor]:
        return gathered(norms)

    def scaled(self, replica: Replica, loss: Tensor) -> Tensor:
        return self.scaler.scale(loss)

    def scaled_update(self, replica: Replica) -> None:
        for optimizer in replica.optimizers:
            self.scaler.unscale_(optimizer)
        self._clip(replica)
        for optimizer in replica.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        replica.scale = self.scaler.get_scale()

    def _wrap(self) -> DistributedDataParallel:
        replica = self.replicas[0]
        if replica.local:
            ignore: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
            ignore(replica.module, list(replica.local))
        return DistributedDataParallel(
            replica.module,
            **_KEEP_BUFFERS,
            find_unused_parameters=self.regime.unused_parameters or "unused" in self.workload.traits,
        )


def ddp_absence(workload: Workload, regime: Regime) -> str | None:
    """The reason why DDP cannot be a reference here, or None."""
    if not any(param.requires_grad for param in workload.build(0).parameters()):
        return "DDP rejects models in which no parameter requires a gradient"
    if regime.backwards_per_forward > 1:
        return "DDP reduces only in the first of several backwards of one forward"
    return None


def ddp_reference(
    workload: Workload, regime: Regime, *, rank: int, world_size: int, device: torch.device | str = "cpu"
) -> TrainingHistory:
    """This rank's history. Collective over the default process group."""
    return DDP(workload, regime, ranks=[rank], world_size=world_size, device=device).train()[0]
