"""torch's DistributedDataParallel, each with one defect."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from fsdp_conformance.adapters.torch_ddp import TorchDDP
from fsdp_conformance.config import Plan
from fsdp_conformance.mutants.mutant import known_wrong

#: Untyped, because torch's annotation leaves out None, the default group.
_averaged: Any = allreduce_hook


def _all_but_the_last(bucket: Any) -> Future[Tensor]:
    if not bucket.is_last():
        averaged: Future[Tensor] = _averaged(None, bucket)
        return averaged
    done: Future[Tensor] = Future()
    done.set_result(bucket.buffer())
    return done


@known_wrong("R003", name="ddp-keeps-last-bucket")
class DDPKeepsLastBucket(TorchDDP):
    """Gradients in the last bucket are not reduced."""

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        wrapped = super().wrap(model, plan)
        if isinstance(wrapped, DistributedDataParallel):
            # DDP compares annotations, which are text here: a lambda has none.
            wrapped.register_comm_hook(None, lambda state, bucket: _all_but_the_last(bucket))
        return wrapped
