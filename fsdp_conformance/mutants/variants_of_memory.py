"""Correct variants of FSDP2 that hold more memory: buffers, copies and state that they declare or show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_conformance.adapters.base import OptimFn
from fsdp_conformance.adapters.sharded import local_part
from fsdp_conformance.adapters.vendors.torch_fsdp2 import TorchFSDP2
from fsdp_conformance.mutants.mutant import legal_variant


class _Weighs(TorchFSDP2):
    """FSDP2 that holds additional memory."""

    def largest_unit(self) -> int:
        """The elements of the largest unit below the root."""
        units = [nn.ModuleList(map(self.names.modules.__getitem__, unit.split("+"))) for unit in self.plan.units]
        return max((sum(map(Tensor.numel, unit.parameters())) for unit in units), default=0)

    def shards(self) -> list[Tensor]:
        """This rank's shards."""
        return [local_part(parameter).detach() for parameter in self.parameters().values()]


@legal_variant("torch-fsdp2")
class GathersIntoBuffers(_Weighs):
    """Has buffers for two gathered units from wrap on."""

    kept_buffers: ClassVar[int] = 2

    def make_optimizer(self, optim_fn: OptimFn) -> Any:
        self.buffers = [torch.ones(self.largest_unit(), device=self.device) for _ in range(2)]
        return super().make_optimizer(optim_fn)


@legal_variant("torch-fsdp2")
class PoolsBuffers(_Weighs):
    """Caches a buffer in each step, until it has two."""

    kept_buffers: ClassVar[int] = 2

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        super().backward(loss, retain_graph=retain_graph)
        self.pool = [*getattr(self, "pool", []), torch.ones(self.largest_unit(), device=self.device)][-2:]


@legal_variant("torch-fsdp2")
class StagesShards(_Weighs):
    """On an accelerator, keeps pinned memory as large as its shards."""

    def make_optimizer(self, optim_fn: OptimFn) -> Any:
        if self.device.type != "cpu":
            self.staged = [torch.ones_like(shard, device="cpu").pin_memory() for shard in self.shards()]
        return super().make_optimizer(optim_fn)


@legal_variant("torch-fsdp2")
class ShowsItsMasters(_Weighs):
    """Keeps a second copy of its shards in float32, as engines that compute in low precision do, and shows it."""

    masters: Sequence[Tensor] = ()

    def make_optimizer(self, optim_fn: OptimFn) -> Any:
        self.masters = [shard.clone() for shard in self.shards()]
        return super().make_optimizer(optim_fn)

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        norm = super().step(max_norm, norm_type=norm_type)
        for master, shard in zip(self.masters, self.shards(), strict=True):
            master.copy_(shard)
        return norm

    def local_tensors(self) -> dict[str, list[Tensor]]:
        return {**super().local_tensors(), "master": list(self.masters)}


@legal_variant("torch-fsdp2")
class AllocatesStateEarly(_Weighs):
    """Creates the optimizer's state when it wraps, by a step with gradients of zero and a learning rate of zero."""

    #: It has state for parameters that have never had a gradient.
    declines: ClassVar[frozenset[str]] = frozenset({"full_optim_state"})

    def make_optimizer(self, optim_fn: OptimFn) -> Any:
        optimizer = super().make_optimizer(optim_fn)
        if all(map(_is_sharded, self.model.parameters())):
            rates = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = 0.0
                for parameter in group["params"]:
                    parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            for state in optimizer.state.values():
                if isinstance(state.get("step"), Tensor):
                    state["step"].zero_()
        return optimizer


def _is_sharded(parameter: nn.Parameter) -> bool:
    """True for a parameter that an optimizer can step, together with others of its kind."""
    return isinstance(parameter, DTensor) and parameter.is_floating_point()
