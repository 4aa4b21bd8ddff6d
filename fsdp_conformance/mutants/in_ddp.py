"""torch's DistributedDataParallel, each with one defect."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from fsdp_conformance.adapters.vendors.torch_ddp import TorchDDP
from fsdp_conformance.mutants.base import SeamDDP
from fsdp_conformance.mutants.mutant import known_wrong
from fsdp_conformance.plan import Plan

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


@known_wrong("R121", "R119", name="ddp-divides-by-users")
class DDPDividesByUsers(TorchDDP):
    """The mean is over the ranks that used a parameter, instead of over all of them."""

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        self._used: set[str] = set()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_hook(partial(self._note, name))  # type: ignore[no-untyped-call]
        return super().wrap(model, plan)

    def _note(self, name: str, grad: Tensor) -> None:
        self._used.add(name)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        super().backward(loss, retain_graph=retain_graph)
        for name, parameter in self.parameters().items():
            users = torch.tensor(float(name in self._used))
            dist.all_reduce(users)
            if parameter.grad is not None and users > 0:
                parameter.grad *= dist.get_world_size() / float(users)
        self._used.clear()


@known_wrong("R005", "R003", name="zero1-sums-gradients")
class ZeRO1SumsGradients(SeamDDP):
    """Only the optimizer is said to be sharded, and gradients are summed over ranks instead of averaged."""

    capabilities: ClassVar[frozenset[str]] = frozenset({"zero1"})

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        super().backward(loss * dist.get_world_size(), retain_graph=retain_graph)


@known_wrong("R005", "R003", name="zero1-forgets-a-rank")
class ZeRO1ForgetsARank(SeamDDP):
    """Only the optimizer is said to be sharded, and the gradients of the last rank count for nothing."""

    capabilities: ClassVar[frozenset[str]] = frozenset({"zero1"})

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        counts = float(dist.get_rank() < dist.get_world_size() - 1)
        super().backward(loss * counts, retain_graph=retain_graph)
