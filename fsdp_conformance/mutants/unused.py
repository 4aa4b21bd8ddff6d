"""Wrong gradients of unused, frozen, empty, tied and ignored parameters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_conformance.mutants.base import SeamFSDP2
from fsdp_conformance.mutants.mutant import known_wrong
from fsdp_conformance.plan import Plan


@known_wrong("R120")
class ZeroInsteadOfNone(SeamFSDP2):
    """An unused parameter gets a gradient of zeros instead of None."""

    def after_backward(self) -> None:
        for parameter in self.parameters().values():
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)


@known_wrong("R117")
class GarbageForUnused(SeamFSDP2):
    """An unused parameter gets a garbage gradient."""

    def after_backward(self) -> None:
        for parameter in self.parameters().values():
            if parameter.requires_grad and (parameter.grad is None or not _full(parameter.grad).any()):
                parameter.grad = torch.full_like(parameter, 0.5)


@known_wrong("R117")
class KeepsUnusedUnsharded(SeamFSDP2):
    """A unit that took no part in a step stays gathered after it."""

    def after_backward(self) -> None:
        self._idle = [
            unit
            for unit in self.model.modules()
            if isinstance(unit, FSDPModule) and not any(parameter.grad is not None for parameter in unit.parameters())
        ]

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        norm = super().step(max_norm, norm_type=norm_type)
        for unit in self._idle:
            unit.unshard()
        return norm


@known_wrong("R119")
class ReducesOnlyUsed(SeamFSDP2):
    """
    Each rank reduces only the parameters it used, even if other ranks used others.

    This is FSDP2's default behaviour (pytorch#174862); declaring `unused_divergent` turns it into a defect.
    """

    capabilities: ClassVar[frozenset[str]] = frozenset({"unused_divergent"})


@known_wrong("R124")
class EmptyShardMissing(SeamFSDP2):
    """A rank with an empty shard of a parameter has no gradient for it at all."""

    def after_backward(self) -> None:
        for parameter in self.sharded().values():
            if isinstance(parameter, DTensor) and not parameter.to_local().numel():
                parameter.grad = None


@known_wrong("R111")
class FrozenGetsGradient(SeamFSDP2):
    """Frozen parameters are trained."""

    def prepare(self, model: nn.Module, plan: Plan) -> Plan:
        model.requires_grad_(True)
        return plan

    def set_requires_grad(self, frozen: Iterable[str]) -> None:
        return


@known_wrong("R072")
class FrozenReduced(SeamFSDP2):
    """Frozen units are reduced like trainable ones."""

    def after_backward(self) -> None:
        for parameter in self.sharded().values():
            if not parameter.requires_grad:
                parts = [
                    torch.zeros(self.rows_per_rank(parameter), *parameter.shape[1:]) for _ in range(self.world_size)
                ]
                dist.reduce_scatter(parts[0].clone(), parts)


@known_wrong("R106")
class TiedGradientDoubled(SeamFSDP2):
    """The gradient of a tied parameter is counted twice."""

    def local_gradient(self, name: str, grad: Tensor) -> Tensor:
        return grad * 2 if self.names.is_tied(name) else grad


@known_wrong("R106")
class Unties(SeamFSDP2):
    """Tied parameters become copies of each other."""

    def prepare(self, model: nn.Module, plan: Plan) -> Plan:
        seen: set[int] = set()
        for module in model.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in seen:
                    module._parameters[key] = nn.Parameter(parameter.detach().clone())
                elif parameter is not None:
                    seen.add(id(parameter))
        return plan


@known_wrong("R116")
class ShardsIgnored(SeamFSDP2):
    """Ignored modules are sharded and reduced anyway."""

    def prepare(self, model: nn.Module, plan: Plan) -> Plan:
        return replace(plan, ignored=())


def _full(grad: Tensor) -> Tensor:
    return grad.full_tensor() if isinstance(grad, DTensor) else grad
